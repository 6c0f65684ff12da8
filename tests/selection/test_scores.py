import copy
import random

import pytest
import torch
from handmade import folded, gated, lenet, lenet_plan
from models import Tied
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import l0prune
from l0prune.errors import DataError, NotGated, UsageError
from l0prune.gating.gate import gates
from l0prune.running.output_parts import units_of
from l0prune.running.task import Task
from l0prune.selection import scores


def as_they_come(model, how, data=None, **more):
    return l0prune.score(model, how, data, normalise="none", **more)


def of_axis(model, values, name):
    (axis,) = [a for a in gates(model).axes if a.name == name]
    return values[axis.slice]


def linear():
    """y = V(Wx + b) + c, gated at x and at Wx + b."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    batches = [(torch.randn(n, 5).double(), torch.randn(n, 3).double()) for n in (7, 7, 2)]
    return l0prune.gate(model, batches[0][0]), batches


def slopes_by_hand(model, batches):
    """dL/dz of each batch for the linear model: 2/3·mean Σ r_k (VW)_ki x_i, and for h alike."""
    (w, b), (v, c) = [
        (layer._parameters["weight"].detach(), layer.bias.detach()) for layer in model
    ]
    for x, t in batches:
        h = x @ w.T + b
        r = h @ v.T + c - t
        yield {
            "0.in": 2 / 3 * ((r @ (v @ w)) * x).mean(0),
            "0": 2 / 3 * ((r @ v) * h).mean(0),
        }


def test_taylor_is_the_squared_slope_of_the_mean_loss():
    model, batches = linear()
    assert {a.name for a in gates(model).axes} == {"0", "0.in"}
    found = as_they_come(model, "taylor", Task(batches, loss=mse_loss))
    slopes = list(slopes_by_hand(model, batches))
    for axis in gates(model).axes:
        mean = sum(len(x) * s[axis.name] for (x, _), s in zip(batches, slopes, strict=True)) / 16
        torch.testing.assert_close(found[axis.slice], mean**2, rtol=1e-10, atol=1e-14)


def test_fisher_is_the_mean_of_the_batches_squares():
    model, batches = linear()
    found = as_they_come(model, "fisher", Task(batches, loss=mse_loss))
    slopes = list(slopes_by_hand(model, batches))
    for axis in gates(model).axes:
        pairs = zip(batches, slopes, strict=True)
        mean = sum(len(x) * s[axis.name] ** 2 for (x, _), s in pairs) / 16
        torch.testing.assert_close(found[axis.slice], mean, rtol=1e-10, atol=1e-14)


def test_outputs_are_how_far_they_move_and_no_label_is_looked_at():
    """Σ_k (do_k/dz)² is Σ_k (VW)_ki²·x_i² for an input, Σ_k V_kj²·h_j² for a neuron."""
    model, batches = linear()
    with torch.no_grad():
        model[1].weight[:, 2] = 0
    (w, b), (v, _) = [(layer._parameters["weight"].detach(), layer.bias) for layer in model]
    x = batches[0][0]
    h = (x @ w.T + b).detach()
    expected = {
        "0.in": ((v @ w).square().sum(0) * x.square()).mean(0),
        "0": (v.square().sum(0) * h.square()).mean(0),
    }
    task = Task([(x, torch.full((7,), torch.nan))] * 600, loss=mse_loss)
    found = as_they_come(model, "outputs", task)
    for axis in gates(model).axes:
        # Each is the mean of 600 draws of χ²: 6 % is one standard deviation.
        torch.testing.assert_close(found[axis.slice], expected[axis.name], rtol=0.2, atol=0)
    assert of_axis(model, found, "0")[2] == 0


def test_a_network_that_learns_its_own_answers_has_no_slopes_but_moving_outputs():
    model, batches = linear()
    task = l0prune.with_pseudo_labels([x for x, _ in batches], copy.deepcopy(l0prune.ungate(model)))
    l0prune.gate(model, batches[0][0])
    assert as_they_come(model, "fisher", task).max() < 1e-10
    assert as_they_come(model, "outputs", task).min() > 1e-6


class Giving(nn.Linear):
    """What ``made`` makes of its outputs."""

    def __init__(self, made):
        super().__init__(5, 4)
        self.made = made

    def forward(self, x):
        return self.made(super().forward(x))


@pytest.mark.parametrize(
    "made",
    [
        lambda y: (y[:, :1], y[:, 1:]),
        lambda y: {"out": y[:, :1, None], "aux": y[:, 1:], "n": 4},
        lambda y: [y[:, 0], y[:, 1:]],
    ],
    ids=["tuple", "dict", "list"],
)
@pytest.mark.one_in(3)
def test_outputs_of_several_tensors_are_all_their_numbers_in_units(made):
    found = []
    for each in (None, made):
        torch.manual_seed(0)
        x = torch.randn(3, 5)
        model = Giving(each)
        if each is None:
            of = torch.tensor([0, 1, 1, 1])
            units = torch.tensor(units_of(nn.Linear.forward(model, x), of))[of]
            model.made = lambda y, units=units: y / units
        l0prune.gate(model, x)
        found.append(l0prune.score(model, "outputs", [(x, x)]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("made", [lambda y: (y, y[:1]), lambda y: {"loss": y.sum()}])
def test_outputs_without_rows_have_no_such_score(made):
    x = torch.randn(3, 5)
    model = l0prune.gate(Giving(made), x)
    with pytest.raises(UsageError, match=r"a row for each example.*such as fisher"):
        l0prune.score(model, "outputs", [(x, x)])


def test_so_many_batches():
    model, batches = linear()
    task = Task(batches, loss=mse_loss)
    first = as_they_come(model, "taylor", Task(batches[:1], loss=mse_loss))
    assert torch.equal(as_they_come(model, "taylor", task, batches=1), first)
    assert not torch.equal(as_they_come(model, "taylor", task), first)


def test_fine_gates_and_maps_get_the_slopes_of_their_weights():
    """dL/dz of a gate at z = 1 is Σ W·dL/dW over the weights that it multiplies."""
    plain = lenet().double()
    x, t = torch.randn(6, 1, 14, 14).double(), torch.randint(0, 3, (6,))
    plan = lenet_plan()
    model = gated(copy.deepcopy(plain), plan)
    found = as_they_come(model, "taylor", Task([(x, t)], loss=cross_entropy))
    cross_entropy(plain(x), t).backward()
    weights = (plain[number].weight for number in (3, 7, 9))
    conv, first, last = ((w * w.grad).detach() for w in weights)
    maps = first.sum(0).view(5, 4).sum(1)
    wanted = torch.cat([conv.sum((0, 2, 3)), maps, first.sum(0), last.sum(0)])
    torch.testing.assert_close(found, wanted**2, rtol=1e-9, atol=1e-16)


def test_magnitude_is_how_far_closing_the_gate_moves_the_weights():
    plain, plan = lenet().double(), lenet_plan()
    found = as_they_come(gated(copy.deepcopy(plain), plan), "magnitude")
    for number in range(plan.size):
        z = torch.ones(plan.size).double()
        z[number] = 0
        moved = folded(copy.deepcopy(plain), plan, z)
        pairs = zip(plain.parameters(), moved.parameters(), strict=True)
        distance = sum((p - q).square().sum() for p, q in pairs).sqrt()
        assert found[number].item() == pytest.approx(distance.item(), rel=1e-12)


class Stream(nn.Module):
    """A residual stream that three layers write and three read, norms of each kind on the way."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 1)
        self.a, self.b = (nn.Conv2d(6, 6, 3, padding=1, bias=False) for _ in "ab")
        self.norm_a, self.norm_b = nn.BatchNorm2d(6), nn.BatchNorm2d(6)
        self.head = nn.Conv2d(6, 2, 1)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.norm_a(self.a(x))
        x = x + self.norm_b(self.b(x))
        return self.head(x.relu()).mean((2, 3))


def stream():
    model = Stream()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    plain = copy.deepcopy(model)
    l0prune.gate(model, torch.randn(2, 3, 4, 4))
    (axis,) = [a for a in gates(model).axes if a.size == 6]
    return model, plain, axis


def test_scores_add_up_over_all_sites_of_an_axis():
    model, plain, axis = stream()
    read = sum(
        m.weight.detach().double().square().sum((0, 2, 3)) for m in (plain.a, plain.b, plain.head)
    )
    found = as_they_come(model, "magnitude")[axis.slice]
    torch.testing.assert_close(found, read.sqrt(), rtol=1e-10, atol=0)

    written = sum(
        m.weight.detach().double().square().sum((1, 2, 3)) for m in (plain.stem, plain.a, plain.b)
    )
    singles = (plain.stem.bias, *plain.norm_a.parameters(), *plain.norm_b.parameters())
    whole = read + written + sum(p.detach().double().square() for p in singles)
    found = as_they_come(model, "group-magnitude")[axis.slice]
    torch.testing.assert_close(found, whole.sqrt(), rtol=1e-10, atol=0)


def test_a_tied_weight_counts_once():
    model = Tied(mix=False)
    weight = model.embed.weight.detach().double()
    l0prune.gate(model, torch.randint(0, 20, (2, 5)))
    for how in ("magnitude", "group-magnitude"):
        found = as_they_come(model, how)
        torch.testing.assert_close(found, weight.square().sum(0).sqrt(), rtol=1e-10, atol=0)


def test_bn_scale_is_gamma():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 3), nn.ReLU(),
        nn.Conv2d(5, 2, 1),
    )  # fmt: skip
    nn.init.normal_(model[1].weight)
    gamma = model[1].weight.detach().double().abs()
    l0prune.gate(model, torch.randn(2, 3, 8, 8))
    found = as_they_come(model, "bn-scale")
    assert torch.equal(of_axis(model, found, "0"), gamma)
    magnitude = of_axis(model, as_they_come(model, "magnitude"), "3")
    without_norm = of_axis(model, found, "3")
    torch.testing.assert_close(without_norm, magnitude / magnitude.mean(), rtol=1e-12, atol=0)
    scaled = l0prune.score(model, "bn-scale")
    torch.testing.assert_close(
        of_axis(model, scaled, "0"), gamma / gamma.mean(), rtol=1e-12, atol=0
    )


def test_bn_scale_is_the_mean_over_the_norms_on_the_way():
    model, plain, axis = stream()
    mean = (plain.norm_a.weight.double().abs() + plain.norm_b.weight.double().abs()).detach() / 2
    found = as_they_come(model, "bn-scale")[axis.slice]
    torch.testing.assert_close(found, mean, rtol=1e-12, atol=0)


def test_norms_that_scale_nothing_are_no_norms():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 2))
    l0prune.gate(model, torch.randn(2, 4))
    found, wanted = (l0prune.score(model, how) for how in ("bn-scale", "magnitude"))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_random_is_uniform_and_seeded():
    model = l0prune.gate(nn.Sequential(nn.Linear(2, 2000), nn.Linear(2000, 1)), torch.zeros(2, 2))
    state = torch.get_rng_state()
    first, again, other = (as_they_come(model, "random", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.mean().item() == pytest.approx(0.5, abs=0.03)
    assert first.var().item() == pytest.approx(1 / 12, abs=0.01)


def test_axes_are_made_comparable_by_their_means():
    model, batches = linear()
    task = Task(batches, loss=mse_loss)
    for how in ("magnitude", "group-magnitude", "bn-scale", "taylor", "fisher", "random"):
        raw, scaled = as_they_come(model, how, task), l0prune.score(model, how, task)
        assert scaled.shape == (gates(model).plan.size,)
        assert scaled.dtype == torch.float64
        for axis in gates(model).axes:
            part = raw[axis.slice]
            torch.testing.assert_close(scaled[axis.slice], part / part.mean())


def test_an_axis_of_nothing_stays_at_nothing():
    model, _ = linear()
    with torch.no_grad():
        model[1]._parameters["weight"].zero_()
    found = l0prune.score(model, "magnitude")
    assert of_axis(model, found, "0").tolist() == [0] * 4


def test_the_gates_own_values_have_no_part_in_it():
    model, batches = linear()
    task = Task(batches, loss=mse_loss)
    before = {how: as_they_come(model, how, task) for how in scores.SCORES}
    gates(model).log_alpha.data.normal_(0, 3)
    gates(model).gate = l0prune.ContinuousSparsification()
    gates(model).fixed = True
    for how, wanted in before.items():
        assert torch.equal(as_they_come(model, how, task), wanted)
    assert torch.equal(gates(model).current(), gates(model).z())


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 3)
    )
    l0prune.gate(model, torch.randn(2, 4)).train()
    model[1].eval()
    model[0].requires_grad_(False)
    state = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    generator = torch.Generator().manual_seed(1)
    examples = TensorDataset(torch.randn(40, 4), torch.randint(0, 3, (40,)))
    loader = DataLoader(examples, batch_size=8, shuffle=True, generator=generator)
    now = (torch.get_rng_state(), generator.get_state(), random.getstate())
    first, second = (l0prune.score(model, "taylor", loader) for _ in range(2))
    assert torch.equal(first, second)
    for before, after in zip(
        now, (torch.get_rng_state(), generator.get_state(), random.getstate()), strict=True
    ):
        assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(p.requires_grad for p in model[0].parameters())
    assert gates(model).log_alpha.requires_grad


def test_a_model_in_low_precision_and_one_inside_a_wrapper():
    model = l0prune.gate(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), torch.zeros(2, 4))
    data = [(torch.randn(8, 4), torch.randint(0, 3, (8,)))]
    whole = l0prune.score(model, "taylor", data)
    wrapped = nn.Sequential(nn.Identity(), model)
    assert torch.equal(l0prune.score(wrapped, "taylor", data), whole)
    half = model.bfloat16()
    found = l0prune.score(half, "taylor", [(data[0][0].bfloat16(), data[0][1])])
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, whole, rtol=0.3, atol=0.3)


def test_a_score_of_ones_own_is_one_function():
    @scores.register("first")
    def first(of):
        return torch.arange(of.plan.size, 0, -1).double()

    model, _ = linear()
    try:
        assert as_they_come(model, "first").tolist() == list(range(9, 0, -1))
    finally:
        del scores.SCORES["first"]


def test_a_score_of_ones_own_may_be_named_by_its_file(tmp_path):
    path = tmp_path / "worth.py"
    path.write_text(
        "import torch\n"
        "def first(of):\n    return torch.arange(of.plan.size, 0, -1)\n"
        "def short(of):\n    return torch.zeros(2)\n"
        "number = 3\n"
    )
    model, _ = linear()
    assert as_they_come(model, f"{path}:first").tolist() == list(range(9, 0, -1))
    for name, says in [
        ("short", r"a tensor of shape \(9,\), not \(2,\) of float32"),
        ("number", "is a int, not a function for a score"),
        ("last", "has no 'last'; it defines first, short"),
    ]:
        with pytest.raises(UsageError, match=says):
            l0prune.score(model, f"{path}:{name}")
    l0prune.fit(model, "params=0.8", l0prune.score(model, f"{path}:first"), round_to=1)
    assert bool(l0prune.gates(model).axes[0].open[0])


class NoGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    @torch.no_grad()
    def forward(self, x):
        return self.b(self.a(x).relu())


def test_wrong_use_is_said():
    model, batches = linear()
    task = Task(batches, loss=mse_loss)
    for how, data, more, says in [
        ("hessian", task, {}, r"'hessian'; there are ablation, auto, bn-scale, .*taylor"),
        ("taylor", None, {}, "looks at data"),
        ("taylor", task, {"batches": 0}, "batches must be"),
        ("taylor", task, {"device": "nowhere"}, "nowhere"),
        ("magnitude", None, {"normalise": "max"}, "'axis-mean' or 'none', not 'max'"),
    ]:
        with pytest.raises(UsageError, match=says):
            l0prune.score(model, how, data, **more)
    with pytest.raises(NotGated):
        l0prune.score(nn.Linear(2, 2), "magnitude")
    with pytest.raises(DataError, match="do not fit together"):
        l0prune.score(model, "taylor", [(torch.randn(2, 3).double(), torch.randn(2, 3))])
    with pytest.raises(DataError, match="empty"):
        l0prune.score(model, "taylor", [])
    bad = [(torch.full((2, 5), torch.nan).double(), torch.randn(2, 3).double())]
    with pytest.raises(DataError, match="nan or inf"):
        l0prune.score(model, "taylor", Task(bad, loss=mse_loss))
    closed = l0prune.gate(NoGrad(), torch.zeros(2, 4))
    with pytest.raises(UsageError, match="under no_grad"):
        l0prune.score(closed, "taylor", [(torch.randn(2, 4), torch.tensor([0, 1]))])
