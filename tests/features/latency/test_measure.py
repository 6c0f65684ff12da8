"""A table of times, from timing to a budget in milliseconds."""

import copy
import json
import re
import shlex
import shutil
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import in_process
from timed_network import gated

import l0prune
from l0prune.errors import FileError, UsageError
from l0prune.exporting.onnx import collect
from l0prune.features.latency import onnx_files, runtimes
from l0prune.features.latency.eager import CutGraphs, Eager
from l0prune.features.latency.latency import OVERHEAD
from l0prune.features.latency.measure import read_results, table_of
from l0prune.features.latency.sizes import all_slots

PAGE = Path(__file__).parents[3] / "docs/extending.md"
SAMPLES = 12
TRUST = ["--trust-pickle"]


@pytest.fixture(scope="module", autouse=True)
def _quickly():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "SECONDS", 0.002)
        patch.setattr(onnx_files, "SECONDS", 0.01)
        patch.setattr(runtimes, "SECONDS", 0.01)
        yield


@pytest.fixture(scope="module")
def model():
    return gated()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("networks")


@pytest.fixture(scope="module")
def table(model, folder):
    return l0prune.measure(model, samples=SAMPLES, folder=folder)


@pytest.fixture(scope="module")
def latency(model, table):
    return table.of(l0prune.gates(model).plan)


@pytest.mark.slow
def test_it_says_what_it_is_of(table):
    assert table.setting.runtime == "onnxruntime"
    assert (table.setting.threads, table.setting.batch) == (1, 1)
    assert table.dense > 0
    assert table.quality.networks == SAMPLES
    assert len(table.samples) == SAMPLES
    assert "1 thread, batch 1" in str(table)


@pytest.mark.parametrize("tells_run", [True, False])
@pytest.mark.one_in(2)
def test_nodes_profiled_at_another_speed_of_the_machine_count_as_the_others(
    model, folder, table, tells_run
):
    plan = l0prune.gates(model).plan

    def table_if(faster, slower):
        results = json.loads((folder / "results.json").read_bytes())
        names = results["about"]["samples"]
        factors = {names[2]: 1 / faster, names[5]: slower}
        for name in names:
            nodes, factor = results["samples"][name]["nodes"], factors.get(name, 1)
            results["samples"][name]["nodes"] = {node: ms * factor for node, ms in nodes.items()}
            if not tells_run:
                del results["samples"][name]["nodes"][collect.RUN]
        return table_of(plan, results)

    expected, found = table_if(3, 3), table_if(8, 20)
    everything = torch.ones(plan.size, dtype=torch.bool)
    assert found.of(plan).actual(everything) == pytest.approx(expected.of(plan).actual(everything))
    assert found.quality.median == pytest.approx(expected.quality.median)


def test_a_second_call_takes_what_was_timed(model, folder, table):
    before = (folder / "results.json").read_bytes()
    again = l0prune.measure(model, samples=SAMPLES, folder=folder)
    assert (folder / "results.json").read_bytes() == before
    assert again == table


@pytest.mark.usefixtures("table")
def test_the_runtime_that_the_documentation_shows_times_files(folder, monkeypatch):
    monkeypatch.setattr(runtimes.RUNTIMES, "_known", dict(runtimes.RUNTIMES))
    (code,) = re.findall(r"## A runtime\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, PAGE.name, "exec"), {})
    mine = runtimes.runtime_of("mine")
    about = json.loads((folder / "bundle.json").read_text())
    inputs = dict(np.load(folder / "inputs.npz").items())
    name = about["samples"][0]
    path = folder / name
    assert mine.load(path, 1, mine.provider).median(inputs, 3) > 0
    seen = json.loads((folder / "results.json").read_text())["samples"][name]["nodes"]
    assert mine.nodes(path, inputs, 2, 1, mine.provider).keys() == seen.keys()
    assert runtimes.runtime_of("mine-int8").convert is not None


@pytest.mark.usefixtures("table")
def test_a_call_that_was_stopped_goes_on(model, folder):
    results = json.loads((folder / "results.json").read_text())
    whole = dict(results["samples"])
    for name in list(whole)[5:]:
        del results["samples"][name]
    results["digest"] = collect.digest(results)
    (folder / "results.json").write_text(json.dumps(results))
    seen = []
    l0prune.measure(model, samples=SAMPLES, folder=folder, progress=lambda *at: seen.append(at))
    found = json.loads((folder / "results.json").read_text())["samples"]
    assert seen == [(number, SAMPLES) for number in range(1, SAMPLES + 1)]
    assert list(found) == list(whole)
    assert all(found[name] == whole[name] for name in list(whole)[:5])


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_more_samples_go_on_from_those_that_are_timed(model, folder, tmp_path):
    def times():
        return json.loads((tmp_path / "results.json").read_text())["samples"]

    shutil.copy(folder / "results.json", tmp_path)
    first = times()
    more = l0prune.measure(model, samples=SAMPLES + 2, folder=tmp_path)
    assert len(more.samples) == len(times()) == SAMPLES + 2
    assert {name: times()[name] for name in first} == first
    fewer = l0prune.measure(model, samples=SAMPLES, folder=tmp_path)
    assert [widths for widths, _ in fewer.samples] == [w for w, _ in more.samples[:SAMPLES]]
    assert len(times()) == SAMPLES + 2


@pytest.mark.slow
def test_the_command_keeps_what_it_timed(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    l0prune.save(gated(), "small.gated.pt")
    code, _, err = in_process(capfd, "measure", "small.gated.pt", "--samples", SAMPLES, *TRUST)
    assert code == 0, err
    first = json.loads(Path("small.latency.times.json").read_text())["samples"]
    code, _, err = in_process(capfd, "measure", "small.gated.pt", "--samples", 14, *TRUST)
    assert code == 0, err
    found = json.loads(Path("small.latency.times.json").read_text())["samples"]
    assert len(found) == len(l0prune.LatencyTable.load("small.latency.json").samples) == 14
    assert {name: found[name] for name in first} == first
    assert {each.name for each in tmp_path.iterdir()} == {
        "small.gated.pt", "small.latency.json", "small.latency.times.json",
    }  # fmt: skip


def test_a_file_holds_all_of_it(table, tmp_path):
    path = table.save(tmp_path / "model.latency.json")
    assert l0prune.LatencyTable.load(path) == table


def test_the_smooth_time_is_the_dense_one_where_all_is_open(table, latency):
    everything = torch.ones(latency.plan.size)
    assert float(latency.expected(everything)) == pytest.approx(table.dense, rel=1e-6)
    assert latency.dense() == table.dense


def test_gates_always_gain_by_closing(latency):
    p = torch.full((latency.plan.size,), 0.5, requires_grad=True)
    latency.expected(p).backward()
    assert (p.grad >= 0).all()
    assert p.grad.max() > 0


def test_what_modules_take_adds_up(latency):
    kept = torch.ones(latency.plan.size, dtype=torch.float64)
    by_owner = latency.by_owner(kept)
    assert sum(by_owner.values()) == pytest.approx(latency.actual(kept > 0))
    assert {"stem", "wide", "deep", "back", "side"} <= by_owner.keys()
    assert by_owner.get(OVERHEAD, 0) >= 0


def test_what_fills_blocks_is_a_part_of_the_time(model, table, latency):
    plan = latency.plan
    kept = torch.ones(plan.size, dtype=torch.bool)
    after, filling = latency.by_owner(kept), latency.filling_by_owner(kept, kept)
    assert all(0 <= ms <= after[name] + 1e-12 for name, ms in filling.items())
    (wide,) = [axis for axis in plan.axes if "wide" in axis.name]
    fewer = kept.clone()
    fewer[wide.slice][5:] = False
    more = latency.filling_by_owner(kept, fewer)
    assert all(more[name] >= ms for name, ms in filling.items())  # some took no time at all
    time = l0prune.Report.of(model=model, latency=table).content.time
    assert {of.name: of.filling for of in time.owners} == pytest.approx(filling)
    assert time.measured == table.dense


def test_a_part_of_the_network_takes_a_part_of_the_time(latency):
    (wide,) = [i for i, axis in enumerate(latency.plan.axes) if "wide" in axis.name]
    open_ = torch.ones(latency.plan.size, dtype=torch.bool)
    values = latency._values(latency.plan.kept(open_), frozenset([wide]))
    assert (values != 0).sum() < (latency._values(latency.plan.kept(open_), None) != 0).sum()


@pytest.mark.slow
def test_a_budget_in_milliseconds_is_observed(tmp_path):
    """Of a network that takes a tenth of a millisecond or two: smaller ones are all noise."""
    model = gated(size=96)
    table = l0prune.measure(model, samples=SAMPLES, folder=tmp_path)
    found = l0prune.fit(
        model,
        f"latency={0.8 * table.dense:.6f}ms",
        l0prune.score(model, "magnitude"),
        latency=table,
    )
    assert not l0prune.gates(model).open().all()
    assert 0 < next(iter(found.values())) < 1.5 * table.dense


def test_a_table_of_another_model_is_refused(table):
    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(4, 9), torch.nn.Linear(9, 2)

        def forward(self, x):
            return self.two(torch.relu(self.one(x)))

    other = l0prune.gate(Other().eval(), (torch.randn(2, 4),))
    with pytest.raises(UsageError, match="made for another model"):
        l0prune.fit(other, "latency=0.5", latency=table)


def test_times_of_another_machine_are_predicted_and_not_observed(model, table):
    data = table.to_dict()
    data["setting"] = {**data["setting"], "processor": "another one"}
    elsewhere = l0prune.LatencyTable.from_dict(data).of(l0prune.gates(model).plan)
    assert elsewhere.observed(model) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kind": "l0prune latency table"}'])
def test_a_file_that_is_no_table_is_refused(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(FileError, match="latency table"):
        l0prune.LatencyTable.load(tmp_path / "x.json")
    with pytest.raises(FileError, match="cannot be read"):
        l0prune.LatencyTable.load(tmp_path / "none.json")


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("damage", ["cut off", "changed", "incomplete"])
def test_damaged_results_are_refused(tmp_path, folder, damage):
    text = (folder / "results.json").read_text()
    results = json.loads(text)
    name = next(iter(results["samples"]))
    if damage == "changed":
        results["samples"][name]["own"][0] *= 0.5
    elif damage == "incomplete":
        del results["samples"][name]
        results["digest"] = collect.digest(results)
    text = text[: len(text) // 2] if damage == "cut off" else json.dumps(results)
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(FileError, match=r"no JSON|changed|lacks 1"):
        read_results(tmp_path / "results.json")


@pytest.mark.usefixtures("table")
def test_results_of_another_model_are_refused(folder):
    results = read_results(folder / "results.json")
    results["about"] = {**results["about"], "plan": "other"}
    with pytest.raises(UsageError, match="another model"):
        table_of(l0prune.gates(gated()).plan, results)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("part", [{"widths": [[1]] * SAMPLES}, {"nodes": [{"operator": "Conv"}]}])
def test_results_that_make_no_sense_are_refused(folder, part):
    results = read_results(folder / "results.json")
    results["about"] = results["about"] | part
    with pytest.raises(UsageError, match="make no sense"):
        table_of(l0prune.gates(gated()).plan, results)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"runtime": "tvm"}, "no runtime 'tvm'; there are onnxruntime, onnxruntime-int8"),
        ({"providers": "NowhereExecutionProvider"}, "has no NowhereExecutionProvider"),
        ({"runtime": "eager", "providers": "nowhere"}, "cannot use the device 'nowhere'"),
        ({"runtime": "cuda-graph", "providers": "cpu"}, "runtime of NVIDIA's GPUs, not of 'cpu'"),
        ({"threads": 0}, "threads must be a whole number"),
        ({"samples": 3}, "too few"),
    ],
)
def test_what_is_not_there_is_refused(model, given, said):
    with pytest.raises(UsageError, match=said):
        l0prune.measure(model, **given)


def test_graphs_for_pytorch_run_in_float32(model):
    graphs = CutGraphs(model, batch=1)
    network = graphs.network(all_slots(graphs.plan))
    args, kwargs = graphs.inputs()
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    torch.testing.assert_close(network(*args, **kwargs), model.eval()(*args, **kwargs))


def test_graphs_of_a_model_in_half_precision_stay_in_it(model):
    half = copy.deepcopy(model).bfloat16()
    graphs = CutGraphs(half, batch=1)
    network = graphs.network(all_slots(graphs.plan))
    args, kwargs = graphs.inputs()
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
    # normalization is folded into weights, which are rounded afterwards
    close = {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(network(*args, **kwargs), half.eval()(*args, **kwargs), **close)


class Asynchronous(Eager):
    """A device that computes for some time after it was given its work."""

    started, waited = 0.0, 0.0

    def wait(self):
        time.sleep(self.waited)

    def start(self):
        time.sleep(self.started)


@pytest.mark.parametrize(("started", "waited"), [(0.009, 0.001), (0.001, 0.009)])
def test_a_network_that_waits_for_the_host_is_told_from_one_that_does_not(started, waited):
    runtime = Asynchronous("cpu", 1)
    runtime.started, runtime.waited = started, waited
    assert (runtime.host_part(runtime.start) > 0.5) == (started > waited)


@pytest.mark.parametrize(("part", "is_said"), [(0.9, True), (0.1, False)])
def test_a_network_that_waits_for_the_host_is_warned_of(part, is_said):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        runtimes._warn_of_host("eager", part)
    assert ["waits for the host" in str(each.message) for each in said] == [True] * is_said


def test_an_operator_is_timed_from_its_start_to_its_end(model):
    graphs = CutGraphs(model, batch=1)
    runtime = Eager("cpu", 1)
    timer = runtime.operators(graphs.network(all_slots(graphs.plan)), graphs.inputs(), 3)
    assert {len(node.clocks) for node in timer.seen.values()} == {3}
    assert all(clock.milliseconds() > 0 for node in timer.seen.values() for clock in node.clocks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("runtime", ["eager", "cuda-graph"])
def test_a_gpu_is_measured_and_named(model, runtime):
    there = copy.deepcopy(model).cuda()
    table = l0prune.measure(there, runtime=runtime, providers="cuda", samples=12)
    assert torch.cuda.get_device_name() in table.setting.version
    latency = table.of(l0prune.gates(there).plan)
    assert latency.observed(there) > 0


@pytest.mark.slow
def test_pytorch_is_a_runtime_too(model):
    table = l0prune.measure(model, runtime="eager", samples=12)
    latency = table.of(l0prune.gates(model).plan)
    assert table.setting.provider == "cpu"
    assert {"stem", "wide", "deep"} <= latency.by_owner(torch.ones(latency.plan.size)).keys()
    assert latency.observed(model) > 0


@pytest.mark.slow
def test_a_bundle_is_timed_elsewhere_and_read_back(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    l0prune.save(gated(size=96), "small.gated.pt")  # smaller ones are all noise
    asked = "measure", "small.gated.pt", "--bundle", "small.gated.pt", *TRUST
    code, _, err = in_process(capfd, *asked)
    assert (code, "--bundle names a folder to write, and small.gated.pt is a file" in err) == (
        2,
        True,
    )
    code, out, err = in_process(
        capfd, "measure", "small.gated.pt", "--bundle", "there", "--samples", 12, "--json", *TRUST
    )
    assert code == 0, err
    assert json.loads(out) == {"folder": "there"}
    there = Path("there").resolve()
    monkeypatch.setattr("sys.argv", [str(there / "run.py"), "--out", str(there / "results.json")])
    script = {"__name__": "run", "__file__": str(there / "run.py")}
    exec((there / "run.py").read_text(), script)
    script["SECONDS"] = 0.002
    script["main"]()
    capfd.readouterr()
    code, out, err = in_process(
        capfd, "measure", "small.gated.pt", "--from", "there/results.json", "--json", *TRUST
    )
    assert code == 0, err
    assert json.loads(out)["file"] == "small.latency.json"
    measured = (
        f"l0prune measure small.gated.pt --from there/results.json --json {shlex.join(TRUST)}"
    )
    assert l0prune.LatencyTable.load("small.latency.json").command == measured
    code, out, err = in_process(
        capfd, "fit", "small.gated.pt", "--budget", "latency=0.9", "--out", "fit.pt", *TRUST
    )
    assert code == 0, err
    assert "fit.pt written; latency=0.9: " in out
    assert measured in l0prune.read_info("fit.pt")["commands"]
    assert " ms" in out
