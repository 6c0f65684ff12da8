"""Nodes of an int8 file in float32, by made-up times, compared with all choices that there are."""

import itertools
import random

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from l0prune.exporting.onnx.profile import FileNode
from l0prune.features.int8.float_regions import (
    Conversion,
    NodeTimes,
    Operator,
    in_float32,
    operators_of,
)


def chain(*times, conversion, size=100):
    """The nodes in float32 of a chain from ``x`` to ``y``, by pairs of times."""
    values = ["x", *(f"v{n}" for n in range(1, len(times))), "y"]
    operators = [
        Operator(f"n{n}", (values[n],), (values[n + 1],), size, *pair)
        for n, pair in enumerate(times)
    ]
    return in_float32(operators, (Conversion(conversion),), {"x": size}, ["y"])


@pytest.mark.parametrize(
    ("middle", "conversion", "expected"),
    [
        ((1.0, 0.5), 0.4, set()),
        ((0.1, None), 0.1, {"n1"}),  # four conversions for a gain of 1
        ((0.1, None), 0.3, {"n0", "n1", "n2"}),
        ((0.1, None), 0.0, {"n1"}),
        ((5.0, 9.0), 0.1, {"n1"}),
        ((5.0, 5.1), 0.1, set()),  # a gain of less than a twentieth is none
    ],
)
def test_runs_on_integers_are_as_long_as_they_gain(middle, conversion, expected):
    found = chain((1.0, 0.5), middle, (1.0, 0.5), conversion=conversion)
    assert found == expected


def cost(operators, conversions, inputs, outputs, single):
    """The time of a choice, added up as a file runs it."""
    total = sum(o.single if o.name in single else 0.95 * o.whole for o in operators)
    writers = {name: o for o in operators for name in o.writes}
    for name in {*writers, *inputs}:
        size = inputs.get(name) if name in inputs else writers[name].size
        is_single = name in inputs or writers[name].name in single
        readers = {o.name in single for o in operators if name in o.reads}
        readers |= {True} if name in outputs else set()
        if (not is_single) in readers:
            total += sum(each.ms(size) for each in conversions)
    return total


@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_is_faster(seed):
    draw = random.Random(seed)
    values, operators = ["x"], []
    for number in range(7):
        reads = tuple(dict.fromkeys(draw.choices(values[-3:], k=draw.choice((1, 2)))))
        whole = None if draw.random() < 0.25 else draw.randint(1, 40) / 10
        single = draw.randint(1, 40) / 10
        size = draw.choice((10, 100, 1000))
        operators.append(Operator(f"n{number}", reads, (f"v{number}",), size, single, whole))
        values.append(f"v{number}")
    conversions = (Conversion(0.1, 0.001), Conversion(0.02, 0.0005))
    outputs, inputs = ["v5", "v6"], {"x": 200}
    found = in_float32(operators, conversions, inputs, outputs)
    fixed = {o.name for o in operators if o.whole is None}
    free = [o.name for o in operators if o.whole is not None]
    choices = [
        {*fixed, *chosen}
        for count in range(len(free) + 1)
        for chosen in itertools.combinations(free, count)
    ]
    best = min(cost(operators, conversions, inputs, outputs, each) for each in choices)
    assert found >= fixed
    assert cost(operators, conversions, inputs, outputs, found) == pytest.approx(best, abs=1e-5)


def event(name, operator, micro, kind="float", size=4, read=None):
    read, written = ([{each: [1, size]}] for each in (read or kind, kind))
    about = {"op_name": operator, "input_type_shape": read, "output_type_shape": written}
    return {"name": f"{name}_kernel_time", "dur": micro, "args": about}


def test_times_of_nodes_are_those_of_a_call_without_a_profile():
    nodes = [
        FileNode("", "QuantizeLinear", name="x_q"),
        FileNode("", "Conv", (0,), (8, 3, 3, 3), name="stem"),
        FileNode("", "DequantizeLinear", (1,), name="x_dq"),
        FileNode("", "Softplus", (2,), name="curve"),
        FileNode("", "Shape", (3,), name="shape"),
    ]
    events = [
        event("ReorderInput", "ReorderInput", 5, size=6),
        event("n00000_", "QuantizeLinear", 12, "uint8", 40, "float"),
        event("n00001__token_3", "QLinearConv", 32, "uint8"),
        event("Transpose_token_9", "Transpose", 4),
        event("n00002_", "DequantizeLinear", 7, "float", 4, "uint8"),
        event("n00003_", "Softplus", 9),
        event("n00004_", "Shape", 3, "int64", 2, "float"),
    ]
    found = NodeTimes.of(events, nodes, (72 - 14) / 1e3)  # each event takes 2 µs by itself
    expected = {"stem": 30 + 2 + 3, "curve": 7, "shape": 1}
    assert found.ms == pytest.approx({name: micro / 1e3 for name, micro in expected.items()})
    assert (found.on_integers, found.others) == ({"stem"}, {"shape"})
    assert found.conversions == [(40, pytest.approx(0.010)), (4, pytest.approx(0.005))]
    assert found.layouts == [(6, pytest.approx(0.003)), (4, pytest.approx(0.002))]
    assert found.sizes == {"stem": 4, "curve": 4, "shape": 2}
    slow = NodeTimes.of(events, nodes, 0.0)  # an event takes no more by itself than the shortest
    assert slow.ms["shape"] == 0
    assert Conversion.of(found.conversions).ms(440) == pytest.approx(0.005 + 0.005 * 10)
    assert Conversion.of([]).ms(10) == 0


def test_nodes_have_the_times_of_both_files():
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="conv"),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Softplus", ["b"], ["c"], name="curve"),
        helper.make_node("Shape", ["c"], ["s"], name="shape"),
        helper.make_node("Reshape", ["c", "s"], ["y"], name="reshape"),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xy")
    weight = numpy_helper.from_array(np.ones((1, 1, 1, 1), np.float32), "w")
    graph = helper.make_graph(nodes, "g", [x], [y], [weight])
    single = NodeTimes(
        {"conv": 3.0, "curve": 1.0, "reshape": 0.5}, sizes={"conv": 9}, others={"shape"}
    )
    whole = NodeTimes({"conv": 2.0, "curve": 1.1, "reshape": 0.4}, {"conv", "reshape"})
    assert operators_of(graph, single, whole, {"reshape"}) == [
        Operator("conv", ("x",), ("a",), 9, 3.0, 2.0),
        Operator("relu", ("a",), ("b",), 9, 0.0, 0.0),  # within the convolution in both files
        Operator("curve", ("b",), ("c",), 9, 1.0, None),
        Operator("shape", ("c",), (), 9, 0.0, 0.0),
        Operator("reshape", ("c",), ("y",), 9, 0.5, None),
    ]
