"""Under torch.compile gates cost no compilation but one for each size of the network."""

import pytest
import torch
from shared_runs import COMMON, FEATURES, doubled, mlp, residual, task
from small_task import network

import l0prune
from l0prune.training.doctor import costly_compiling

BUDGET = {"budget": "params=0.5", "lam": None, "gate_lr": None, "epochs": 6}
SEEN = []


@torch._dynamo.register_backend(name="counting")
def _counting(graph, _):
    """Note the graphs with layers in them; others draw or drop multipliers."""
    if any(getattr(node.target, "__name__", "") == "linear" for node in graph.graph.nodes):
        SEEN.append(graph)
    return graph.forward


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    SEEN.clear()
    return SEEN


def annealed():
    example = torch.zeros(2, FEATURES, dtype=torch.float64)
    gate = l0prune.ContinuousSparsification()
    return l0prune.gate(network(norm=False).double(), example, gate=gate)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by a compiler looking
@pytest.mark.parametrize(
    ("make", "settings", "sizes"),
    [
        (mlp, {"compact": "never", "accumulate": 2}, 1),  # phases, and the penalty's warm-up
        (annealed, {"compact": "never"}, 1),  # a gate whose settings change with every step
        (mlp, BUDGET, 2),
        (residual, BUDGET, 2),
    ],
    ids=["phases", "annealed", "cut", "branches"],
)
@pytest.mark.one_in(2)
def test_a_run_compiles_once_for_each_size(make, settings, sizes, compiled):
    with torch._dynamo.config.patch(error_on_recompile=sizes == 1):
        l0prune.finetune(make(), task(doubled()), **{**COMMON, **settings}, compile="counting")
    assert len(compiled) == sizes


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.one_in(2)
def test_a_gated_forward_is_one_graph(fixed):
    model, x = mlp(), torch.randn(4, FEATURES, dtype=torch.float64)
    l0prune.gates(model).fixed = fixed
    expected = model.eval()(x)  # and the multipliers of this one are remembered
    around = torch.nn.Sequential(model)
    assert torch._dynamo.explain(around.train())(x).graph_break_count == 0
    found = torch.compile(around.eval(), backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(found, expected)


def test_what_compiling_cost_is_said():
    assert costly_compiling([], 10.0) == costly_compiling([0.4, 0.5], 10.0) == {}
    (said,) = costly_compiling([20.0, 13.0], 40.0).values()
    assert "compiling took 33 of 40 s of training (2 times, once for each size)" in said
