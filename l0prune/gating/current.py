"""Values that a bank of gates has computed for now: never saved or copied, cheap to recompute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.compat import version_of

LINK = "_l0prune"  # the attribute by which a module finds the bank, and what of it is gated


def held(module: nn.Module, name: str) -> Tensor | None:
    """The parameter or buffer of this name that the module itself keeps; None without one."""
    table = module._parameters if name in module._parameters else module._buffers
    return table.get(name)


class Current:
    """The multipliers of all gates that a model uses now.

    Attributes:
        noise: what they were drawn with; None where the next are to be drawn afresh.
        z: the multipliers, flat.
        value: the parameter that they were computed from. While it is the same, unchanged, its
            noise still counts.
        version: of that parameter then.
        mode: what else they depend on.
        stood: a copy of the parameter as it was then, where the next forward may use them, too.
        grad: whether gradients were on.
        in_forward: the model is in its forward, so that they hold without a further look.
        own: by module and name, the parameters with which that forward began; None where unknown.
    """

    def __init__(self) -> None:
        self.noise: Tensor | None = None
        self.z: Tensor | None = None
        self.value: Tensor | None = None
        self.version: int | None = None
        self.mode: tuple[object, ...] = ()
        self.stood: Tensor | None = None
        self.grad = False
        self.in_forward = False
        self.own: dict[tuple[int, str], Tensor] | None = None
        self._gated: list[tuple[nn.Module, str]] | None = None

    def note(self, value: Tensor, mode: tuple[object, ...], *, is_fleeting: bool) -> None:
        """Remember what they were computed from; ``is_fleeting`` if the next are others anyway."""
        self.value, self.version, self.mode, self.stood = value, version_of(value), mode, None
        # On another device the next forward had to wait for a look at the values, and multipliers
        # with a gradient are part of one forward's graph.
        if not (
            is_fleeting or value.device.type != "cpu" or self.z is None or self.z.requires_grad
        ):
            copy = value.detach().clone()
            self.stood = copy if type(copy) is Tensor else None

    def stands(self, value: Tensor, mode: Callable[[], tuple[object, ...]]) -> bool:
        """Return whether the last forward's multipliers hold for this one, as in settled steps.

        The numbers decide: what writes into ``log_alpha.data`` leaves no other trace.
        """
        return (
            self.stood is not None
            and self.value is value
            and self.mode == mode()
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()  # type: ignore[attr-defined]
            and torch.equal(self.stood, value)
        )

    def note_own(self, model: nn.Module) -> None:
        """Remember what stands in the place of each gated tensor of the model."""
        if self._gated is None:
            self._gated = [
                (module, name)
                for module in model.modules()
                for name in getattr(module.__dict__.get(LINK), "sites", ())
            ]
        placed = ((module, name, held(module, name)) for module, name in self._gated)
        self.own = {(id(module), name): t for module, name, t in placed if t is not None}

    def is_own(self, module: nn.Module, name: str, parameter: Tensor) -> bool:
        """Did the forward begin with this parameter? One that was in shards has been put together.

        True where it is unknown.
        """
        before = (self.own or {}).get((id(module), name))
        return before is None or before is parameter or hasattr(before, "placements")

    def __reduce__(self) -> tuple[type[Current], tuple[()]]:
        return Current, ()


class GateValues:
    """The current multipliers along one layout, for the modules that use them.

    It has an attribute rather than a place in a list, so that torch.compile sees equal blocks
    of a model as equal.

    Attributes:
        values: the multipliers; None where nothing is computed.
        left: the positions that are left of a layout that was cut; None for all.
    """

    def __init__(self, left: Tensor | None = None) -> None:
        self.values: Tensor | None = None
        self.left = left

    def put(self, values: Tensor) -> None:
        """These are the multipliers of all positions, of which some may be cut."""
        left = self.left
        if left is not None and left.device != values.device:
            left = self.left = left.to(values.device)
        self.values = values if left is None else values.index_select(0, left)

    def __getstate__(self) -> Mapping[str, Any]:
        return {"values": None, "left": self.left}
