"""Tables of times that are made where a budget needs one and none is given."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from timed_network import gated
from torch.utils.data import TensorDataset

import l0prune
from l0prune.cli import opening
from l0prune.errors import L0pruneWarning, UsageError
from l0prune.exporting.onnx import collect
from l0prune.features.latency import command
from l0prune.features.latency import measure as measuring
from l0prune.features.latency.facts import plan_id
from l0prune.features.latency.latency_model import LatencyModel, Term
from l0prune.features.latency.table import LatencyTable, Quality, Setting

SETTING = Setting("onnxruntime", "1.0", collect.CPU, 1, 1, "a processor", "a system")


def made_up(model, setting=SETTING):
    """A table by which every network takes 2 ms."""
    stairs = LatencyModel((), (Term(0, 2.0, ()),))
    plan = plan_id(l0prune.gates(model).plan)
    return LatencyTable(setting, plan, 2.0, (), stairs, stairs, Quality(0.01, 0.05, 12, 0.02))


class Asked(Exception):
    pass


@pytest.fixture
def asked(monkeypatch):
    """Raise ``Asked`` with the runtime where a table would be made."""

    def measure(model, **options):
        raise Asked(options["runtime"])

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(measuring, "_made", {})


def data():
    return TensorDataset(torch.randn(8, 3, 12, 12), torch.randint(5, (8,)))


def pruner(budget, **options):
    model = gated()
    return l0prune.Pruner(model, steps=20, budget=budget, **options)


DOORS = {
    "fit": lambda budget, **options: l0prune.fit(gated(), budget, **options),
    "finetune": lambda budget, **options: l0prune.finetune(
        gated(), data(), epochs=4, budget=budget, **options
    ),
    "Pruner": pruner,
    "shrink": lambda budget, **options: l0prune.shrink(
        l0prune.ungate(gated()), data(), budget=budget, **options
    ),
}


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("budget", ["speed=2", "latency=3ms"])
@pytest.mark.one_in(3)
def test_a_budget_in_time_has_a_table_made_on_the_target(door, budget):
    with pytest.raises(Asked, match=r"^eager$"):
        DOORS[door](budget, target="eager")


@pytest.mark.usefixtures("asked")
@pytest.mark.slow
def test_other_budgets_take_no_time():
    model = gated()
    l0prune.fit(model, "macs=0.5", l0prune.score(model, "magnitude"))
    assert not l0prune.gates(model).open().all()


def test_a_table_is_made_once_for_each_plan_and_target(monkeypatch):
    made = []

    def measure(model, runtime):
        made.append(runtime)
        return made_up(model)

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(measuring, "_made", {})
    model = gated()
    assert measuring.known_table(model, "eager") is None
    first = measuring.latency_table(model, "eager")
    assert (
        measuring.latency_table(gated(), "eager") is first is measuring.known_table(model, "eager")
    )
    measuring.latency_table(model, "compile")
    assert made == ["eager", "compile"]
    measuring.latency_table(gated(size=16), "eager")
    assert len(measuring._made) <= measuring._KEPT
    assert made == ["eager", "compile", "eager"][: len(made)]


@pytest.mark.parametrize(
    ("median", "noise", "said"),
    [(0.04, 0.0, None), (0.14, 0.0, "not seen to 14% only"), (0.0, 0.09, "differ by 9%")],
)
def test_whoever_measures_is_told_of_a_poor_table(monkeypatch, median, noise, said):
    table = replace(made_up(gated()), quality=Quality(median, 0.2, 4, noise))
    monkeypatch.setattr(measuring, "table_of", lambda *_: table)
    monkeypatch.setattr(
        measuring,
        "runtime_of",
        lambda *_: SimpleNamespace(results=lambda job: None, bench=lambda job: lambda x: x),
    )
    told = pytest.warns(L0pruneWarning, match=said) if said else nullcontext()
    with told:
        assert l0prune.measure(gated()) is table


def test_the_command_makes_a_table_beside_the_model_and_never_uses_a_stale_one(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    made, model, path = [], gated(), tmp_path / "m.gated.pt"
    here = collect.machine()
    right = replace(
        SETTING, version=collect.version(), processor=here["processor"], system=here["system"]
    )

    def timed(model, target, runtime):
        made.append(runtime)
        return made_up(model, right)

    def table(budget, given=None):
        return opening.latency_table(given, path, budget, model, "onnxruntime")

    monkeypatch.setattr(command, "timed", timed)
    assert table("macs=0.5") is None
    first = table(["speed=2"])
    beside = tmp_path / "m.latency.json"
    assert LatencyTable.load(beside) == first == table("latency=1ms")
    assert made == ["onnxruntime"]
    old = replace(first, setting=replace(right, version="0.1"))
    old.save(beside)
    assert table("speed=2") == first
    elsewhere = replace(first, setting=replace(right, processor="a phone's"), command="measure")
    elsewhere.save(beside)  # as `l0prune measure --from results.json` writes it
    assert table("speed=2") == elsewhere
    replace(first, plan="another").save(beside)
    assert table("speed=2") == first
    assert made == ["onnxruntime"] * 3


def test_sampling_ends_where_networks_are_predicted_or_the_time_is_over(monkeypatch):
    plan = l0prune.gates(gated()).plan
    names = [f"{number}.onnx" for number in range(measuring.SAMPLES)]
    error = [0.2]
    monkeypatch.setattr(measuring, "_samples", lambda *_: (1.0, (), None, None))
    monkeypatch.setattr(
        measuring, "_quality", lambda *_: Quality(error[0], 0.5, measuring.FEWEST, 0.0)
    )

    def wanted(enough, timed):
        return enough(
            {"about": {"samples": names}, "samples": {name: {1: 1} for name in names[:timed]}}
        )

    enough = measuring.Enough(plan)
    assert [wanted(enough, timed) for timed in (0, 5, 12, 16)] == [12, 12, 16, 20]
    assert wanted(enough, measuring.SAMPLES) == measuring.SAMPLES
    error[0] = 0.04
    assert wanted(enough, 16) == 16
    error[0] = 0.2
    enough._began -= 60
    assert wanted(enough, 16) == 16


def test_networks_that_are_not_asked_for_are_left_out_and_asked_for_later(tmp_path):
    results = {"about": {"samples": list("abcdef"), "widths": [[n] for n in range(6)]}}
    results["samples"] = {"b": "known"}
    seen, said = [], []
    found = collect.each_timed(
        results,
        tmp_path / "results.json",
        lambda name: seen.append(name) or name.upper(),
        lambda *at: said.append(at),
        lambda so_far: 2 if len(so_far["samples"]) < 2 else 4,
    )
    assert seen == ["a", "c", "d"]
    assert said == [(1, 2), (2, 2), (3, 4), (4, 4)]
    assert found["about"] == {"samples": list("abcd"), "widths": [[0], [1], [2], [3]]}
    assert set(found["samples"]) == set("abcd")


def test_samples_that_make_no_sense_are_refused():
    for samples, message in (("all", "'auto'"), (11, "too few"), (10**9, "samples")):
        with pytest.raises(UsageError, match=message):
            l0prune.measure(gated(), samples=samples)


@pytest.mark.slow
def test_a_small_network_is_predicted_at_other_widths():
    model = gated(size=96)
    table = l0prune.measure(model, seed=3)
    plan = l0prune.gates(model).plan
    others = l0prune.measure(model, samples=12, seed=4)
    measure = table.of(plan)
    predicted = [measure._times([list(widths)])[0] for widths, _ in others.samples]
    shares = np.array(predicted) / table.dense
    seen = np.array([ms for _, ms in others.samples]) / others.dense
    assert np.median(np.abs(shares / seen - 1)) < 0.4
