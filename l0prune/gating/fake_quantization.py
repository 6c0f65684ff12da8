"""Attach fake quantization to the layers of a gated model in place, and detach it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from l0prune.capture.compat import ConvolutionBase, pytree
from l0prune.errors import UsageError
from l0prune.gating.bank import Gates
from l0prune.gating.fake_quantizer import FakeQuantizer
from l0prune.gating.gated_class import HOOKS, QUANTIZER, gated_class, gating_of, original_class
from l0prune.gating.link import Link
from l0prune.gating.multiplying import LINK
from l0prune.infer.quantized_layers import BATCH_NORMS


@dataclass(frozen=True)
class _Input:
    """Hook before a layer's forward."""

    quantizer: FakeQuantizer
    point: int

    def __call__(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not isinstance(module, ConvolutionBase | nn.Linear) or not given:
            return None  # a removed branch
        first, *rest = given
        return (self.quantizer.at(self.point, first), *rest)


@dataclass(frozen=True)
class _Output:
    """Hook after the forward of a convolution, or of the BatchNorm behind it."""

    quantizer: FakeQuantizer
    point: int

    def __call__(self, module: nn.Module, given: Any, output: Any) -> Any:
        if not isinstance(module, (ConvolutionBase, *BATCH_NORMS)):
            return None  # a removed branch
        return self.quantizer.at(self.point, output)


@dataclass(frozen=True)
class _Sum:
    """Hook after the forward of a module that returns a sum, maybe in a tuple."""

    quantizer: FakeQuantizer
    point: int

    def __call__(self, module: nn.Module, given: Any, output: Any) -> Any:
        return pytree.tree_map_only(Tensor, partial(self.quantizer.at, self.point), output)


def attach_quantizer(model: nn.Module, gates: Gates, quantizer: FakeQuantizer) -> None:
    """Attach a quantizer to the layers of a gated model that is not cut, in place.

    Raises:
        UsageError: the model lacks layers of the scheme.
    """
    detach_quantizer(model, gates)
    scheme = quantizer.scheme
    try:
        modules = {layer.path: model.get_submodule(layer.path) for layer in scheme.layers}
        written = {model.get_submodule(path): point for path, point in scheme.outputs.items()}
        summing = {model.get_submodule(path): point for path, point in scheme.sums.items()}
    except AttributeError as error:
        raise UsageError(f"the ranges for int8 are of another model: {error}") from error
    for number, layer in enumerate(scheme.layers):
        module = modules[layer.path]
        link: Link = module.__dict__.setdefault(LINK, Link(gates, {}, {}))
        link.quantizer, link.layer = quantizer, number
        names, lists, _ = gating_of(module)
        names = names if "weight" in names else (*names, "weight")
        module.__class__ = gated_class(original_class(module), names, lists, module is model)
        if layer.quantizes:
            module._forward_pre_hooks[QUANTIZER] = _Input(quantizer, layer.reads)  # type: ignore[index]
    for module, point in written.items():
        module._forward_hooks[QUANTIZER] = _Output(quantizer, point)  # type: ignore[index]
    for module, point in summing.items():
        module._forward_hooks[QUANTIZER] = _Sum(quantizer, point)  # type: ignore[index]
    gates.quantizer = quantizer


def detach_quantizer(model: nn.Module, gates: Gates) -> None:
    """Undo ``attach_quantizer``; ``model`` is the one that was gated."""
    if gates.quantizer is None:
        return
    gates.quantizer = None
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
