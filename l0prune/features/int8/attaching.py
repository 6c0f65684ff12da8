"""Fake quantization on the layers of a gated model: put on in place, and taken off."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from l0prune.capture.compat import ConvolutionBase, pytree
from l0prune.errors import UsageError
from l0prune.features.int8.bits import without_bits
from l0prune.features.int8.layers import BATCH_NORMS
from l0prune.features.int8.ranges import Scheme
from l0prune.gating.bank import Gates
from l0prune.gating.gated_class import HOOKS, QUANTIZER, gated_class, gating_of, original_class
from l0prune.gating.link import Link
from l0prune.gating.multiplying import LINK
from l0prune.gating.rounding import Rounding


@dataclass(frozen=True)
class _Input:
    """Hook before a layer's forward."""

    quantizer: OnLayers
    point: int

    def __call__(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not isinstance(module, ConvolutionBase | nn.Linear) or not given:
            return None  # a removed branch
        first, *rest = given
        return (self.quantizer.at(self.point, first), *rest)


@dataclass(frozen=True)
class _Output:
    """Hook after the forward of a convolution, or of the BatchNorm behind it."""

    quantizer: OnLayers
    point: int

    def __call__(self, module: nn.Module, given: Any, output: Any) -> Any:
        if not isinstance(module, (ConvolutionBase, *BATCH_NORMS)):
            return None  # a removed branch
        return self.quantizer.at(self.point, output)


@dataclass(frozen=True)
class _Sum:
    """Hook after the forward of a module that returns a sum, maybe in a tuple."""

    quantizer: OnLayers
    point: int

    def __call__(self, module: nn.Module, given: Any, output: Any) -> Any:
        return pytree.tree_map_only(Tensor, partial(self.quantizer.at, self.point), output)


class OnLayers(Rounding):
    """Rounding of the layers of a scheme and of the values between them.

    Attributes:
        gates: of the model.
        scheme: what is rounded.
    """

    def __init__(self, gates: Gates, scheme: Scheme) -> None:
        self.gates, self.scheme = gates, scheme

    @abstractmethod
    def at(self, point: int, value: Tensor) -> Tensor:
        """Round a value at this point. Shape: any, and so the result."""

    def attach(self, model: nn.Module) -> None:
        """Put it on a gated model that is not cut, in the place of an earlier one.

        Raises:
            UsageError: the model lacks layers of the scheme.
        """
        self.detach(model)
        scheme = self.scheme
        try:
            modules = {layer.path: model.get_submodule(layer.path) for layer in scheme.layers}
            written = {model.get_submodule(path): point for path, point in scheme.outputs.items()}
            summing = {model.get_submodule(path): point for path, point in scheme.sums.items()}
        except AttributeError as error:
            raise UsageError(f"the ranges for int8 are of another model: {error}") from error
        for number, layer in enumerate(scheme.layers):
            module = modules[layer.path]
            link: Link = module.__dict__.setdefault(LINK, Link(self.gates, {}, {}))
            link.quantizer, link.layer = self, number
            names, lists, _ = gating_of(module)
            names = names if "weight" in names else (*names, "weight")
            module.__class__ = gated_class(original_class(module), names, lists, module is model)
            if layer.quantizes:
                module._forward_pre_hooks[QUANTIZER] = _Input(self, layer.reads)  # type: ignore[index]
        for module, point in written.items():
            module._forward_hooks[QUANTIZER] = _Output(self, point)  # type: ignore[index]
        for module, point in summing.items():
            module._forward_hooks[QUANTIZER] = _Sum(self, point)  # type: ignore[index]
        self.gates.quantizer = self

    def detach(self, model: nn.Module) -> None:
        """See ``Rounding``."""
        if self.gates.quantizer is None:
            return
        self.gates.quantizer = None
        for module in model.modules():
            for name in HOOKS:
                getattr(module, name).pop(QUANTIZER, None)
            link: Link | None = module.__dict__.get(LINK)
            if link is None or link.quantizer is None:
                continue
            link.quantizer = None
            _, lists, _ = gating_of(module)
            if not link.sites and not link.scales:
                del module.__dict__[LINK]
            names = (*link.sites, *(name for name in link.scales if name not in link.sites))
            module.__class__ = gated_class(original_class(module), names, lists, module is model)

    def remove(self, model: nn.Module) -> None:
        """See ``Rounding``; ranges expire when weights learn without it."""
        self.detach(model)
        gates = self.gates
        gates.clips = None
        if gates.plan.slots < gates.plan.size:
            gates.change_plan(without_bits(gates.plan), gates.log_alpha[: gates.plan.slots])
