import math

import pytest
import torch
from plans import enumerate_expected, plan_of, whole
from torch import nn

import l0prune
from l0prune.errors import NotGated, UsageError
from l0prune.features.recipes import files as recipe_files
from l0prune.gating.attaching import attach
from l0prune.gating.bank import Gates
from l0prune.gating.kinds.hard_concrete import HardConcrete
from l0prune.plan.cost import CostModel
from l0prune.plan.plan import Cost, Plan, Site
from l0prune.training.lambdas import Lambda
from l0prune.training.penalty import param_groups, penalty


class Stream(nn.Module):
    """A residual stream: ``mix`` reads and writes the same axis."""

    def __init__(self):
        super().__init__()
        self.read = nn.Linear(3, 4)
        self.mix = nn.Linear(4, 4, bias=False)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        x = torch.relu(self.read(x))
        return self.out(x + self.mix(x))


def gated_stream():
    torch.manual_seed(0)
    return l0prune.gate(
        Stream().double(),
        torch.randn(2, 3).double(),
        open_probability=0.7,
        jitter=1.0,
        branches=False,
    )


def states(plan):
    """Every gate state as float64, with nothing assumed about it."""
    for number in range(2**plan.size):
        yield torch.tensor([float(number >> k & 1) for k in range(plan.size)], dtype=torch.float64)


def expected_squares(model, plan, p, tensors):
    """Σ over states of P(state)·Σ W²·(element there), from the definition."""
    total = 0.0
    for state in states(plan):
        chance = float(torch.where(state > 0, p, 1 - p).prod())
        for name, parameter in model.named_parameters():
            if name == "l0prune_gates.log_alpha":
                continue
            alive = parameter.detach().square()
            for dim, layout in tensors(name):
                shape = [1] * parameter.dim()
                shape[dim] = -1
                alive = alive * plan.spread(layout, state).to(torch.float64).reshape(shape)
            total += chance * float(alive.sum())
    return total


def test_joint_is_the_exact_expectation_of_the_number_of_weights():
    model = gated_stream()
    gates = l0prune.gates(model)
    p = gates.open_probability().detach()
    exact = enumerate_expected(gates.plan, p, "params")
    assert penalty(model, 0.5).item() == pytest.approx(0.5 * exact, rel=1e-12)
    assert penalty(model, "3/N", n=6).item() == pytest.approx(0.5 * exact, rel=1e-12)


def test_groups_is_eq_16():
    model = gated_stream()
    gates = l0prune.gates(model)
    p = gates.open_probability().detach()
    by_hand = sum(float(p[a.slice].sum()) * a.group_size for a in gates.plan.axes)
    assert penalty(model, 0.5, counting="groups").item() == pytest.approx(0.5 * by_hand)


def test_gradient_reaches_log_alpha_and_is_right():
    model = gated_stream()
    log_alpha = l0prune.gates(model).log_alpha
    for counting in ("joint", "groups"):
        log_alpha.grad = None
        penalty(model, 2.0, counting=counting, l2=0.3).backward()
        for gate in range(len(log_alpha)):
            ends = []
            for step in (-1e-5, 1e-5):
                with torch.no_grad():
                    log_alpha[gate] += step
                    ends.append(penalty(model, 2.0, counting=counting, l2=0.3).item())
                    log_alpha[gate] -= step
            slope = (ends[1] - ends[0]) / 2e-5
            assert log_alpha.grad[gate].item() == pytest.approx(slope, rel=1e-6)


def test_expected_squares_of_eq_15():
    model = gated_stream()
    plan = l0prune.gates(model).plan
    p = l0prune.gates(model).open_probability().detach()
    sides = {
        "joint": lambda name: list(enumerate(plan.tensors[name])),
        "groups": lambda name: [(s.dim, s.layout) for s in plan.sites if s.tensor == name],
    }
    for counting, tensors in sides.items():
        exact = 0.5 * 0.3 * expected_squares(model, plan, p, tensors)
        assert penalty(model, 0.0, counting=counting, l2=0.3).item() == pytest.approx(
            exact, rel=1e-12
        )


def test_squares_of_frozen_parameters_are_left_out():
    model = gated_stream()
    before = penalty(model, 0.0, l2=2.0)
    model.out.bias.requires_grad_(False)
    gone = before - penalty(model, 0.0, l2=2.0)
    assert gone.item() == pytest.approx(float(model.out.bias.square().sum()), rel=1e-12)
    model.out.bias.requires_grad_(True)
    before.backward()
    # ½·l2·2·W·P: the output bias is always there.
    assert torch.allclose(model.out.bias.grad, 2.0 * model.out.bias)


@pytest.mark.parametrize("counting", ["joint", "groups"])
def test_the_l2_term_moves_gates_unless_it_is_detached(counting):
    model = gated_stream()
    log_alpha = l0prune.gates(model).log_alpha
    parameters = [p for p in model.parameters() if p is not log_alpha]
    kept = penalty(model, 0.7, counting=counting, l2=0.3)
    cut = penalty(model, 0.7, counting=counting, l2=0.3, l2_detach=True)
    assert kept.item() == cut.item()

    of_weights = torch.autograd.grad(kept, parameters, retain_graph=True)
    same = torch.autograd.grad(cut, parameters, retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(of_weights, same, strict=True))

    (of_gates,) = torch.autograd.grad(cut, log_alpha)
    (of_lambda,) = torch.autograd.grad(penalty(model, 0.7, counting=counting), log_alpha)
    torch.testing.assert_close(of_gates, of_lambda, rtol=1e-12, atol=0)
    # What is left out closes gates: each has weights whose squares it could save.
    (pull,) = torch.autograd.grad(kept, log_alpha)
    assert (pull > of_gates).all()


def chain():
    """Two axes of one Linear each: fc1 → a0 (3) → fc2 → a1 (2) → fc3."""
    sizes = [3, 2]
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 1))
    a, b = whole(sizes, 0), whole(sizes, 1)
    costs = [
        Cost("0", "params", 2, (a,)),
        Cost("1", "params", 1, (b, a)),
        Cost("2", "params", 1, (b,)),
    ]
    sites = (Site("1.weight", 1, a, "read"), Site("2.weight", 1, b, "read"))
    plan = plan_of(sizes, costs, groups=[2, 1])
    plan = Plan(plan.axes, (), plan.tensors, sites, plan.costs)
    attach(model, Gates(plan, HardConcrete(), torch.randn(5)))
    return model, plan


def test_lambda_per_axis():
    model, plan = chain()
    p = l0prune.gates(model).open_probability().detach().double()
    pa, pb = float(p[:3].sum()), float(p[3:].sum())
    for lam in ("a0=1, a1=3", {"a0": 1.0, "*": "3"}, Lambda(3.0, (("a0", 1.0),))):
        groups = penalty(model, lam, counting="groups")
        assert groups.item() == pytest.approx(1 * 2 * pa + 3 * 1 * pb, rel=1e-6)
        joint = penalty(model, lam)
        assert joint.item() == pytest.approx(1 * 2 * pa + 2 * pa * pb + 3 * pb, rel=1e-6)
    even = penalty(model, {"*": 0.25}).item()
    assert even == pytest.approx(0.25 * float(CostModel(plan).expected(p, "params")), rel=1e-6)


def test_lambda_per_layer_is_the_papers_objective_of_each_layer():
    """Each layer at its own λ: λ_l·Σ P(z_j ≠ 0)·(weights that gate j multiplies), eq. 16."""
    recipe = recipe_files.load("mnist-lenet5", [])
    model = l0prune.gate(l0prune.load_model(recipe.model.source), torch.zeros(2, 1, 28, 28))
    gates = l0prune.gates(model)
    with torch.no_grad():
        gates.log_alpha.normal_(0, 2, generator=torch.Generator().manual_seed(0))
    # Maps are gated where conv layers write them, the inputs of each Linear where it reads them.
    lams, weights = (10.0, 0.5, 0.1, 10.0), (1 * 25, 20 * 25, 500, 10)
    total = 0.0
    for name, lam, own in zip(("0", "3", "7.in", "7"), lams, weights, strict=True):
        axis = next(a for a in gates.axes if a.name == name)
        p = torch.sigmoid(gates.log_alpha[axis.slice].double() - 2 / 3 * math.log(0.1 / 1.1))
        total += lam * own * p.sum().item()
    lam = "0=10/N, 3=0.5/N, 7.in=0.1/N, 7=10/N"
    ours = penalty(model, lam, n=60_000, counting="groups")
    assert ours.item() == pytest.approx(total / 60_000, rel=1e-6)


def test_stays_float32_under_autocast():
    model, _ = chain()
    plain = penalty(model, 1.0, counting="groups", l2=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        cast = penalty(model, 1.0, counting="groups", l2=1.0)
    assert cast.dtype == torch.float32
    assert torch.equal(plain, cast)


def test_param_groups():
    model, _ = chain()
    model[0].bias.requires_grad_(False)
    weights, gates = param_groups(model, lr=0.1, gate_lr=2.0, weight_decay=0.01)
    assert (weights["lr"], weights["weight_decay"]) == (0.1, 0.01)
    assert (gates["lr"], gates["weight_decay"]) == (2.0, 0.0)
    assert [id(p) for p in gates["params"]] == [id(l0prune.gates(model).log_alpha)]
    trained = [
        p for n, p in model.named_parameters() if n not in ("0.bias", "l0prune_gates.log_alpha")
    ]
    assert [id(p) for p in weights["params"]] == [id(p) for p in trained]
    torch.optim.SGD([weights, gates]).step()


def test_wrong_use():
    model, _ = chain()
    with pytest.raises(UsageError, match="counting must be"):
        penalty(model, 1.0, counting="all")
    with pytest.raises(UsageError, match="l2 must be"):
        penalty(model, 1.0, l2=-1.0)
    with pytest.raises(UsageError, match="negative"):
        penalty(model, -1.0)
    with pytest.raises(UsageError, match="needs N"):
        penalty(model, "0.1/N")
    with pytest.raises(NotGated):
        penalty(nn.Linear(2, 2), 1.0)
    with pytest.raises(NotGated):
        param_groups(nn.Linear(2, 2))
