import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import DataError, L0pruneWarning, UsageError
from l0prune.exporting.onnx import file
from l0prune.features.unlabelled import shrink as module
from l0prune.features.unlabelled.fidelity import fidelity
from l0prune.plan.cost import CostModel
from l0prune.plan.measures import Latency
from l0prune.plan.numbers import tolerance_of


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    data = l0prune.load_data("digits")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    l0prune.train_dense(model, data, epochs=10, lr=3e-3)
    return model, data


@pytest.mark.slow
def test_a_budget_without_labels(network):
    model, data = network
    before, mode = copy.deepcopy(model.state_dict()), model.training
    small = l0prune.shrink(model, data.train.inputs[:400], "macs=0.5")
    assert small.macs <= 0.5 * small.macs_before
    assert small.fidelity.agreement > 0.9
    error = l0prune.evaluate(small.module, data)["error"]
    assert error < l0prune.evaluate(model, data)["error"] + 0.05
    assert model.training == mode
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert small.to_dict()["fidelity"]["agreement"] == small.fidelity.agreement


@pytest.mark.slow
def test_a_runtime_is_allowed_what_it_rounds_in_the_users_model(network, monkeypatch, tmp_path):
    """The gated copy is gone by the time the file is written."""
    model, data = network
    small = l0prune.shrink(model, data.train.inputs[:200], "macs=0.7")
    exact = file.Session.__call__

    def rounds(*args):
        return [out + 1.5e-5 * out.abs().max() for out in exact(*args)]

    monkeypatch.setattr(file.Session, "__call__", rounds)
    small.save_onnx(tmp_path / "net.onnx", time=False)
    assert small.certificate.worst("onnx", "float32") > 1e-5


def test_recovery_learns_nothing_from_what_it_is_judged_by(network, monkeypatch):
    model, data = network
    inputs, seen = {"input": data.train.inputs[:200]}, {}

    def judge(dense, other, batches, *about):
        seen["judged"] = batches
        return fidelity(dense, other, batches, *about)

    monkeypatch.setattr(module, "fidelity", judge)
    monkeypatch.setattr(
        module.run, "finetune", lambda model, task, **_: seen.update(learned=task.train)
    )
    l0prune.shrink(model, inputs, "macs=0.7", recover=1)
    learned = torch.cat([each["input"].cpu() for each, _ in seen["learned"]])
    held = torch.cat([each["input"] for each in seen["judged"]])
    assert len(learned) + len(held) == 200
    assert not (learned[:, None] == held).flatten(2).all(2).any()


class Dropping(nn.Module):
    """Layers with a BatchNorm and two kinds of dropout, one of which is no module of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)).relu())
        return self.last(nn.functional.dropout(x, self.drop.p, self.training))


def test_recovery_learns_answers_without_dropout(monkeypatch):
    torch.manual_seed(0)
    model, x, rates = Dropping().eval(), torch.randn(16, 6), []
    with module.without_dropout(model):
        assert model.training
        assert model.norm.training
        assert torch.equal(model(x), model(x))
    assert not any(each.training for each in model.modules())
    assert model.drop.p == 0.5
    monkeypatch.setattr(
        module.run, "finetune", lambda work, task, **_: rates.append((work.drop.p, work.training))
    )
    l0prune.shrink(model, torch.randn(1024, 6), "macs=0.7", recover=1, samples=1024)
    assert rates == [(0.0, True)]


@pytest.mark.slow
def test_a_tolerance_finds_the_smallest_and_training_comes_nearer(network):
    model, data = network
    small = l0prune.shrink(model, data, tolerance="5%", measure="macs", recover=1)
    assert small.macs < small.macs_before
    within = [step for step in small.curve if 1 - step.fidelity.agreement <= 0.05]
    assert small.macs / small.macs_before <= min(step.share for step in within)
    assert small.fidelity.agreement >= 0.9
    assert small.asked == ("tolerance=0.05", f"macs={min(step.share for step in within):.3f}")
    shown = [step.share for step in small.curve]
    assert shown == sorted(shown)


def cut_costs(network):
    """A judge that takes no network of which something is cut."""
    return 0.0 if l0prune.gates(network).open().all() else 0.02


def test_a_judge_decides_what_is_within_a_tolerance(network):
    model, data = network
    tried = []

    def judge(other):
        tried.append(nn.utils.parameters_to_vector(other.parameters()).detach().norm().item())
        return 0.0 if len(tried) in (1, 3) else 0.02  # the first is the uncut network

    small = l0prune.shrink(
        model, data.train.inputs[:200], tolerance="1%", judge=judge, measure="macs"
    )
    assert len(tried) == len(set(tried)) == 1 + len(small.curve) == 6
    (within,) = [step for step in small.curve if step.far <= 0.01]
    assert small.macs / small.macs_before <= within.share
    assert sum(step.far == 0.02 for step in small.curve) == 4
    with pytest.raises(UsageError, match=r"stays within 1\.0%.*2\.0% from the original"):
        l0prune.shrink(
            model, data.train.inputs[:200], tolerance="1%", judge=cut_costs, measure="macs"
        )
    with pytest.raises(UsageError, match=r"returned 0\.97 for the network itself.*1 - right"):
        l0prune.shrink(
            model, data.train.inputs[:200], tolerance="1%", judge=lambda _: 0.97, measure="macs"
        )
    with pytest.raises(UsageError, match=r"judge must return a number, .* it returned a dict"):
        l0prune.shrink(
            model, data.train.inputs[:200], tolerance="1%", judge=lambda _: {}, measure="macs"
        )


def test_coarse_widths_are_judged_once(network):
    model, data = network
    tried = []

    def judge(other):
        tried.append(int(l0prune.gates(other).open().sum()))
        return float(tried[-1] < 32)

    small = l0prune.shrink(
        model, data.train.inputs[:200], tolerance="1%", judge=judge, measure="macs",
        round_to=32, exclude="1.in",
    )  # fmt: skip
    assert tried[1:] == [32]
    assert small.macs * 2 == small.macs_before


@pytest.mark.slow
def test_where_no_time_can_be_measured_a_tolerance_finds_the_fewest_macs(network):
    model, data = network

    def no_table(gated):
        raise UsageError("nothing to be timed. Give another")

    with pytest.warns(L0pruneWarning, match="fewest MACs .* not the fastest: nothing to be timed"):
        small = l0prune.shrink(
            model, data.train.inputs[:200], tolerance="1%", judge=lambda _: 0, latency=no_table
        )
    assert {step.measure for step in small.curve} == {"macs"}


def test_no_table_of_times_is_made_of_a_large_network_unless_asked_for(network, monkeypatch):
    model, data = network
    monkeypatch.setattr("l0prune.features.unlabelled.shrink._LARGE", 100)
    given = {"tolerance": "1%", "exclude": "1.in", "round_to": 1}
    given["judge"] = lambda other: float(l0prune.gates(other).open().sum() < 20)
    for table, measure in ((lambda _: HalfFixed(), "macs"), (HalfFixed(), "latency")):
        small = l0prune.shrink(model, data.train.inputs[:200], latency=table, **given)
        assert {step.measure for step in small.curve} == {measure}


class HalfFixed:
    """Times of which half do not depend on the hidden layer's width."""

    name = "latency"
    fixed = 1.0  # over what depends on it

    def of(self, plan):
        (cost,) = [each for each in plan.costs if each.unit == "macs" and each.owner == "3"]
        terms = cost, replace(cost, scale=64 * self.fixed * cost.scale, dims=())
        return Latency(plan, CostModel(plan, [replace(each, unit="latency") for each in terms]))


def test_a_tolerance_in_time_finds_the_fastest(network):
    model, data = network
    small = l0prune.shrink(
        model,
        data.train.inputs[:200],
        tolerance="1%",
        judge=lambda other: float(l0prune.gates(other).open().sum() < 20),
        latency=HalfFixed(),
        round_to=1,
        exclude="1.in",
    )
    assert {step.measure for step in small.curve} == {"latency"}
    share = min(step.share for step in small.curve if step.far == 0)
    ((kept, whole),) = small.widths.values()
    assert (64 + kept) / (64 + whole) <= share < (64 + kept + 1) / (64 + whole)
    assert 20 <= kept < 30


class Fixed(HalfFixed):
    fixed = 50.0


def test_a_network_whose_time_hardly_depends_on_its_widths_is_said_to_be_such(network):
    model, data = network
    with pytest.raises(UsageError, match=r"hardly depends on its widths.*measure='macs'"):
        l0prune.shrink(model, data.train.inputs[:200], tolerance="1%", latency=Fixed())


class Slower(HalfFixed):
    """Times of which the whole network's is a quarter more than its layers'."""

    def of(self, plan):
        found = super().of(plan)
        found.dense = lambda through=None: 1.25 * Latency.dense(found, through)
        return found


def test_a_network_of_which_nothing_is_cut_is_not_the_fastest(network):
    model, data = network
    tried = []

    def judge(other):
        tried.append(int(l0prune.gates(other).open().sum()))
        return cut_costs(other)

    with pytest.raises(UsageError, match=r"no smaller network was found.*recover=8"):
        l0prune.shrink(
            model,
            data.train.inputs[:200],
            tolerance="1%",
            judge=judge,
            measure="latency",
            latency=Slower(),
            round_to=1,
            exclude="1.in",
        )
    slots = l0prune.gates(l0prune.gate(copy.deepcopy(model), data.train.inputs[:2], exclude="1.in"))
    assert 3 <= len(tried) < 6
    assert max(tried[1:]) < len(slots.open()) == tried[0]


class Timed(Latency):
    """Times that turn out otherwise when they are measured."""

    def observed(self, model):
        kept = int(l0prune.gates(model).open().sum())
        return self.dense() * (1.25 if kept < self.slow_below else 0.875)


class Mispredicted(HalfFixed):
    def __init__(self, slow_below):
        self.slow_below = slow_below

    def of(self, plan):
        found = super().of(plan)
        found.__class__, found.slow_below = Timed, self.slow_below
        return found


def test_the_fastest_within_a_tolerance_is_the_fastest_as_measured(network):
    model, data = network
    inputs = data.train.inputs[:200]
    given = {"tolerance": "1%", "judge": lambda _: 0, "round_to": 1, "exclude": "1.in"}
    small = l0prune.shrink(model, inputs, latency=Mispredicted(20), **given)
    assert {step.observed for step in small.curve} == {0.875, 1.25}
    fast = min(step.share for step in small.curve if step.observed == 0.875)
    ((kept, whole),) = small.widths.values()
    assert kept >= 20
    assert (64 + kept) / (64 + whole) <= fast
    with pytest.raises(UsageError, match=r"stays within 1\.0% is faster.* took 1\.25 of it"):
        l0prune.shrink(model, inputs, latency=Mispredicted(1000), **given)


def test_what_makes_no_sense_is_refused(network):
    model, data = network
    for kwargs in ({}, {"budget": "macs=0.5", "tolerance": "1%"}):
        with pytest.raises(UsageError, match="either a budget"):
            l0prune.shrink(model, data, **kwargs)
    with pytest.raises(UsageError, match="judge decides"):
        l0prune.shrink(model, data, "macs=0.5", judge=lambda _: 0.0)
    with pytest.raises(UsageError, match="macs or latency, not 'time'"):
        l0prune.shrink(model, data, tolerance="1%", measure="time")
    for given in ("one", "0", "150%", -1, 0.0):
        with pytest.raises(UsageError, match="between 0 and 1"):
            tolerance_of(given)
    assert tolerance_of("1%") == tolerance_of("0.01") == tolerance_of(0.01) == 0.01


def test_weights_of_nan_are_named(network):
    model, data = copy.deepcopy(network[0]), network[1]
    with torch.no_grad():
        model[3].weight[0, 0] = float("nan")
    with (
        pytest.warns(L0pruneWarning, match=r"hold NaN or infinite numbers: 3\.weight"),
        pytest.raises(DataError, match=r"the weights of 3\.weight, or what they read, hold NaN"),
    ):
        l0prune.shrink(model, data, "macs=0.5")


@pytest.mark.slow
def test_a_recovery_that_ends_farther_away_is_undone(network, monkeypatch):
    model, inputs = network
    options = {"budget": "macs=0.5", "seed": 0}
    wanted = l0prune.shrink(model, inputs, **options)
    monkeypatch.setattr(module, "_RATE", 10.0)
    with pytest.warns(L0pruneWarning, match="undone"):
        found = l0prune.shrink(model, inputs, recover=1, **options)
    assert found.fidelity == wanted.fidelity
    monkeypatch.setattr("l0prune.features.unlabelled.shrink._RATE", 1e-3)
    assert (
        l0prune.shrink(model, inputs, recover=3, **options).fidelity.error < wanted.fidelity.error
    )


def test_what_was_found_without_training_stays_where_training_fails():
    class Rooted(nn.Module):  # whose derivative is infinite at 0
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 3)

        def forward(self, x):
            return self.last(
                self.first(x).relu().square().sum(1, keepdim=True).mul(0).sqrt()
                + x @ x.new_ones(8, 32)
            )

    torch.manual_seed(0)
    model, inputs = Rooted().eval(), torch.randn(200, 8)
    options = {"budget": "params=0.5", "seed": 0, "allow_worse_than_mean": True}
    wanted = l0prune.shrink(model, inputs, **options)
    with pytest.warns(L0pruneWarning, match=r"did not learn.*infinite derivative"):
        found = l0prune.shrink(model, inputs, recover=2, **options)
    assert found.fidelity == wanted.fidelity


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*so it was undone")
def test_under_a_tolerance_each_network_learns_before_it_is_judged(network, monkeypatch):
    model, data = network
    inputs, seen = data.train.inputs[:300], []
    learn = module.run.finetune

    def noting(work, task, **settings):
        seen.append(settings)
        learn(work, task, **settings)

    monkeypatch.setattr(module.run, "finetune", noting)

    def far(other):
        assert not any(each.training for each in other.modules())
        return fidelity(model.eval(), other, [data.test.inputs]).error

    options = {"tolerance": 0.01, "judge": far, "measure": "macs", "progress": False}
    cut = l0prune.shrink(model, inputs, **options)
    assert not seen
    learned = l0prune.shrink(model, inputs, **options, recover={"epochs": 4, "lr": 2e-3})
    assert 1 <= len(seen) <= 5
    assert all(each["lr"] == 2e-3 for each in seen)
    assert learned.macs < cut.macs
    assert far(learned.module) <= 0.01 + 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*so it was undone")
def test_a_network_that_learns_is_cut_out_of_the_last_one_within(network):
    model, data = network
    seen = []

    def judge(other):
        if (open_ := l0prune.gates(other).open().clone()).all():
            return 0.0
        seen.append(open_)
        return 0.0 if len(seen) > 5 and len(seen) != 7 else 0.5

    options = {"tolerance": 0.1, "judge": judge, "measure": "macs", "round_to": 1}
    inputs = data.train.inputs[:300]
    small = l0prune.shrink(model, inputs, recover=1, exclude="1.in", **options)
    shares = sorted([0.607, 0.368, 0.472, 0.417, 0.392])  # of which the second is too small
    learned = [step.share for step in small.curve if step.far == 0 or 0.36 < step.share < 0.37]
    assert learned == pytest.approx(shares, abs=0.001)
    for before, after in itertools.pairwise([seen[5], *seen[7:]]):
        assert not (after & ~before).any()  # what is gone stays so
    assert small.macs / small.macs_before <= 0.392


class Rough(nn.Module):
    """A network whose outputs some of its neurons, and few inputs, say nothing about."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(5, 64), nn.Linear(64, 3)

    def forward(self, x):
        return self.out(torch.sin(40 * self.into(x)))


def test_a_network_that_is_worse_than_a_constant_has_to_be_asked_for():
    model = Rough().eval()
    torch.manual_seed(0)
    x = torch.randn(40, 5)
    with (
        pytest.warns(L0pruneWarning),
        pytest.raises(UsageError, match=r"say less than a constant[\s\S]*allow_worse_than_mean"),
    ):
        l0prune.shrink(model, x, "macs=0.1")
    with pytest.warns(L0pruneWarning):
        small = l0prune.shrink(model, x, "macs=0.1", allow_worse_than_mean=True)
    assert small.fidelity.error > 1


class Cells(nn.Module):
    """Two LSTMCells, step by step, from states of zeros."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTMCell(6, 8), nn.LSTMCell(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        states = [(torch.zeros(len(x), 8),) * 2] * 2
        for step in x.unbind(1):
            states[0] = self.first(step, states[0])
            states[1] = self.second(states[0][0], states[1])
        return self.last(states[1][0])


def test_cells_called_step_by_step():
    torch.manual_seed(0)
    model, x = Cells().eval(), torch.randn(48, 4, 6)
    small = l0prune.shrink(model, x, "macs=0.7", batch_size=16, round_to=1)
    assert small.macs <= 0.7 * small.macs_before
    assert small.fidelity.error < 0.5


def test_recovery_of_a_network_with_two_inputs():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(6, 16), nn.Linear(16, 3)

        def forward(self, x, y):
            return self.out(torch.relu(self.into(x) + y))

    torch.manual_seed(0)
    model, given = Sum().eval(), (torch.randn(160, 6), torch.randn(160, 16))
    small = l0prune.shrink(model, given, "macs=0.7", recover=1)
    assert small.fidelity.error < 0.3


@pytest.mark.filterwarnings("ignore:l0prune")  # that the training may be undone
def test_training_moves_nothing_of_the_users_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 3)
    ).eval()
    before = copy.deepcopy(model.state_dict())
    small = l0prune.shrink(
        model,
        torch.randn(200, 6),
        tolerance=0.9,
        measure="macs",
        recover={"epochs": 1, "lr": 1e-2},
        round_to=1,
    )
    assert small.params < small.params_before
    assert not any(module.training for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.slow
def test_what_stops_all_cuts_is_said_rather_than_that_none_is_small():
    class Switching(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.a, self.b = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 2)

        def forward(self, x):
            h = torch.relu(self.first(x))
            return self.a(h) if torch.compiler.is_compiling() or x.mean() > 0 else self.b(h)

    with pytest.raises(UsageError, match="other ways for other inputs"):
        l0prune.shrink(Switching().eval(), torch.randn(64, 4), tolerance="1%", batch_size=8)


class Noisy(nn.Module):
    """A network that draws random numbers in eval mode."""

    def __init__(self, by):
        super().__init__()
        self.first, self.last, self.by = nn.Linear(6, 32), nn.Linear(32, 4), by

    def forward(self, x):
        y = self.last(self.first(x).relu())
        return y + self.by * torch.randn_like(y)


def test_outputs_that_differ_from_call_to_call_are_said_before_the_search():
    torch.manual_seed(0)
    x = torch.randn(200, 6)
    with pytest.raises(UsageError, match=r"the same inputs in each call, .* than the tolerance"):
        l0prune.shrink(Noisy(1.0), x, tolerance="1%", measure="macs", progress=False)
    with pytest.warns(L0pruneWarning, match="the same inputs in each call"):
        l0prune.shrink(Noisy(0.01), x, "macs=0.9", round_to=1, progress=False)


def test_a_judge_that_gives_no_number_for_the_network_itself_is_refused(network):
    model, data = network
    with pytest.raises(UsageError, match="returned nan for the network itself"):
        l0prune.shrink(
            model, data.train.inputs[:200], tolerance="1%", judge=lambda _: float("nan"),
            measure="macs",
        )  # fmt: skip


def test_a_judge_leaves_the_network_as_it_is():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).eval()
    x = torch.randn(200, 6)

    def judge(network):
        network.train()
        network(10 * x)
        return 0.0

    given = {"tolerance": "30%", "measure": "macs", "round_to": 1, "progress": False}
    found = [l0prune.shrink(model, x, judge=each, **given) for each in (judge, lambda _: 0.0)]
    first, second = (small.module[1].running_mean for small in found)
    assert torch.equal(first, second)


def test_what_has_no_values_or_unlike_inputs_is_refused():
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))
    with pytest.raises(UsageError, match="nothing to shrink"):
        l0prune.shrink(copy.deepcopy(model).to("meta"), torch.randn(90, 6), "macs=0.5")
    gated = l0prune.gate(copy.deepcopy(model).to("meta"), torch.randn(2, 6, device="meta"))
    with pytest.raises(UsageError, match="nothing to choose from"):
        l0prune.fit(gated, "macs=0.5")
    inputs = {"x": torch.randn(90, 6), "y": torch.randn(80, 6)}
    with pytest.raises(DataError, match=r"unequally many examples \(x: 90, y: 80\)"):
        l0prune.shrink(Two(), inputs, "macs=0.5")


class Two(nn.Module):
    """A network of two inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 32), nn.Linear(32, 4)

    def forward(self, x, y):
        return self.last(self.first(x + y).relu())
