import copy
from dataclasses import replace

import pytest
import torch
from handmade import bank, gated, lenet, lenet_plan, mlp, mlp_plan

from l0prune.gating.attaching import gates_of
from l0prune.gating.bank import Gates
from l0prune.gating.kinds.continuous_sparsification import ContinuousSparsification
from l0prune.gating.kinds.hard_concrete import HardConcrete


def model_and_gates():
    model = gated(mlp(), mlp_plan())
    return model, gates_of(model), torch.ones(4, 12)


def test_each_forward_in_train_mode_draws_once():
    model, gates, x = model_and_gates()
    seen = []
    for _ in range(3):
        model(x)
        seen.append(gates.current().clone())
        assert torch.equal(gates.current(), seen[-1])
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_the_sample_is_the_gates_own():
    model, gates, x = model_and_gates()
    torch.manual_seed(3)
    model(x)
    torch.manual_seed(3)
    epsilon = torch.finfo(torch.float32).eps
    u = torch.empty(gates.plan.size).uniform_(epsilon, 1 - epsilon)
    assert torch.equal(gates.current(), gates.gate.sample(gates.log_alpha, u))


def test_eval_mode_uses_the_estimate_and_follows_every_change():
    model, gates, x = model_and_gates()
    model.eval()
    model(x)
    assert torch.equal(gates.current(), gates.gate.estimate(gates.log_alpha))
    with torch.no_grad():
        gates.log_alpha.add_(1.0)
    assert torch.equal(gates.current(), gates.gate.estimate(gates.log_alpha))
    gates.log_alpha.data.zero_()  # unseen by the version counter, but the next forward looks
    model(x)
    assert torch.equal(gates.current(), gates.gate.estimate(torch.zeros(gates.plan.size)))
    gates.load_state_dict({"log_alpha": torch.full((gates.plan.size,), 2.0)}, assign=True)
    assert torch.equal(gates.current(), gates.gate.estimate(gates.log_alpha))


def test_another_gate_in_its_place_counts_at_once():
    gates = model_and_gates()[1]
    gates.gate = ContinuousSparsification()
    soft = gates.current().clone()
    gates.gate = gates.gate.at(0.5)
    hard = gates.current()
    torch.testing.assert_close(soft, gates.log_alpha.sigmoid())
    torch.testing.assert_close(hard, (gates.log_alpha * 200**0.5).sigmoid())


@pytest.mark.parametrize("mode", ["train", "eval", "fixed"])
def test_multipliers_from_elsewhere_are_used_as_they_are(mode):
    model, gates, x = model_and_gates()
    model.train(mode != "eval")
    gates.fixed = mode == "fixed"
    before = gates.current().clone()
    z = torch.linspace(0, 1, gates.plan.size, requires_grad=True)
    with gates.using(z):
        model(x).sum().backward()
        assert gates.current() is z
    assert (z.grad != 0).any()
    assert gates.log_alpha.grad is None
    assert gates.current() is not z
    if mode != "train":
        assert torch.equal(gates.current(), before)


def test_fixed_gates_stand_still_in_train_mode_and_take_no_gradient():
    model, gates, x = model_and_gates()
    gates.fixed = True
    model(x).sum().backward()
    assert torch.equal(gates.current(), gates.z())
    assert gates.log_alpha.grad is None
    assert all(p.grad is not None for p in model.parameters() if p is not gates.log_alpha)
    gates.fixed = False
    model(x).sum().backward()
    assert gates.log_alpha.grad.abs().sum() > 0


def test_a_submodule_on_its_own_draws_after_each_change_of_the_gates():
    model, gates, _ = model_and_gates()
    layer, x = model[2], torch.ones(4, 8)
    first = layer(x)
    assert torch.equal(layer(x), first)
    torch.optim.SGD([gates.log_alpha], 0.1).zero_grad()
    layer(x).sum().backward()
    with torch.no_grad():
        gates.log_alpha.add_(1e-6)
    assert not torch.allclose(layer(x), first)


def test_no_grad_then_grad_keeps_the_sample_and_gains_the_gradient():
    model, gates, _ = model_and_gates()
    with torch.no_grad():
        without = model[2](torch.ones(4, 8))
    after = model[2](torch.ones(4, 8))
    assert torch.equal(without, after)
    assert not without.requires_grad
    after.sum().backward()
    assert gates.log_alpha.grad.abs().sum() > 0


def test_gradients_may_be_switched_on_inside_a_forward():
    class Inner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, x):
            with torch.enable_grad():
                return self.layers(x)

    plan = mlp_plan()
    sites = tuple(replace(s, tensor=f"layers.{s.tensor}") for s in plan.sites)
    model = gated(Inner(), replace(plan, sites=sites))
    with torch.no_grad():
        y = model(torch.ones(4, 12))
    y.sum().backward()
    assert gates_of(model).log_alpha.grad.abs().sum() > 0


def test_inference_mode_leaves_nothing_behind():
    model, gates, x = model_and_gates()
    with torch.inference_mode():
        model(x)
        model[2](torch.ones(4, 8))
    model[2](torch.ones(4, 8)).sum().backward()
    assert gates.log_alpha.grad.abs().sum() > 0


def test_a_forward_that_fails_does_not_hold_on_to_its_sample():
    model, gates, _ = model_and_gates()
    with pytest.raises(RuntimeError):
        model(torch.ones(4, 5))
    before = gates.current().clone()
    with torch.no_grad():
        gates.log_alpha.sub_(3)
    assert not torch.equal(gates.current(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gates_never_lose_precision(dtype):
    model, gates, x = model_and_gates()
    before = gates.log_alpha.detach().clone()
    model.eval()(x)
    model.to(dtype)
    assert model[0].weight.dtype == dtype
    assert gates.log_alpha.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(gates.log_alpha.float(), before)
    model.train()
    y = model(x.to(dtype))
    assert y.dtype == dtype
    assert gates.current().dtype == gates.log_alpha.dtype
    y.float().sum().backward()
    assert gates.log_alpha.grad.dtype == gates.log_alpha.dtype
    assert gates.log_alpha.grad.abs().sum() > 0
    assert model[0].weight.dtype == dtype


def test_moving_to_another_device_moves_the_gates():
    model, gates, _ = model_and_gates()
    model.to("meta")
    assert gates.log_alpha.device.type == "meta"
    assert model(torch.ones(4, 12, device="meta")).shape == (4, 3)


def test_open_counts_what_an_export_would_keep():
    plan = lenet_plan()
    log_alpha = torch.full((plan.size,), 5.0)
    log_alpha[1] = -5  # a map of the first conv
    log_alpha[plan.axes[2].start :][:4] = -5  # all columns of map 0 of the second conv
    log_alpha[plan.axes[2].start + 7] = -5  # one column of map 1
    log_alpha[plan.axes[1].start + 3] = -5  # map 3 itself
    log_alpha[plan.axes[3].slice] = -5  # all hidden neurons
    gates = Gates(plan, HardConcrete(), log_alpha)
    first, second, columns, hidden = gates.axes
    assert first.open.tolist() == [True, False, True, True]
    assert second.open.tolist() == [False, True, True, False, True]
    assert columns.open.sum() == 20 - 4 - 1 - 4
    assert hidden.open.tolist() == [True] + [False] * 6
    assert [a.name for a in gates.axes] == list(plan.names)
    assert gates.open().sum() == plan.size - 1 - 4 - 1 - 1 - 7


def test_probabilities_are_the_gates_and_differentiable():
    gates = bank(mlp_plan())
    p = gates.open_probability()
    assert torch.equal(p, gates.gate.open_probability(gates.log_alpha))
    p.sum().backward()
    torch.testing.assert_close(gates.log_alpha.grad, (p * (1 - p)).detach())


def test_a_copy_is_independent_and_carries_no_leftovers():
    model, gates, x = model_and_gates()
    y = model(x)
    twin = copy.deepcopy(model)
    other = gates_of(twin)
    assert other is not gates
    y.sum().backward()
    assert other.log_alpha.grad is None
    with torch.no_grad():
        other.log_alpha.fill_(-20)
    assert twin.eval()(x).allclose(twin[4].bias)
    assert not model.eval()(x).allclose(model[4].bias)


def test_printing_shows_the_gates():
    assert "26 gates on 3 axes" in repr(gated(mlp(), mlp_plan()))
    assert "36 gates on 4 axes" in repr(gated(lenet(), lenet_plan()))


class Counted(HardConcrete):
    """Says how often it was asked for the multipliers of eval mode."""

    asked = 0

    def estimate(self, log_alpha):
        type(self).asked += 1
        return super().estimate(log_alpha)


def settled():
    model, gates, x = model_and_gates()
    gates.gate, gates.fixed, Counted.asked = Counted(), True, 0
    return model, gates, x


def test_gates_that_stand_are_computed_once():
    model, _, x = settled()
    first = model(x)
    assert torch.equal(model(x), first)
    assert Counted.asked == 1
    with torch.no_grad():  # what is computed without gradients is no part of a step's graph
        model(x), model(x)
    assert Counted.asked == 2


def written(gates):
    with torch.no_grad():
        gates.log_alpha[3] -= 9


def written_behind_autograd(gates):
    gates.log_alpha.data[3] -= 9


def loaded(gates):
    state = {name: value - 9 for name, value in gates.state_dict().items()}
    gates.load_state_dict(state)


def replaced(gates):
    gates.log_alpha = torch.nn.Parameter(gates.log_alpha.detach() - 9)


def of_another_kind(gates):
    gates.gate = HardConcrete(estimator="median")


def learning(gates):
    gates.fixed = False


def in_double(gates):
    gates.double()


@pytest.mark.parametrize(
    "change",
    [written, written_behind_autograd, loaded, replaced, of_another_kind, learning, in_double],
)
def test_gates_that_stand_follow_every_change(change):
    model, gates, x = settled()
    with torch.no_grad():
        gates.log_alpha.normal_()
    model(x)
    before = gates.current().clone()
    change(gates)
    model.to(gates.log_alpha.dtype)(x.to(gates.log_alpha.dtype))
    now = gates.current()
    assert now.dtype == gates.log_alpha.dtype
    assert not torch.equal(now, before)
    if gates.fixed:
        assert torch.equal(now, gates.z())


def test_gates_that_stand_do_so_in_a_copy_on_its_own():
    model, gates, x = settled()
    model(x)
    other = copy.deepcopy(model)
    written_behind_autograd(gates_of(other))
    assert not torch.equal(other(x), model(x))
    assert torch.equal(gates.current(), gates.z())
