"""Under torch.compile one operator multiplies all weights: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from triton_here import DEVICE, HAS_GPU, why_not

import l0prune
from l0prune.gating import products
from l0prune.gating.compiled_products import CompiledWeights, differentiate, multiply, table_of
from l0prune.gating.multiplying import GateValues
from l0prune.gating.weight_tables import kernels, line_of
from l0prune.training.compaction import Compaction

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by dynamo
ONE_STEP = ["_multiply", "_differentiate", "_add_up", "_add_up"]


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched, on any device."""
    if reason := why_not():
        pytest.skip(reason)
    torch._dynamo.reset()
    run, found = kernels(), []
    assert run is not None
    launch = run.launch

    def note(kernel: Any, *args: Any, **constants: Any) -> None:
        found.append(kernel.fn.__name__)
        launch(kernel, *args, **constants)

    monkeypatch.setattr(run, "launch", note)
    monkeypatch.setattr(products, "runs_on", lambda device: True)
    return found


class Net(nn.Module):
    """Reads a weight by hand, and may leave a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 8, 3, padding=1)
        self.hidden = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu()).relu().mean((2, 3))
        x = x if self.skips else self.hidden(x).relu()
        return nn.functional.linear(x, self.last.weight, self.last.bias)


def batch(dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 2, 4, 4, dtype=dtype, device=DEVICE)


def gated(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    model = Net().to(DEVICE, dtype, memory_format=torch.channels_last)
    return l0prune.gate(model, (batch(dtype)[:2],), open_probability=0.6).train()


def steps(model: Any, run: Callable[[Tensor], Tensor], count: int = 1) -> list[Tensor]:
    """Outputs and gradients of steps with fixed noise."""
    found = []
    x = batch(model.first.weight.dtype)
    for seed in range(count):
        torch.manual_seed(seed)
        model.zero_grad()
        out = run(x)
        out.double().square().sum().backward()
        found += [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


def compiled(model: nn.Module, backend: Any = "eager") -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    for own, other in zip(found, expected, strict=True):
        assert (own - other).abs().max() <= tolerance * other.abs().max()


def one_by_one(model: Any, count: int = 1) -> list[Tensor]:
    """The same steps, each weight multiplied by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "runs_on", lambda device: False)
        return steps(model, model, count)


def test_a_graph_has_one_operator_forward_and_one_back(launched: list[str]) -> None:
    """And no copy of a gradient in channels_last, nor a new graph for the next step.

    Products are made in the graph that reads them: handed from one to another they are views of one
    tensor, of which each gets a gradient of all.
    """
    model, seen = gated(), Counter[str]()

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen["graphs"] += 1
        seen.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = steps(model, compiled(model, backend), 2)
    assert launched == 2 * ONE_STEP
    close(found, one_by_one(model, 2))
    weight = model.second._parameters["weight"]
    assert weight.grad.stride() == weight.stride()
    assert seen["l0prune.multiply.default"] == seen["l0prune.differentiate.default"] == 1
    assert seen["aten.clone.default"] == 0
    assert seen["graphs"] == 2


@pytest.mark.slow
def test_inductor_calls_the_operators(launched: list[str]) -> None:
    model = gated()
    with torch._inductor.config.patch(fallback_random=True):  # the noise of eager mode
        found = steps(model, compiled(model, "inductor"), 2)
    assert launched == 2 * ONE_STEP
    close(found, one_by_one(model, 2))


@pytest.mark.slow
@pytest.mark.parametrize("change", ["frozen", "skips", "eval"])
def test_what_takes_no_part_is_left_as_it_is(change: str, launched: list[str]) -> None:
    """A layer that is skipped has a gradient of 0 rather than none."""
    model = gated()
    if change == "frozen":
        model.hidden._parameters["weight"].requires_grad_(False)
    model.skips = change == "skips"
    model.train(change != "eval")
    found = steps(model, compiled(model))
    assert launched == ONE_STEP
    if model.skips:
        assert not model.hidden._parameters["weight"].grad.any()
        found = [
            own
            for own, p in zip(found, [None, *model.parameters()], strict=False)
            if p is None or p is not model.hidden._parameters["weight"]
        ]
    close(found, one_by_one(model))


@pytest.mark.slow
def test_products_are_cast_where_autocast_would_cast_them(launched: list[str]) -> None:
    """What the model reads itself has a dtype of its own, and so is multiplied by itself."""
    dtype = torch.bfloat16 if HAS_GPU else torch.float16  # see test_products
    model = gated(torch.float32)
    run = compiled(model)

    def cast(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return torch.autocast(DEVICE.type, dtype)(lambda x: run(x))

    found = steps(model, cast(run))
    assert launched == ONE_STEP
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "runs_on", lambda device: False)
        close(found, steps(model, cast(model)), 5e-3)


@pytest.mark.slow
def test_a_model_that_is_cut_is_compiled_once_more(launched: list[str]) -> None:
    model = gated()
    run = compiled(model)
    steps(model, run)
    bank = l0prune.gates(model)
    kept = bank.plan.kept(torch.arange(bank.plan.size) % 3 > 0)
    bank.set_open(kept)
    Compaction(model).begin(kept)
    launched.clear()
    close(steps(model, run), one_by_one(model))
    assert launched == ONE_STEP


def test_a_part_that_is_compiled_reads_what_the_whole_has_made(launched: list[str]) -> None:
    model = gated()
    model.hidden = compiled(model.hidden)
    steps(model, model)
    launched.clear()
    close(steps(model, model), one_by_one(copy.deepcopy(model)))
    assert launched.count("_multiply") == 1


def test_a_graph_for_export_has_torch_s_operators_alone() -> None:
    program = torch.export.export(gated().eval(), (batch(),))
    assert not any(str(node.target).startswith("l0prune.") for node in program.graph.nodes)


def arguments() -> tuple[Tensor, list[Tensor], str]:
    """Multipliers, weights of several forms, and their lines as text."""
    torch.manual_seed(0)
    form = torch.channels_last
    weights = [
        torch.randn(5, 3, 2, 2, dtype=torch.float64, device=DEVICE).to(memory_format=form),
        torch.randn(4, 3, dtype=torch.float64, device=DEVICE),
    ]
    rows, columns = GateValues(), GateValues()
    columns.begin, rows.begin = 0, 3
    sites = [[(columns, 1)], [(columns, 1), (rows, 0)]]
    lines = [line_of(w, s, w.dtype) for w, s in zip(weights, sites, strict=True)]
    text = str([list(line.numbers) for line in lines if line is not None])
    z = torch.rand(7, dtype=torch.float64, device=DEVICE)
    return z, [w.requires_grad_() for w in weights], text


def test_the_operator_is_the_formula_and_its_gradient() -> None:
    z, (first, second), lines = arguments()
    made = CompiledWeights.apply(lines, torch.float64, z, first, second)
    table_of.cache_clear()  # as in a process that takes the graph from a cache
    torch.testing.assert_close(made[0], first * z[:3].reshape(1, 3, 1, 1))
    torch.testing.assert_close(made[1], second * z[:3] * z[3:, None])
    assert made[0].stride() == first.stride()

    def product(z: Tensor, *weights: Tensor) -> Any:
        return CompiledWeights.apply(lines, torch.float64, z, *weights)

    torch.autograd.gradcheck(product, (z.requires_grad_(), first, second), fast_mode=True)


def test_torch_finds_the_operators_sound() -> None:
    z, weights, lines = arguments()
    weights = [weight.detach() for weight in weights]
    kinds = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(multiply, (z, weights, lines, torch.float64), test_utils=kinds)
    more = (z, weights, [w + 1 for w in weights], lines, torch.float64)
    torch.library.opcheck(differentiate, more, test_utils=kinds)
