"""Exits on a network: where they go, what they learn by, and what is refused."""

import copy

import pytest
import small_task
import torch
import torch.nn.functional as F
from stacks import stack
from torch import nn

import l0prune
from l0prune.errors import AlreadyGated, UsageError
from l0prune.features.exits.network import ExitLoss, ExitOutputs, PooledLinear
from l0prune.running.task import Task
from l0prune.training.run import with_own_loss

X = torch.randn(5, small_task.FEATURES, generator=torch.Generator().manual_seed(3))


def with_exits(**kwargs):
    return l0prune.add_exits(stack(), (X,), **kwargs)


def test_the_network_stays_as_it_was():
    model = stack().train()
    before = copy.deepcopy(model)
    random = torch.get_rng_state()
    exits = l0prune.add_exits(model, (X,))
    assert torch.equal(random, torch.get_rng_state())
    assert exits.network is model
    assert model.training
    assert exits.training
    assert not small_task.differing(small_task.tensors(before), small_task.tensors(model))
    assert torch.equal(model(X), exits(X).logits)
    assert not any(module._forward_hooks for module in model.modules())


def test_exits_read_what_their_modules_return():
    model = with_exits(at=["blocks.1", "blocks.0"])
    assert model.at == ("blocks.0", "blocks.1")
    stream = model.network.blocks[0](model.network.stem(X))
    outputs = model(X)
    assert torch.equal(outputs.exits[0], model.heads[0].linear(stream))
    assert torch.equal(outputs.exits[1], model.heads[1].linear(model.network.blocks[1](stream)))


def test_they_stand_at_equal_steps_of_the_work():
    assert with_exits(at=1).at == ("blocks.1",)
    assert with_exits(at=3).at == ("blocks.0", "blocks.1", "blocks.2")


def test_stages_come_first():
    model = nn.Sequential(stack(blocks=3).blocks, nn.Linear(12, 8), stack(blocks=3, width=8).blocks)
    exits = l0prune.add_exits(nn.Sequential(model, nn.Linear(8, 3)), torch.randn(2, 12), at=1)
    assert exits.at == ("0.0.2",)


def test_the_pooled_head_is_a_mean_and_a_linear():
    head = PooledLinear(4, 3, dim=1, dims=4)
    x = torch.randn(2, 4, 5, 6)
    assert torch.allclose(head(x), head.linear(x.flatten(2).mean(2)))


def test_the_loss_is_its_formula():
    model = with_exits(weights=[0.3, 2.0], distill=0.25, temperature=3.0)
    generator = torch.Generator().manual_seed(0)
    last, first, second = (torch.randn(4, 3, generator=generator) for _ in range(3))
    targets = torch.tensor([0, 1, 2, 1])
    expected = F.cross_entropy(last, targets)
    for weight, answer in ((0.3, first), (2.0, second)):
        p, q = (last / 3).softmax(1), (answer / 3).softmax(1)
        taught = 9 * (p * (p.log() - q.log())).sum(1).mean()
        expected += weight * (0.75 * F.cross_entropy(answer, targets) + 0.25 * taught)
    loss = ExitLoss(model, F.cross_entropy)(ExitOutputs(last, (first, second)), targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_last_exit_learns_nothing_from_being_a_teacher():
    model = with_exits(distill=1.0)
    outputs = model(X)
    loss = ExitLoss(model, lambda *_: torch.zeros(()))(outputs, None)
    loss.backward()
    assert model.network.last.weight.grad is None
    assert model.heads[0].linear.weight.grad.abs().max() > 0


def test_finetune_learns_by_that_loss_and_reports_on_the_last_exit():
    model, targets = with_exits(), torch.tensor([0, 1, 2, 1, 0])
    task = with_own_loss(Task.of(small_task.data()), model)
    outputs = model.eval()(X)
    expected = ExitLoss(model, F.cross_entropy)(outputs, targets)
    assert torch.equal(task.loss_in(outputs, targets), expected)
    wrong = (outputs.logits.argmax(1) != targets).float()
    assert torch.equal(task.loss_and_metric(outputs, targets)["error"], wrong)
    plain = Task.of(small_task.data())
    assert with_own_loss(plain, stack()) is plain


@pytest.mark.slow
def test_all_exits_learn_with_gates():
    model = with_exits()
    data = small_task.data()
    test = data.test
    l0prune.gate(model, (X,))
    settings = {"epochs": 6, "batch_size": 16, "lr": 1e-2, "start": "alike", "ema": 0.0}
    history = l0prune.finetune(model, data, lam=1e-4, **settings)
    with torch.no_grad():
        last, exits = model.eval()(test.inputs)
    answers = [each.argmax(1) for each in (*exits, last)]
    errors = [(answer != test.targets).float().mean().item() for answer in answers]
    assert history.last["error"] == pytest.approx(errors[-1])
    assert max(errors) < 0.15


REFUSED = {
    "no block that repeats": (small_task.network, {}),
    "ends of 3 repeated blocks": (stack, {"at": 4}),
    "is no place for an exit": (stack, {"at": "blocks.1.inner"}),
    "matches no module": (stack, {"at": "layers.*"}),
    "3 heads for 2 exits": (stack, {"heads": [nn.Linear(12, 3)] * 3}),
    "does not take what it is to read": (stack, {"heads": [nn.Linear(11, 3), nn.Linear(12, 3)]}),
    "all exits give answers of one shape": (stack, {"heads": [nn.Linear(12, 3), nn.Linear(12, 2)]}),
    "3 weights for 2 exits": (stack, {"weights": [1.0, 1.0, 1.0]}),
    "distill must be": (stack, {"distill": 1.5}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_makes_no_sense_is_refused(said):
    make, kwargs = REFUSED[said]
    with pytest.raises(UsageError, match=said):
        l0prune.add_exits(make(), (X,), **kwargs)


def test_several_outputs_are_refused():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = stack()

        def forward(self, x):
            return self.one(x), x

    with pytest.raises(UsageError, match="returns 2 tensors"):
        l0prune.add_exits(Both(), (X,))


def test_what_is_called_twice_is_no_place():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = stack()

        def forward(self, x):
            return self.one.last(self.one.blocks(self.one.blocks(self.one.stem(x))))

    with pytest.raises(UsageError, match="it is called several times"):
        l0prune.add_exits(Twice(), (X,), at="one.blocks.2")


def test_exits_come_before_gates():
    with pytest.raises(AlreadyGated):
        l0prune.add_exits(small_task.gated(), (X,))
    with pytest.raises(UsageError, match="has exits already"):
        l0prune.add_exits(with_exits(), (X,))


def test_answers_in_places_need_heads_of_their_own():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.last = stack().blocks, nn.Linear(12, 3)

        def forward(self, x):
            return self.last(self.blocks(x))

    x = torch.randn(2, 7, 12)
    with pytest.raises(UsageError, match="of your own, one for each exit"):
        l0prune.add_exits(Dense(), (x,))
    found = l0prune.add_exits(Dense(), (x,), heads=[nn.Linear(12, 3), nn.Linear(12, 3)])
    assert found(x).exits[0].shape == (2, 7, 3)
