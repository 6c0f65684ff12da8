"""Products of all weights in one launch: closed forms, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from triton_here import DEVICE, HAS_GPU, why_not

import l0prune
from l0prune.errors import L0pruneWarning
from l0prune.gating import products
from l0prune.gating.multiplying import GateValues
from l0prune.gating.products import GatedWeights
from l0prune.gating.weight_tables import Table, line_of
from l0prune.training.compaction import Compaction

RUNS_ON = products.runs_on  # which the tests replace


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels on any device: Triton interprets them where there is no GPU (conftest)."""
    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.setattr(products, "runs_on", lambda device: True)


def values(begin: int) -> GateValues:
    found = GateValues()
    found.begin = begin
    return found


def line(weight: Tensor, *sites: tuple[int, int], dtype: torch.dtype | None = None) -> Any:
    found = line_of(weight, [(values(at), dim) for at, dim in sites], dtype or weight.dtype)
    assert found is not None
    return found


def along(z: Tensor, dim: int, dims: int) -> Tensor:
    return z.reshape([-1 if each == dim else 1 for each in range(dims)])


class Case:
    """A weight of some shape and format, with sites at some dims, and what should come out."""

    def __init__(self, shape: tuple[int, ...], dims: tuple[int, ...], last: bool) -> None:
        generator = torch.Generator().manual_seed(sum(shape))
        draw = torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)
        if last and len(shape) == 4:
            draw = draw.contiguous(memory_format=torch.channels_last)
        self.weight = nn.Parameter(draw)
        self.dims = dims
        self.z = torch.rand(sum(shape[dim] for dim in dims), dtype=torch.float64).to(DEVICE)
        self.grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)

    def sites(self, begin: int) -> list[tuple[int, int]]:
        found = []
        for dim in self.dims:
            found.append((begin, dim))
            begin += self.weight.shape[dim]
        return found

    def parts(self) -> list[Tensor]:
        sizes = [self.weight.shape[dim] for dim in self.dims]
        whole = zip(self.dims, self.z.split(sizes), strict=True)
        return [along(part, dim, self.weight.dim()) for dim, part in whole]

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """The product, the weight's gradient, and that of the multipliers, each by its formula."""
        factor = torch.ones_like(self.weight)
        for part in self.parts():
            factor = factor * part
        of_z = []
        for dim, own in zip(self.dims, self.parts(), strict=True):
            others = factor / own
            rest = [each for each in range(self.weight.dim()) if each != dim]
            product = self.weight * self.grad * others
            of_z.append(product.sum(rest) if rest else product)
        return self.weight * factor, self.grad * factor, torch.cat(of_z).detach()


shapes = st.lists(st.integers(1, 40), min_size=1, max_size=2).flatmap(
    lambda first: st.sampled_from([(), (3, 3), (1, 1), (2, 5)]).map(
        lambda kernel: (*first, *kernel) if len(first) == 2 else tuple(first)
    )
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(shapes)
    choice = [(0,)] if len(shape) == 1 else [(0,), (1,), (0, 1)]
    return Case(shape, draw(st.sampled_from(choice)), draw(st.booleans()))


@settings(max_examples=12, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=3))
def test_products_and_gradients_are_those_of_the_formula(found: list[Case]) -> None:
    begin, lines = 0, []
    for case in found:
        lines.append(line(case.weight, *case.sites(begin)))
        begin += len(case.z)
    z = torch.cat([case.z for case in found]).requires_grad_()
    table = Table(lines, DEVICE)
    made = GatedWeights.apply(table, z, *(case.weight for case in found))
    torch.autograd.backward(made, [case.grad for case in found])
    want = [case.expected() for case in found]
    for case, product, (value, of_weight, _) in zip(found, made, want, strict=True):
        torch.testing.assert_close(product, value)
        assert product.stride() == case.weight.stride()
        torch.testing.assert_close(case.weight.grad, of_weight)
        assert case.weight.grad is not None
        assert case.weight.grad.stride() == case.weight.stride()
    torch.testing.assert_close(z.grad, torch.cat([of_z for _, _, of_z in want]))


def test_a_layout_of_many_weights_gets_the_gradients_of_all() -> None:
    first, second = (Case((40, 33), (1,), False) for _ in range(2))
    second.z = first.z
    lines = [line(first.weight, (0, 1)), line(second.weight, (0, 1))]
    z = first.z.clone().requires_grad_()
    made = GatedWeights.apply(Table(lines, DEVICE), z, first.weight, second.weight)
    torch.autograd.backward(made, [first.grad, second.grad])
    torch.testing.assert_close(z.grad, first.expected()[2] + second.expected()[2])


def test_gradients_may_be_differentiated() -> None:
    weight = nn.Parameter(torch.randn(3, 2, dtype=torch.float64, device=DEVICE))
    z = torch.rand(5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    table = Table([line(weight, (0, 0), (3, 1))], DEVICE)

    def product(z: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = GatedWeights.apply(table, z, weight)[0]
        return result

    torch.autograd.gradgradcheck(product, (z, weight))


@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(4, 3).t(),
        torch.ones(4, 4)[:, ::2],
        torch.ones(0, 3),
        torch.ones(2, 3, 4),
        torch.ones(4, 3, dtype=torch.complex64),
    ],
    ids=["transposed", "with gaps", "empty", "two inner dims gated", "complex"],
)
def test_what_the_kernels_do_not_multiply_has_no_line(weight: Tensor) -> None:
    dims = (1, 2) if weight.dim() == 3 else (1,)
    assert line_of(weight, [(values(0), dim) for dim in dims], weight.dtype) is None


class Net(nn.Module):
    """Reads its layers as a user may: some twice, some recomputed, some by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 8, 3, padding=1)
        self.hidden = nn.Linear(8, 9)
        self.last = nn.Linear(9, 3)
        self.between: Callable[[Net], None] | None = None
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = self.second(x).relu().mean((2, 3))
        if self.between is not None:
            self.between(self)
        x = checkpoint(self.hidden, x, use_reentrant=False) if self.recomputes else self.hidden(x)
        return nn.functional.linear(x.relu(), self.last.weight, self.last.bias)


def batch(count: int = 64) -> Tensor:
    return torch.randn(count, 2, 4, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def gated(net: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    model = (net or Net()).to(DEVICE)
    return l0prune.gate(model, (batch(2),), open_probability=0.6).train()


def step(model: Any, autocast: torch.dtype | None = None) -> list[Tensor]:
    """The output and all gradients of a step with fixed noise."""
    torch.manual_seed(3)
    model.zero_grad()
    with torch.autocast(DEVICE.type, autocast or torch.bfloat16, enabled=autocast is not None):
        out = model(batch())
    out.double().square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def one_by_one(model: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Tensor]:
    """The same, each weight multiplied by itself."""
    with monkeypatch.context() as patch:
        patch.setattr(products, "runs_on", lambda device: False)
        return step(model, **options)


def made(model: Any) -> dict[int, Any]:
    """What is made for the next forward, under the state of autocast."""
    bank = l0prune.gates(model)
    bank.begin_forward(model)
    found = dict(bank.products._made)
    bank.end_forward()
    return found


def close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    for own, other in zip(found, expected, strict=True):
        assert (own - other).abs().max() <= tolerance * other.abs().max() + 1e-12


def test_a_step_is_that_of_products_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gated()
    step(model)
    weights = (model.second.weight, model.hidden.weight, model.last.weight)
    assert len(weights) <= len(made(model))
    close(step(model), one_by_one(model, monkeypatch))


def test_products_are_cast_where_autocast_would_cast_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers that compute as torch's do: what the model reads itself has its own dtype."""
    model = gated()
    # the interpreter truncates where it makes a bfloat16
    dtype = torch.bfloat16 if HAS_GPU else torch.float16
    step(model, dtype)
    with torch.autocast(DEVICE.type, dtype):
        dtypes = {tuple(of.shape): product.dtype for of, _, product in made(model).values()}
    assert dtypes[8, 6, 3, 3] == dtypes[9, 8] == dtype
    assert dtypes[3, 9] == torch.float32
    close(step(model, dtype), one_by_one(model, monkeypatch, autocast=dtype), 2e-3)


def test_a_weight_that_the_forward_changes_is_multiplied_when_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = gated()
    step(model)

    def double(net: Net) -> None:
        with torch.no_grad():
            net.hidden._parameters["weight"].mul_(2)  # type: ignore[union-attr]

    before = model.hidden._parameters["weight"].detach().clone()
    model.between = double
    torch.manual_seed(3)
    out = model(batch()).detach()
    model.between = None
    with torch.no_grad():
        model.hidden._parameters["weight"].copy_(2 * before)
    close([out], one_by_one(model, monkeypatch)[:1])


def test_what_is_recomputed_in_backward_is_multiplied_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = gated()
    model.recomputes = True
    step(model)
    known = {tuple(of.shape) for of, _, _ in made(model).values()}
    assert (9, 8) not in known
    assert (8, 6, 3, 3) in known
    close(step(model), one_by_one(model, monkeypatch))


def test_losses_of_separate_parts_go_back_one_after_the_other() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1)) for _ in range(2)
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first, second = (tower(x) for tower in self.towers)
            return first, second

    model: Any = l0prune.gate(Towers().to(DEVICE), (torch.randn(2, 4, device=DEVICE),)).train()
    x = torch.randn(32, 4, device=DEVICE)
    for _ in range(2):
        model.zero_grad()
        for loss in model(x):
            loss.sum().backward()
    assert made(model)
    assert all(p.grad is not None for p in model.parameters())


def test_a_weight_that_was_replaced_or_cut_is_read_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = gated()
    step(model)
    model.hidden._parameters["weight"] = nn.Parameter(torch.randn(9, 8, device=DEVICE))
    close(step(model), one_by_one(model, monkeypatch))
    bank = l0prune.gates(model)
    kept = bank.plan.kept(torch.arange(bank.plan.size) % 3 > 0)
    bank.set_open(kept)
    Compaction(model).begin(kept)
    step(model)
    close(step(model), one_by_one(model, monkeypatch))
    assert made(model)


@pytest.mark.parametrize("change", ["channels_last", "double", "data"])
def test_a_weight_that_lies_otherwise_in_memory_is_found_there(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the model is converted, of which the gates hear nothing."""
    model = gated()
    step(model)
    if change == "channels_last":
        model.second.to(memory_format=torch.channels_last)
    elif change == "double":  # more precise than the gates are
        model.second.double()
        model.second.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        model.second.register_forward_hook(lambda _, args, out: out.float())
    else:
        parameter = model.hidden._parameters["weight"]
        parameter.data = parameter.data.t().contiguous().t()
    for _ in range(2):
        close(step(model), one_by_one(model, monkeypatch), 1e-6)


def test_sparse_gradients_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(7, 6, sparse=True)
            self.norm = nn.LayerNorm(6)
            self.last = nn.Linear(6, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.last(self.norm(self.words(ids)))

    torch.manual_seed(0)
    ids = torch.tensor([[1, 2, 2], [4, 1, 0]], device=DEVICE)
    model: Any = l0prune.gate(Words().to(DEVICE), (ids,), open_probability=0.6).train()

    def found() -> list[Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        model(ids).square().sum().backward()
        return [p.grad.to_dense().clone() for p in model.parameters()]

    found()
    assert made(model)
    mine = found()
    with monkeypatch.context() as patch:
        patch.setattr(products, "runs_on", lambda device: False)
        close(mine, found())


def test_where_triton_fails_it_is_said_once_and_each_weight_is_multiplied_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = gated()
    step(model)
    kernels = products.kernels()
    assert kernels is not None

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(products, "_failed", [])
    monkeypatch.setattr(kernels, "launch", fails)
    with pytest.warns(L0pruneWarning, match="Triton does not run here .Failed to find C"):
        found = step(model)
    assert not RUNS_ON(torch.device("cuda"))
    monkeypatch.undo()
    close(found, one_by_one(model, monkeypatch))


def test_copies_make_their_own() -> None:
    model = gated()
    step(model)
    other = copy.deepcopy(model)
    assert made(model)
    assert not made(other)
    close(step(other), step(model))


@pytest.mark.slow
def test_launches_do_not_grow_with_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated step starts as many kernels more than a plain one, however deep the model is."""
    from benchmarks.kernels import count, step_of

    def more(depth: int) -> int:
        layers = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()) for _ in range(depth)]
        plain = nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, 4))
        x = torch.randn(64, 3, 4, 4)
        found = []
        for model in (plain, l0prune.gate(copy.deepcopy(plain), (x[:2],))):
            run = step_of(model, x, autocast=None)
            run()
            run()
            found.append(sum(count(run).values()))
        return found[1] - found[0]

    if HAS_GPU:
        pytest.skip("launches are counted on the CPU")
    assert more(2) == more(5)


def test_without_triton_each_weight_is_multiplied_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert RUNS_ON(torch.device("cuda"))
    assert not RUNS_ON(torch.device("cpu"))
    monkeypatch.setattr(products, "kernels", lambda: None)
    assert not RUNS_ON(torch.device("cuda"))
