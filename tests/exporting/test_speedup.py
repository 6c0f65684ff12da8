"""What a speedup says beside its ideal, where it is lost, and what is advised."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from timed_network import Small

import l0prune
from l0prune.exporting.onnx import speedup
from l0prune.exporting.onnx.profile import LayerTime
from l0prune.exporting.onnx.speedup import (
    RUNTIME,
    CutFacts,
    Loss,
    Speedup,
    advice_for,
    cut_facts,
    losses_of,
)
from l0prune.exporting.onnx.times import Times
from l0prune.plan.width_times import have_widths

LOSS = Loss("deep", "Conv", 0.4, 0.1, "widths", "67 channels are no multiple of 16")


def times(small, dense=2.0):
    return Times((dense,) * 8, (small,) * 8, 1, 1, "onnxruntime 1.0", "a processor")


def found(small, macs=(1000, 500), **parts):
    return Speedup(("macs=0.5",), times(small), macs, **parts)


def test_one_sentence_is_enough_near_the_ideal():
    near = found(1.2)
    assert (near.is_near, near.ideal, near.measured) == (True, 2.0, pytest.approx(1 / 0.6))
    assert str(near) == (
        "2 → 1.2 ms (1.67 times as fast; median of 8 alternating runs, interquartile range 0%), "
        "asked macs=0.5, ideal by MACs 2.00 times; 1 thread, batch 1, onnxruntime 1.0, a processor."
    )
    assert not near.warning


def test_far_from_the_ideal_it_says_why_and_what_can_help():
    far = found(1.6, losses=(LOSS,), advice=("widths in multiples of 16 (round_to=16)",))
    assert not far.is_near
    assert str(far).endswith(
        "That is 62% of the ideal. Most is lost in deep (Conv): 0.4 ms instead of 0.1: 67 channels "
        "are no multiple of 16. What can help: widths in multiples of 16 (round_to=16)."
    )
    assert not far.warning
    slower = replace(far, times=times(2.4))
    assert slower.warning.startswith("the file is not faster than the dense network's: 2 → 2.4 ms")
    assert "round_to=16" in slower.warning
    assert "round_to" not in replace(slower, advice=()).warning
    assert slower.to_dict()["losses"][0]["path"] == "deep"


def test_a_network_that_was_not_cut_is_not_warned_of():
    assert (found(2.1, (1000, 1000)).warning, found(2.1, (1000, 1000)).is_near) == ("", True)
    assert found(2.1, (0, 0)).is_near


def test_a_busy_machine_is_said():
    noisy = replace(times(1.0), small=(0.7, 1.0, 1.4, 0.8, 1.3, 1.0, 0.9, 1.1))
    assert "The machine was busy" in str(Speedup((), noisy, (1000, 500)))
    assert "asked" not in str(Speedup((), noisy, (1000, 500)))


def conv(path, ms, work, widths=(32, 32), **parts):
    return LayerTime(path, "Conv", ms, work, True, widths, **parts)


def test_the_layers_that_lose_most_are_told_with_what_their_times_show():
    dense = [
        conv("a", 0.5, 100.0, is_blocked=True),
        conv("b", 0.5, 100.0),
        conv("c", 0.2, 100.0),
        conv("d", 0.1, 100.0),
        LayerTime("e", "Softmax", 0.1, 10.0),
        LayerTime("f", "Add", 0.008, 10.0),
        conv("gone", 0.5, 100.0),
    ]
    small = [
        conv("a", 0.6, 50.0, (27, 16)),
        conv("b", 0.25, 50.0, (16, 16)),
        conv("c", 0.19, 50.0, (16, 16)),
        conv("d", 0.05, 50.0, (16, 16)),
        LayerTime("e", "Softmax", 0.1, 5.0),
        LayerTime("f", "Add", 0.008, 5.0),
    ]
    told = losses_of(dense, small, found(1.3), 16)
    assert [(loss.path, loss.cause) for loss in told] == [
        ("a", "widths"),
        ("c", "size"),
        ("e", "memory"),
    ]
    assert "27 channels are no multiple of 16: the runtime leaves its fast layout" in str(told[0])
    assert told[0].due == 0.25
    assert "it takes 95% of its time for 50% of its MACs" in told[1].reason


def test_what_is_beside_the_nodes_is_the_runtimes():
    dense, small = [LayerTime("f", "Add", 0.009, 10.0)], [LayerTime("f", "Add", 0.009, 2.0)]
    tiny = Speedup((), times(0.06, 0.07), (1000, 500))
    calls, add = losses_of(dense, small, tiny, 16)
    assert (calls.operator, calls.ms) == (RUNTIME, pytest.approx(0.051))
    assert "the runtime itself: 0.051 ms instead of 0.03" in str(calls)
    assert add.cause == "start"
    assert "at 9 µs a node, starting it counts" in str(add)


def test_widths_of_the_model_itself_are_no_reason():
    dense, small = [conv("a", 1.9, 100.0, (3, 32))], [conv("a", 1.7, 50.0, (3, 16))]
    (loss,) = losses_of(dense, small, found(1.8), 16)
    assert loss.cause == "size"
    (new,) = losses_of([], [conv("a", 1.7, 50.0)], found(1.8), 16)
    assert new.cause == "new"
    odd = [conv("a", 1.7, 50.0, (3, 27))]
    assert losses_of(dense, odd, found(1.8), 16)[0].reason.endswith("fills its blocks in part")
    worse = [conv("a", 9.0, 50.0, (3, 27))]
    assert losses_of(dense, worse, found(1.8), 16)[0].reason.endswith("takes a slower path")
    moved = [conv("a", 1.7, 50.0, (16, 16), reorders=0.6)]
    assert [each.cause for each in losses_of(dense, moved, found(1.8), 16)] == ["widths"]


def test_nothing_is_advised_that_was_done():
    losses = (
        LOSS,
        Loss("", RUNTIME, 1.0, 0.1, "runtime", ""),
        Loss("e", "Add", 1, 0, "memory", ""),
    )
    everything = advice_for(losses, CutFacts(("macs=0.5",), may_drop_branches=True))
    assert [text.partition(" ")[0] for text in everything] == [
        "whole", "a", "gates", "more", "a",
    ]  # fmt: skip
    rounded = advice_for(losses, CutFacts(("macs=0.5",), in_blocks=True))
    assert "round_to" not in " ".join(rounded)
    in_time = advice_for(losses, CutFacts(("params=0.5", "layer3.*: latency=0.5")))
    assert "speed=2" not in " ".join(in_time)
    assert "eight bits" not in " ".join(advice_for(losses, CutFacts(beside=["int8"])))
    done = CutFacts(("speed=2",), in_blocks=True, beside=["int8"])
    assert advice_for((LOSS,), done) == ()


def test_facts_are_those_of_the_cut(monkeypatch):
    eights = SimpleNamespace(blocks=lambda plan: [8 if has else 1 for has in have_widths(plan)])
    monkeypatch.setattr(speedup, "times_on", lambda target: eights)
    monkeypatch.setattr(speedup, "runtime_block", lambda: 8)
    model = l0prune.gate(Small().eval(), (torch.randn(2, 3, 12, 12),), exclude="head.in")
    gates = l0prune.gates(model)

    def settings(round_to):
        l0prune.fit(model, "macs=0.5", torch.rand(gates.plan.size), round_to=round_to)
        return cut_facts(gates.plan, gates.plan.kept(gates.open()), gates.asked)

    assert settings(1) == CutFacts(("macs=0.5",), False, 8)
    gates.set_open(torch.ones(gates.plan.size, dtype=torch.bool))
    assert settings(8).in_blocks
    everything = torch.ones(gates.plan.size, dtype=torch.bool)
    whole = cut_facts(gates.plan, everything, (), ["int8"])
    assert whole == CutFacts((), True, 8, beside=["int8"])
    everything[[axis.start for axis in gates.plan.axes if axis.kind == "branch"]] = False
    assert cut_facts(gates.plan, gates.plan.kept(everything), (), ["int8"]).in_blocks


@pytest.mark.parametrize(("flags", "block"), [(["avx512f"], 16), (["avx2"], 8), ([], 16)])
def test_blocks_are_those_of_the_processor(monkeypatch, flags, block):
    monkeypatch.setattr(speedup.collect, "processor_flags", lambda: flags)
    assert speedup.runtime_block() == block
