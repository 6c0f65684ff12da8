"""The script that times networks on a device, and what it is told apart by."""

import time

import pytest

from l0prune.exporting.onnx import collect


def event(name, microseconds):
    return {"cat": "Node", "name": f"{name}_kernel_time", "dur": microseconds}


def test_what_the_runtime_adds_is_charged_to_the_node_before():
    events = [
        {"cat": "Session", "name": "model_run", "dur": 999},
        event("ReorderInput", 5),
        event("n00000_", 100),
        event("ReorderOutput_token_3", 30),
        event("n00002_0_nchwc", 200),
    ]
    assert collect.node_times(events, 1) == {"before": 0.005, "00000": 0.13, "00002": 0.2}


def test_of_several_runs_it_is_the_lower_quartile():
    events = [event("n00000_", microseconds) for microseconds in (50, 10, 30, 20)]
    assert collect.node_times(events, 4) == {"00000": 0.02}


def test_runs_that_came_before_are_left_out():
    warm = [event("n00001_", 70)]
    events = warm + 2 * [event("n00000_", 10), event("n00001_", 20)]
    assert collect.node_times(events, 2) == {"00000": 0.01, "00001": 0.02}


def test_slow_networks_run_less_often():
    assert collect.runs(1e4) == collect.FEWEST
    assert collect.runs(1e-9) == collect.MOST
    assert collect.runs(1e3 * collect.TURN / 20) == 20


def test_networks_take_turns_until_the_time_is_over():
    called = []

    def of(name, ms):
        def median(times):
            called.append((name, times))
            return ms

        return median

    found = collect.turns(of("own", 10.0), of("dense", 20.0), 0.6)
    assert found == {"own": 20 * [10.0], "dense": 20 * [20.0]}
    turn = [("dense", 1), ("dense", 3), ("own", 1), ("own", 3)]
    assert called == [("own", 1), ("own", 1), *20 * turn]
    called.clear()
    collect.turns(of("own", 50.0), of("dense", 90.0), 0.6)  # one run in a turn, and all count
    assert called == [("own", 1), *12 * [("dense", 1), ("own", 1)]]
    assert len(collect.turns(of("own", 1e3), of("dense", 1e3), 0.6)["own"]) == collect.TURNS


def test_what_disturbed_some_turns_is_no_part_of_the_time():
    assert collect.typical([3.0, 1.0, 9.0, 1.1, 1.2, 8.0, 1.3, 7.0]) == 1.2
    assert collect.share([2.0, 2.0, 9.0, 4.0, 4.0], [4.0, 4.0, 4.0, 8.0, 8.0]) == 0.5


def test_a_thread_that_is_alone_does_not_pay_for_what_it_waits():
    assert collect.milliseconds(lambda: time.sleep(0.02), is_alone=True) < 10
    assert collect.milliseconds(lambda: time.sleep(0.02), is_alone=False) >= 20


def test_a_checksum_covers_all_but_itself():
    results = {"samples": {"a": 1.5}, "threads": 1}
    results["digest"] = collect.digest(results)
    assert collect.digest(results) == results["digest"]
    assert collect.digest(results | {"samples": {"a": 1.4}}) != results["digest"]


def test_it_needs_numpy_and_onnxruntime_only():
    with open(collect.__file__) as file:
        lines = [line.split()[1] for line in file if line.strip().startswith(("import ", "from "))]
    assert not {name.split(".")[0] for name in lines} & {"torch", "onnx", "l0prune", "pydantic"}


def test_a_provider_that_falls_back_is_no_secret(tmp_path, monkeypatch):
    class Fallen:
        def __init__(self, *_, **__):
            pass

        def get_providers(self):
            return ["CPUExecutionProvider"]

    monkeypatch.setattr("onnxruntime.InferenceSession", Fallen)
    with pytest.raises(collect.FellBack, match="CUDAExecutionProvider was asked for"):
        collect.Network(tmp_path / "x.onnx", 1, "CUDAExecutionProvider")


def about(count, **other):
    names, widths = [f"{n:03d}.onnx" for n in range(count)], [[n] for n in range(count)]
    return {"plan": "p", "id": str(count), "samples": names, "widths": widths} | other


SETTINGS = {"threads": 1}


@pytest.mark.parametrize("count", [2, 3, 5])
def test_networks_that_are_timed_are_known_whatever_their_number(tmp_path, count):
    times = {name: {"own": [1.0]} for name in about(3)["samples"]}
    collect.keep({**SETTINGS, "about": about(3), "samples": times}, tmp_path / "r.json")
    found = collect.known(tmp_path / "r.json", SETTINGS, about(count))
    assert found["about"] == about(count)
    assert [*found["samples"]] == about(min(count, 3))["samples"]


@pytest.mark.parametrize(
    ("settings", "asked", "left"),
    [
        ({"threads": 2}, about(3), None),
        (SETTINGS, about(3, plan="q"), None),
        (SETTINGS, about(3, widths=[[0], [9], [2]]), ["000.onnx", "002.onnx"]),
    ],
)
def test_those_of_another_network_or_setting_are_not(tmp_path, settings, asked, left):
    times = {name: {"own": [1.0]} for name in about(3)["samples"]}
    collect.keep({**SETTINGS, "about": about(3), "samples": times}, tmp_path / "r.json")
    found = collect.known(tmp_path / "r.json", settings, asked)
    assert (list(found["samples"]) if found else None) == left
