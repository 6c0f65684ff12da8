"""Link from a gated module to its gates, and the check whether they act on a tensor that is read.

``nn.LSTM`` and its like pass their weights to torch in one list, which they rebuild whenever a
weight is another tensor than before. With gates it is, in each forward, so the list reads as gated
and is stored plain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.gating.bank import Gates
from l0prune.gating.multiplying import LINK, GateValues, scale
from l0prune.gating.rounding import Rounding


class KeptList:
    """List of weights in a module, as the names of its entries, None for other than parameters.

    ``given`` is the list of gated tensors that the module itself has assigned; never copied or
    saved, since those belong to one forward.
    """

    def __init__(self, names: Sequence[str | None]) -> None:
        self.names = tuple(names)
        self.given: list[Any] | None = None

    def __getstate__(self) -> Mapping[str, Any]:
        return {"names": self.names, "given": None}

    def plain(self, module: nn.Module, values: Sequence[Any]) -> list[Any]:
        """Return the list to store: parameters instead of the gated tensors computed from them."""
        if len(values) != len(self.names):
            return list(values)
        pairs = zip(self.names, values, strict=True)
        return [value if name is None else module._parameters[name] for name, value in pairs]


def kept_lists(module: nn.Module, names: Collection[str]) -> dict[str, KeptList]:
    """Return, by attribute, the module's lists that hold one of its parameters ``names``."""
    known = {id(parameter): name for name, parameter in module._parameters.items()}
    found = {}
    for attribute, value in vars(module).items():
        if type(value) is list and any(isinstance(entry, Tensor) for entry in value):
            entries = [known.get(id(entry)) for entry in value]
            if any(name in names for name in entries):
                found[attribute] = KeptList(entries)
    return found


_WHOSE = (
    "a tensor stands in the place of {0}.{1} (torch.func.functional_call), and l0prune cannot know "
    "whether this layer's gates belong to it. Call the whole gated model so: they count; or the "
    "layer of a copy that carries no gates (l0prune.ungate), and they do not."
)


@dataclass(slots=True)
class Link:
    """Link from a gated module to its gates; no nn.Module, so that it is no submodule.

    Attributes:
        gates: the model's bank.
        sites: multipliers of each gated parameter or buffer of the module, each with its dim.
        lists: by attribute, the lists in which the module keeps such parameters.
        scales: by parameter of a module that was cut, the transformation applied when it is read.
        quantizer: of the module's weight; None where it is not quantized.
        layer: number of the module among those that the quantizer knows.
    """

    gates: Gates
    sites: dict[str, tuple[tuple[GateValues, int], ...]]
    lists: dict[str, KeptList]
    scales: dict[str, Scale] = field(default_factory=dict)
    quantizer: Rounding | None = None
    layer: int = 0

    def quantizes(self, name: str) -> bool:
        """Return whether a tensor of the module is quantized when it is read now."""
        return name == "weight" and self.quantizer is not None and self.quantizer.acts

    def product(self, name: str, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor of the module times its gates, in the stored dtype or in ``dtype``."""
        gates = self.gates
        if gates.products.is_on and name not in self.scales:
            made = gates.products.read(stored, self.sites.get(name, ()), dtype)
            if made is not None:
                return made
        gates.refresh()
        result = stored
        for multiplier, dim in self.sites.get(name, ()):
            assert multiplier.values is not None
            result = scale(result, multiplier.values, dim)
        return self.scales[name](result) if name in self.scales else result


@dataclass(frozen=True, slots=True)
class Scale:
    """Transformation of a parameter p when it is read: ``by · (p + offset) − offset``.

    ``by`` broadcasts against the parameter; the module itself adds ``offset`` to it.
    """

    by: Tensor
    offset: float = 0.0

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the transformed parameter, in the dtype of the parameter."""
        by = self.by.to(tensor)
        scaled = by * (tensor + self.offset) - self.offset if self.offset else by * tensor
        return scaled.to(tensor.dtype)


def acting_link(module: nn.Module, name: str, parameter: Tensor | None) -> Link | None:
    """Return the module's link if its gates multiply this tensor, which it reads as ``name``."""
    link: Link | None = module.__dict__.get(LINK)
    if parameter is None or link is None or link.gates.bypassed:
        return None
    in_forward = link.gates.in_forward
    if not in_forward and hasattr(parameter, "placements"):
        return None  # FSDP2 asks for the shard that it keeps between the forwards
    if not torch.compiler.is_compiling():
        if in_forward and not link.gates.is_own(module, name, parameter):
            return None
        is_own = in_forward or isinstance(parameter, nn.Parameter) or name in module._buffers
        if not is_own:
            raise UsageError(_WHOSE.format(type(module).__name__, name))
    return link
