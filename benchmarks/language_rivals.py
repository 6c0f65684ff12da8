"""What others cut of a transformer, each by its authors' formula, on the gates of ``l0prune.gate``.

Units are the neurons of each MLP and the heads of each attention (groups that share keys and
values), so a gate acts on the columns of what reads them: ``down_proj`` and ``o_proj`` of a Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

import l0prune
from l0prune.gating.attaching import gated_tensor
from l0prune.plan.plan import Axis, Plan, Site

# GRAIL's ridge, as a part of the mean of the Gram matrix' diagonal (the paper: 1e-4 to 5e-3).
_RIDGE = 1e-3
# LLM-Pruner leaves the first four and the last two blocks of a Llama-7B whole.
_WHOLE_FIRST, _WHOLE_LAST = 4, 2

Batches = Sequence[tuple[Tensor, Tensor | None]]  # tokens, and which of these are no padding
Run = Callable[[Tensor, Tensor | None], object]


class Moments:
    """First and second moments of a layer's inputs over all tokens, by column, in float64."""

    def __init__(self) -> None:
        self.count, self._sum, self._squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, rows: Tensor) -> None:
        rows = rows.double()
        self.count += len(rows)
        self._sum = self._sum + rows.sum(0)
        self._squares = self._squares + rows.square().sum(0)

    @property
    def mean(self) -> Tensor:
        return self._sum / self.count

    @property
    def mean_square(self) -> Tensor:
        return self._squares / self.count

    @property
    def variance(self) -> Tensor:
        return (self.mean_square - self.mean.square()) * self.count / (self.count - 1)


@dataclass
class Study:
    """A gated network with what its layers see in calibration, measured once for all rivals.

    Attributes:
        model: gated on its heads and MLP neurons, all gates open.
        batches: of calibration.
        run: a forward of a batch.
        blocks: the layers, in their order.
    """

    model: nn.Module
    batches: Batches
    run: Run
    blocks: Sequence[nn.Module]

    @property
    def plan(self) -> Plan:
        return l0prune.gates(self.model).plan

    @cached_property
    def _seen(self) -> tuple[dict[str, Moments], list[float]]:
        """Moments of the inputs of each site's layer, and the influence of each block."""
        moments = {site.tensor: Moments() for site in self.plan.sites}
        alike = [torch.zeros((), dtype=torch.float64) for _ in self.blocks]
        kept = Tensor()
        count = 0

        def rows(tensor: Tensor) -> Tensor:
            return tensor.detach()[kept]

        with ExitStack() as hooks, torch.no_grad():
            for name, found in moments.items():
                layer = self.model.get_submodule(name.removesuffix(".weight"))

                def look(_: nn.Module, inputs: tuple, found: Moments = found) -> None:
                    found.add(rows(inputs[0]))

                hooks.callback(layer.register_forward_pre_hook(look).remove)
            for number, block in enumerate(self.blocks):

                def compare(
                    _: nn.Module, inputs: tuple, output: object, number: int = number
                ) -> None:
                    after = output[0] if isinstance(output, tuple) else output
                    assert isinstance(after, Tensor)
                    cosine = nn.functional.cosine_similarity(rows(inputs[0]), rows(after), dim=-1)
                    alike[number] += cosine.double().sum()

                hooks.callback(block.register_forward_hook(compare).remove)
            for tokens, real in self.batches:
                kept = torch.ones_like(tokens, dtype=torch.bool) if real is None else real.bool()
                count += int(kept.sum())
                self.run(tokens, real)
        return moments, [1 - float(each) / count for each in alike]

    def moments(self, site: Site) -> Moments:
        return self._seen[0][site.tensor]

    @property
    def influences(self) -> list[float]:
        return self._seen[1]

    @cached_property
    def sizes(self) -> Tensor:
        """Parameters that go with each unit."""
        return self.summed({name: torch.ones_like(p) for name, p in self.parameters().items()})

    def parameters(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if name in self.plan.tensors}

    def summed(self, values: Mapping[str, Tensor]) -> Tensor:
        """Sum of values, one for each parameter, over all that goes with each unit."""
        total = torch.zeros(self.plan.size + 1, dtype=torch.float64)
        for name, value in values.items():
            for dim, layout in enumerate(self.plan.tensors[name]):
                for numbers in self.plan.gate_table(layout):
                    total.index_add_(0, numbers, value.movedim(dim, 0).flatten(1).sum(1).double())
        return total[:-1]

    def over_columns(self, formula: Callable[[Site, Tensor], Tensor], mean: bool = False) -> Tensor:
        """Sum (or mean) for each unit of what a formula gives for the columns of its reader."""
        total = torch.zeros(self.plan.size + 1, dtype=torch.float64)
        count = total.clone()
        for site in self.plan.sites:
            (numbers,) = self.plan.gate_table(site.layout)
            values = formula(site, gated_tensor(self.model, site).detach().double())
            total.index_add_(0, numbers, values)
            count.index_add_(0, numbers, torch.ones_like(values))
        return (total / count.clamp(min=1) if mean else total)[:-1]

    def axis_of(self, site: Site) -> Axis:
        number = int(self.plan.gate_table(site.layout)[0, 0])
        return next(
            axis for axis in self.plan.axes if number in range(axis.start, axis.start + axis.size)
        )

    def block_of(self, axis: Axis) -> int:
        named = {id(block): number for number, block in enumerate(self.blocks)}
        parts = axis.name.split(".")
        owners = (self.model.get_submodule(".".join(parts[:n])) for n in range(1, len(parts) - 1))
        return next(named[id(owner)] for owner in owners if id(owner) in named)

    @contextmanager
    def biased(self, open_: Tensor) -> Iterator[None]:
        """Within the context each reader has the mean of what is cut in its bias."""
        with ExitStack() as hooks:
            for site in self.plan.sites:
                closed = ~self.plan.mask(site.layout, open_)
                weight = gated_tensor(self.model, site).detach().double()
                mean = (weight[:, closed] @ self.moments(site).mean[closed]).float()
                layer = self.model.get_submodule(site.tensor.removesuffix(".weight"))

                def add(_: nn.Module, __: tuple, output: Tensor, mean: Tensor = mean) -> Tensor:
                    return output + mean

                hooks.callback(layer.register_forward_hook(add).remove)
            yield

    @cached_property
    def grams(self) -> dict[str, Tensor]:
        """XᵀX of the inputs of each site's layer in the dense network, over all tokens, float64."""
        found = dict[str, Tensor]()

        def look(name: str, _: nn.Module, inputs: tuple) -> None:
            rows = inputs[0].detach().flatten(0, -2)
            found[name] = found.get(name, 0.0) + (rows.mT @ rows).double()

        with ExitStack() as hooks, torch.no_grad():
            for site in self.plan.sites:
                layer = self.model.get_submodule(site.tensor.removesuffix(".weight"))
                hook = layer.register_forward_pre_hook(partial(look, site.tensor))
                hooks.callback(hook.remove)
            for tokens, real in self.batches:
                self.run(tokens, real)
        return found

    @contextmanager
    def reconstructed(self, open_: Tensor) -> Iterator[None]:
        """Within the context each reader's weight is W·G_:P (G_PP + λI)⁻¹ on what is kept, P.

        GRAIL (Tang et al. 2026): ridge regression of all inputs from those that are kept.
        """
        before = dict[str, Tensor]()
        for site in self.plan.sites:
            weight, gram = gated_tensor(self.model, site), self.grams[site.tensor]
            kept = self.plan.mask(site.layout, open_).nonzero().flatten()
            inner = gram[kept[:, None], kept].clone()
            inner.diagonal().add_(_RIDGE * inner.diagonal().mean())
            back = torch.linalg.solve(inner, gram[kept])  # the transpose of G_:P (G_PP + λI)⁻¹
            before[site.tensor] = weight.detach().clone()
            with torch.no_grad():
                weight[:, kept] = (weight.double() @ back.mT).to(weight)
        try:
            yield
        finally:
            with torch.no_grad():
                for site in self.plan.sites:
                    gated_tensor(self.model, site).copy_(before[site.tensor])


def uniform(study: Study, scores: Tensor, cut: float, blocks: Iterable[int]) -> Tensor:
    """Close the lowest units of each of these blocks, in all the same share.

    Heads are rounded down; as many neurons go instead.
    """
    chosen, open_ = set(blocks), torch.ones(study.plan.size, dtype=torch.bool)
    axes = [axis for axis in study.plan.axes if study.block_of(axis) in chosen]
    sizes = {axis.name: float(study.sizes[axis.start]) for axis in axes}
    share = cut / sum(sizes[axis.name] * axis.size for axis in axes)
    left = cut
    for axis in axes:
        if axis.kind == "head":
            count = int(share * axis.size + 1e-9)
            open_[axis.start + scores[axis.slice].argsort()[:count]] = False
            left -= count * sizes[axis.name]
    mlps = [axis for axis in axes if axis.kind != "head"]
    for number, axis in enumerate(mlps):
        count = min(round(left / (len(mlps) - number) / sizes[axis.name]), axis.size - 1)
        open_[axis.start + scores[axis.slice].argsort()[:count]] = False
        left -= count * sizes[axis.name]
    return open_


def together(study: Study, scores: Tensor, cut: float) -> Tensor:
    """Close the lowest units of the whole network, until so many parameters are gone."""
    order = scores.argsort()
    gone = study.sizes[order].cumsum(0)
    open_ = torch.ones(study.plan.size, dtype=torch.bool)
    open_[order[: int((gone - cut).abs().argmin()) + 1]] = False
    return open_


def magnitude(study: Study, cut: float) -> Tensor:
    """‖W_j‖₂ of the column that reads the unit, the same share in each layer."""
    scores = study.over_columns(lambda _, weight: weight.norm(dim=0))
    return uniform(study, scores, cut, range(len(study.blocks)))


def wanda_sp(study: Study, cut: float) -> Tensor:
    """The mean over i of |W_ij|·‖X_j‖₂, the same share in each layer (Sun et al. 2023; An 2023)."""
    scores = study.over_columns(
        lambda site, weight: weight.abs().mean(0) * study.moments(site).mean_square.sqrt()
    )
    return uniform(study, scores, cut, range(len(study.blocks)))


def flap(study: Study, cut: float) -> Tensor:
    """Var(X_j)·‖W_j‖², standardised in each layer, over all layers (An et al. 2023).

    As in the authors' code that of an attention is squared before; its heads have the mean of their
    columns. The mean of what is cut goes into biases (``Study.biased``).
    """

    def formula(site: Site, weight: Tensor) -> Tensor:
        values = study.moments(site).variance * weight.square().sum(0)
        values = values.square() if study.axis_of(site).kind == "head" else values
        return (values - values.mean()) / values.std()

    return together(study, study.over_columns(formula, mean=True), cut)


def taylor(study: Study, cut: float, slopes: Mapping[str, Tensor]) -> Tensor:
    """Σ|w·∂L/∂w| over all weights of a unit, alike in all blocks but the outer (Ma et al. 2023)."""
    scores = study.summed(
        {name: (p.detach() * slopes[name]).abs() for name, p in study.parameters().items()}
    )
    inner = range(_WHOLE_FIRST, len(study.blocks) - _WHOLE_LAST)
    return uniform(study, scores, cut, inner)


def short_gpt(study: Study, cut: float) -> Tensor:
    """Whole blocks of the least influence, 1 − cos(input, output) (Men et al. 2024)."""
    order = sorted(range(len(study.blocks)), key=study.influences.__getitem__)
    sizes = [0.0] * len(order)
    for axis in study.plan.axes:
        sizes[study.block_of(axis)] += float(study.sizes[axis.slice].sum())
    gone = torch.tensor([sizes[number] for number in order]).cumsum(0)
    closed = set(order[: int((gone - cut).abs().argmin()) + 1])
    open_ = torch.ones(study.plan.size, dtype=torch.bool)
    for axis in study.plan.axes:
        if study.block_of(axis) in closed:
            open_[axis.slice] = False
    return open_
