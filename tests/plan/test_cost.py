import time

import pytest
import torch
from counting import flops
from hypothesis import given
from hypothesis import strategies as st
from plans import count, enumerate_expected, plan_of, plans, probabilities, whole
from torch import nn
from torch.autograd import Function

import l0prune
from l0prune.errors import UsageError
from l0prune.features.recipes import files as recipe_files
from l0prune.plan.cost import CostModel, cost_of, group_weights
from l0prune.plan.expected import first_order
from l0prune.plan.layout import Cat, Const, Gated, Prod, Slots
from l0prune.plan.plan import Cost

UNITS = ("params", "macs")


@given(st.data())
def test_expected_is_the_sum_over_all_gate_states(data):
    plan = data.draw(plans())
    p = data.draw(probabilities(plan.size))
    for unit in UNITS:
        expected = enumerate_expected(plan, p, unit)
        assert float(CostModel(plan).expected(p, unit)) == pytest.approx(
            expected, rel=1e-12, abs=1e-12
        )


@given(st.data())
def test_gradient_is_the_difference_of_a_gate_open_and_closed(data):
    # The expectation is multilinear in the gates, so the difference quotient is exact.
    plan = data.draw(plans())
    p = data.draw(probabilities(plan.size)).requires_grad_()
    model = CostModel(plan)
    model.expected(p, "params").backward()
    for gate in range(plan.size):
        ends = []
        for value in (0.0, 1.0):
            end = p.detach().clone()
            end[gate] = value
            ends.append(float(model.expected(end, "params")))
        assert float(p.grad[gate]) == pytest.approx(ends[1] - ends[0], rel=1e-10, abs=1e-9)


@given(plans())
def test_certain_gates_give_the_real_count(plan):
    model = CostModel(plan)
    ones = torch.ones(plan.size)
    for unit in UNITS:
        real = sum(count(plan, c, ones.double()) for c in plan.costs if c.unit == unit)
        assert float(model.expected(ones, unit)) == real
        assert model.dense(unit) == round(real)
        assert model.actual(ones > 0, unit) == round(real)


def test_moments_of_a_shared_axis_in_closed_form():
    sizes = [5]
    axis = whole(sizes, 0)
    p = torch.tensor([0.1, 0.9, 0.5, 0.3, 1.0], dtype=torch.float64)
    s1, s2, s3 = p.sum(), (p**2).sum(), (p**3).sum()
    variance = s1 - s2
    third = (p * (1 - p) * (1 - 2 * p)).sum()
    closed = [s1, s1**2 + variance, s1**3 + 3 * s1 * variance + third]
    assert float(s1 - 3 * s2 + 2 * s3) == pytest.approx(float(third))
    for power, value in enumerate(closed, start=1):
        model = CostModel(plan_of(sizes, [Cost("m", "params", 1.0, (axis,) * power)]))
        assert float(model.expected(p, "params")) == pytest.approx(float(value), rel=1e-14)


def test_expected_macs_are_the_mean_over_sampled_gates():
    """LeNet-5's MACs layer by layer, over gates drawn as in training (the paper's figure 3)."""
    model = l0prune.load_model(recipe_files.load("mnist-lenet5", []).model.source)
    gates = l0prune.gates(l0prune.gate(model, torch.zeros(2, 1, 28, 28)))
    generator = torch.Generator().manual_seed(0)
    log_alpha = torch.randn(gates.plan.size, dtype=torch.float64, generator=generator) * 2
    expected = float(CostModel(gates.plan).expected(gates.gate.open_probability(log_alpha), "macs"))
    at = {axis.name: axis.slice for axis in gates.plan.axes}
    draws = []
    for _ in range(2000):
        u = torch.rand(gates.plan.size, dtype=torch.float64, generator=generator)
        there = (gates.gate.sample(log_alpha, u.clamp(1e-12)) > 0).double()
        first, second, hidden = (there[at[name]] for name in ("0", "3", "7"))
        inputs = there[at["7.in"]].reshape(50, 16) * second[:, None]
        draws.append(
            24 * 24 * 25 * first.sum()
            + 8 * 8 * 25 * first.sum() * second.sum()
            + inputs.sum() * hidden.sum()
            + hidden.sum() * 10
        )
    macs = torch.stack(draws)
    assert abs(macs.mean() - expected) < 5 * macs.std() / len(draws) ** 0.5


def test_actual_drops_what_nobody_reads_and_keeps_one_slot_of_a_dead_axis():
    sizes = [3, 4]
    plan = plan_of(
        sizes,
        [Cost("m", "params", 1.0, (whole(sizes, 0), whole(sizes, 1))), Cost("m", "macs", 2, ())],
    )
    model = CostModel(plan)
    assert model.actual(torch.tensor([1, 0, 1, 1, 0, 0, 1], dtype=torch.bool), "params") == 4
    assert model.actual(torch.zeros(7, dtype=torch.bool), "params") == 1
    assert model.actual(torch.zeros(7, dtype=torch.bool), "macs") == 2


def test_parts_add_up():
    sizes = [3, 4, 2]
    a, b, c = (whole(sizes, n) for n in range(3))
    plan = plan_of(
        sizes,
        [
            Cost("one", "params", 9.0, (a, b)),
            Cost("one", "params", 1.0, (a,)),
            Cost("two", "params", 1.0, (Cat((b, c)),)),
            Cost("three", "params", 7.0, ()),
        ],
    )
    p = torch.rand(plan.size, dtype=torch.float64)
    pa, pb, pc = (float(p[axis.slice].sum()) for axis in plan.axes)
    model = CostModel(plan)
    owners = model.by_owner(p, "params")
    assert owners == pytest.approx({"one": 9 * pa * pb + pa, "two": pb + pc, "three": 7.0})
    assert sum(owners.values()) == pytest.approx(float(model.expected(p, "params")))


def test_axis_weights_charge_a_shared_weight_at_the_mean():
    sizes = [3, 4]
    a, b = whole(sizes, 0), whole(sizes, 1)
    plan = plan_of(
        sizes,
        [
            Cost("m", "params", 1.0, (a, b)),
            Cost("m", "params", 5.0, (b,)),
            Cost("m", "params", 3.0, ()),
        ],
    )
    p = torch.rand(7, dtype=torch.float64)
    pa, pb = float(p[:3].sum()), float(p[3:].sum())
    model = CostModel(plan)
    priced = float(model.expected(p, "params", [2.0, 6.0]))
    assert priced == pytest.approx(4 * pa * pb + 6 * 5 * pb + 4 * 3)
    even = float(model.expected(p, "params", [2.0, 2.0]))
    assert even == pytest.approx(2 * float(model.expected(p, "params")))


def test_a_group_weighs_as_eq_16_says():
    plan = plan_of([2, 3], [], groups=[10, 7])
    assert group_weights(plan).tolist() == [10, 10, 7, 7, 7]
    assert group_weights(plan, [1.0, 2.0]).tolist() == [10, 10, 14, 14, 14]


def test_a_flattened_map_with_fine_gates_in_closed_form():
    # 3 maps of 4 positions into 5 neurons, a gate on each of the 12 inputs as well.
    sizes = [3, 12, 5]
    inputs = Gated(Prod((whole(sizes, 0), Const(4))), whole(sizes, 1))
    plan = plan_of(sizes, [Cost("fc", "params", 1.0, (whole(sizes, 2), inputs))])
    p = torch.rand(20)
    columns = p[:3].double().repeat_interleave(4) * p[3:15].double()
    expected = float(columns.sum() * p[15:].double().sum())
    assert float(CostModel(plan).expected(p, "params")) == pytest.approx(expected, rel=1e-14)


def test_wrong_length_is_refused():
    with pytest.raises(UsageError, match="has 3 gates"):
        CostModel(plan_of([3], [])).expected(torch.ones(4), "params")


def test_overlapping_ranges_of_one_axis():
    plan = plan_of([4], [Cost("m", "params", 1.0, (Slots(0, 0, 3), Slots(0, 1, 4)))])
    p = torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64)
    value = float(CostModel(plan).expected(p, "params"))
    assert value == pytest.approx(enumerate_expected(plan, p, "params"), rel=1e-14)


def mlp_plan(widths):
    costs = []
    for layer in range(len(widths) - 1):
        dims = (whole(widths, layer + 1), whole(widths, layer))
        costs += [Cost(f"fc{layer}", unit, 1.0, dims) for unit in UNITS]
    return plan_of(widths, costs)


def test_time_does_not_grow_with_depth():
    # A thousand layers cost about as much as ten: the number of operations is the same.
    def best(plan):
        model = CostModel(plan)
        p = torch.full((plan.size,), 0.5, requires_grad=True)
        times = []
        for _ in range(30):
            start = time.perf_counter()
            model.expected(p, "params").backward()
            times.append(time.perf_counter() - start)
        return min(times)

    assert best(mlp_plan([4] * 1000)) < 5 * best(mlp_plan([4] * 10))


def test_small_and_large_models_are_counted_alike():
    # Few sums are one product with a matrix, many are gathered term by term.
    small, large = mlp_plan([4] * 10), mlp_plan([4] * 300)
    for plan in (small, large):
        p = torch.rand(plan.size, dtype=torch.float64, requires_grad=True)
        value = CostModel(plan).expected(p, "params")
        layers = p.reshape(-1, 4).sum(1)
        by_hand = (layers[1:] * layers[:-1]).sum()
        assert value.item() == pytest.approx(by_hand.item(), rel=1e-13)
        (got,) = torch.autograd.grad(value, p)
        (wanted,) = torch.autograd.grad(by_hand, p)
        torch.testing.assert_close(got, wanted, rtol=1e-13, atol=0)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "settings", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}], ids=str
)
@pytest.mark.one_in(3)
def test_recurrent_layers_cost_what_the_flop_counter_says(kind, settings):
    layer, x = kind(10, 8, batch_first=True, **settings).double(), torch.randn(2, 5, 10).double()
    model = nn.Sequential(nn.Linear(10, 10).double(), layer)
    assert l0prune.survey(model, x).macs * 2 * len(x) == flops(model, x)


class Einsum(nn.Module):
    """A Linear layer, and what an equation makes of it and some weights."""

    def __init__(self, equation, *shapes):
        super().__init__()
        self.first, self.equation = nn.Linear(5, 6), equation
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x):
        return torch.einsum(self.equation, self.first(x), *self.weights)


@pytest.mark.skipif(torch.backends.opt_einsum.is_available(), reason="it chooses the order")
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ni,ih,hj->nj", [(6, 4), (4, 3)]),
        ("ni,kih->nh", [(2, 6, 4)]),
        ("ni,ih,kj->nhkj", [(6, 4), (2, 3)]),
        ("ni,i,ij->n", [(6,), (6, 2)]),
    ],
)
def test_products_of_several_cost_what_the_flop_counter_says(equation, shapes):
    model, x = Einsum(equation, *shapes).double(), torch.randn(2, 5).double()
    assert l0prune.survey(model, x).macs * 2 * len(x) == flops(model, x)


def test_a_plan_has_one_cost_model_while_someone_holds_it():
    first, second = (plan_of([3], [Cost("m", "params", 1.0, (whole([3], 0),))]) for _ in range(2))
    held = cost_of(first)
    assert cost_of(first) is held
    assert cost_of(second) is not held


class Cube(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return x**3

    @staticmethod
    @first_order
    def backward(ctx, grad):
        return grad * 3 * ctx.x**2


def test_a_graph_of_the_gradient_may_be_built_but_not_followed_to_here():
    x = torch.tensor(2.0, requires_grad=True)
    y = torch.tensor(5.0, requires_grad=True)
    of_x, of_y = torch.autograd.grad(y * Cube.apply(x) + y**2, (x, y), create_graph=True)
    assert (of_x.item(), of_y.item()) == (60, 18)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        of_x.backward()
