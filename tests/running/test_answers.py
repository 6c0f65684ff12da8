import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import l0prune
from l0prune.data.dataset import Tensors
from l0prune.errors import UsageError
from l0prune.running.sources import has_targets, loss_of_mean


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))


class Plain(Dataset):
    """Examples that are tensors, without a target."""

    def __init__(self, inputs):
        self.inputs = inputs

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index]


def sources(x):
    nothing = torch.zeros(len(x), 1)
    return {
        "a pair of tensors": (x, nothing),
        "a dataset": TensorDataset(x, nothing),
        "batches": [(x[:5], nothing[:5]), (x[5:], nothing[5:])],
        "inputs alone": DataLoader(list(x), batch_size=4),
        "a tensor of inputs": x,
        "batches of inputs": [x[:5], x[5:]],
        "a dataset of inputs": TensorDataset(x),
        "a dataset of plain tensors": Plain(x),
        "batches of a dataset of inputs": DataLoader(TensorDataset(x), batch_size=4),
        "mappings": [{"input": x, "labels": nothing}],
    }


def in_order(source):
    batches = source.batches(3) if hasattr(source, "batches") else source
    inputs, targets = zip(*batches, strict=True)
    inputs = [each["input"] if isinstance(each, dict) else each for each in inputs]
    return torch.cat(inputs), torch.cat(targets)


@pytest.mark.parametrize("kind", sources(torch.zeros(7, 3)))
def test_targets_are_what_the_network_answers_in_eval_mode(kind):
    model, x = network(), torch.randn(7, 3)
    given = sources(x)[kind]
    if kind == "a pair of tensors":
        given = Tensors(*given)
    task = l0prune.with_pseudo_labels((given, given), model, batch_size=3)
    assert model.training
    expected = model.eval()(x)
    for part in (task.train, task.test):
        inputs, targets = in_order(part)
        assert torch.equal(inputs, x)
        torch.testing.assert_close(targets, expected.detach())
        assert not targets.requires_grad
    alone = l0prune.with_pseudo_labels(given, model, batch_size=3)
    assert torch.equal(in_order(alone.train)[1], in_order(task.train)[1])
    assert alone.test is None


@pytest.mark.parametrize("kind", sources(torch.zeros(7, 3)))
def test_the_loss_of_the_mean_of_the_answers_is_their_variance(kind):
    model, x = network().eval(), torch.randn(7, 3)
    given = sources(x)[kind]
    given = Tensors(*given) if kind == "a pair of tensors" else given
    task = l0prune.with_pseudo_labels((given, given), model, batch_size=3)
    answers = in_order(task.test)[1]
    expected = F.mse_loss(answers.mean(0).expand_as(answers), answers)
    assert loss_of_mean(task) == pytest.approx(float(expected))
    assert loss_of_mean(replace(task, loss="l1")) is None
    assert loss_of_mean(replace(task, test=None)) is None


def test_a_run_that_ends_no_nearer_than_the_mean_says_so(capsys):
    torch.manual_seed(0)
    model, x = network().eval(), torch.randn(64, 3)
    task = l0prune.with_pseudo_labels((x, x), model)
    l0prune.gate(model, x)
    given = {"epochs": 1, "learn": False, "optimizer": "sgd", "ema": 0}
    l0prune.finetune(copy.deepcopy(model), task, lr=1e-4, **given)
    assert "no less than that" not in capsys.readouterr().err
    with torch.no_grad():
        model[3].bias.add_(5)
    l0prune.finetune(model, task, lr=1e-4, **given)
    assert "no less than that of a network that always answers" in capsys.readouterr().err


@pytest.mark.parametrize("kind", sources(torch.zeros(7, 3)))
def test_inputs_alone_are_told_from_pairs(kind):
    given = sources(torch.randn(7, 3))[kind]
    given = Tensors(*given) if kind == "a pair of tensors" else given
    paired = {"a pair of tensors", "a dataset", "batches", "mappings"}
    assert has_targets((given, given)) == has_targets(given) == (kind in paired)
    assert not has_targets({"input": torch.zeros(7, 3)})
    assert not has_targets([{"input": torch.zeros(7, 3)}])


@pytest.mark.parametrize("kind", sources(torch.zeros(7, 3)))
def test_examples_that_are_held_out_are_not_learned_from(kind):
    model, x = network().eval(), torch.randn(7, 3)
    given = sources(x)[kind]
    given = Tensors(*given) if kind == "a pair of tensors" else given
    held = [{"input": x[5:6]} if kind == "mappings" else x[5:6], x[[0]]]
    task = l0prune.with_pseudo_labels((given, given), model, batch_size=3, held_out=held)
    inputs, targets = in_order(task.train)
    assert torch.equal(inputs, x[[1, 2, 3, 4, 6]])
    torch.testing.assert_close(targets, model(inputs).detach())
    assert len(in_order(task.test)[0]) == 7


@pytest.mark.parametrize("kind", ["a tensor of inputs", "a dataset of inputs"])
def test_inputs_alone_are_shuffled_with_their_answers(kind):
    x = torch.randn(7, 3)
    task = l0prune.with_pseudo_labels(sources(x)[kind], network().eval())
    ((inputs, answers),) = task.train.batches(7, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(inputs, x)
    torch.testing.assert_close(answers, network().eval()(inputs).detach())


def test_a_network_learns_its_own_answers_back_without_a_label():
    """Half of the hidden units are copies of the others: so half of them can do all the work."""
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        for tensor in (model[0].weight, model[0].bias):
            tensor[4:] = tensor[:4]
    x = torch.randn(256, 3)
    task = l0prune.with_pseudo_labels((DataLoader(list(x), 64), [x]), model)
    assert (task.loss, task.metric_name) == ("mse", "test_loss")
    assert l0prune.evaluate(model, task)["test_loss"] == pytest.approx(0, abs=1e-12)
    l0prune.gate(model, x, exclude=["*.in"])
    l0prune.finetune(model, task, budget="params=0.5", epochs=40, lr=2e-2, ema=0, progress=False)
    small = l0prune.export(model).module
    assert sum(p.numel() for p in small.parameters()) <= 0.5 * (32 + 18)
    assert l0prune.evaluate(small, task)["test_loss"] < 0.05 * task.test[0][1].var()


def test_the_loss_that_the_data_names_stays():
    task = l0prune.with_pseudo_labels(
        l0prune.Task([torch.zeros(2, 3)], loss="l1", metric="mae"), network()
    )
    assert (task.loss, task.metric, task.test) == ("l1", "mae", None)


class Several(nn.Module):
    """An affine map, its square in another shape, and a state that has no row for each example."""

    def __init__(self, state):
        super().__init__()
        self.linear, self.state = nn.Linear(3, 4), state

    def forward(self, x):
        y = self.linear(x)
        return (y, y.view(-1, 2, 2) ** 2, y.argmax(1), *([y.sum(0)] if self.state else []))


def test_several_outputs_are_answers_in_one_row():
    model, x = Several(state=False), torch.randn(7, 3)
    task = l0prune.with_pseudo_labels((x, x), model, batch_size=3)
    y = model.linear(x).detach()
    torch.testing.assert_close(in_order(task.test)[1], torch.cat([y, y**2], 1))
    assert l0prune.evaluate(model, task)["test_loss"] == pytest.approx(0, abs=1e-12)
    with torch.no_grad():
        model.linear.bias += 1
    wanted = sum(
        each.square().mean() / of.var(0, correction=0).mean()
        for each, of in ((torch.ones_like(y), y), (2 * y + 1, y**2))
    )
    assert l0prune.evaluate(model, task)["test_loss"] == pytest.approx(wanted.item() / 2, rel=1e-5)


def test_only_named_outputs_are_answers():
    model, x = Several(state=True), torch.randn(7, 3)
    task = l0prune.with_pseudo_labels((x, x), model, outputs=["output_0"])
    torch.testing.assert_close(in_order(task.test)[1], model.linear(x).detach())
    with torch.no_grad():
        model.linear.bias += 2
    assert l0prune.evaluate(model, task)["test_loss"] == pytest.approx(4, rel=1e-5)


def test_answers_without_a_row_for_each_example_are_refused():
    with pytest.raises(UsageError, match=r"returns a tuple.*a row for each example"):
        l0prune.with_pseudo_labels([torch.zeros(2, 3)], Several(state=True))
