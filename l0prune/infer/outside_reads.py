"""What the code around the parts of a model reads off them: weights, and numbers such as sizes.

``x * self.backbone.fc.out_features`` sees another number once neurons of that layer are gone, and
``x @ self.backbone.fc.weight`` another matrix. What such code was seen to read has to stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from l0prune.capture.free_sizes import Inputs
from l0prune.capture.provenance import within
from l0prune.capture.recording import record
from l0prune.plan.layout import axes_of, size_of
from l0prune.plan.plan import Plan

# What may be asked of a tensor that no cut changes.
_HARMLESS = {
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "is_cuda", "requires_grad", "ndim", "layout", "grad")
} | {Tensor.dim, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.ndimension}


@dataclass
class Seen:
    """What was read from outside.

    Attributes:
        tensors: names of parameters and buffers.
        numbers: path of the module, name and value of each whole number.
    """

    tensors: set[str] = field(default_factory=set)
    numbers: set[tuple[str, str, int]] = field(default_factory=set)

    def whole(self, plan: Plan) -> dict[int, str]:
        """Axes of a plan that have to stay whole for that, each with the reason."""
        found: dict[int, str] = {}
        for name in sorted(self.tensors & plan.tensors.keys()):
            for dim in plan.tensors[name]:
                found |= dict.fromkeys(axes_of(dim), f"the code around the part reads {name}")
        for path, name, value in sorted(self.numbers):
            why = f"the code around the part reads {path}.{name}"
            for tensor, dims in plan.tensors.items():
                for dim in dims if tensor.startswith(f"{path}.") else ():
                    sizes = {i: plan.axes[i].size for i in axes_of(dim)}
                    is_all = size_of(dim) == value
                    found |= {i: why for i, size in sizes.items() if is_all or size == value}
        return found


def read_outside(model: nn.Module, paths: Iterable[str], example: Inputs) -> Seen:
    """Run the model, which may be changed by that; what its code reads outside the parts."""
    watch = _Watch()
    for path in paths:
        part = model.get_submodule(path)
        for inner, module in part.named_modules(remove_duplicate=False):
            watch.add(within(path, inner), module)
        part.register_forward_pre_hook(watch.enter)
        part.register_forward_hook(watch.leave, always_call=True)
    with watch:
        record(model, (), example)
    return watch.seen


class _Watch(TorchFunctionMode):
    """Notes what is read of the modules that were added, while none of the parts runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()
        self.depth = 1  # nothing counts before the model runs
        self.names: dict[int, str] = {}

    def __enter__(self) -> _Watch:
        self.depth = 0
        super().__enter__()
        return self

    def add(self, path: str, module: nn.Module) -> None:
        """Watch the tensors of this very module, and its whole numbers."""
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                self.names.setdefault(id(tensor), within(path, name))
        with suppress(TypeError):  # a class that allows no other: its tensors are watched
            module.__class__ = self._watched(path, type(module))

    def _watched(self, path: str, kind: type[nn.Module]) -> type[nn.Module]:
        """The class, in which reading a number is noted."""

        def read(module: nn.Module, name: str) -> Any:
            value = kind.__getattribute__(module, name)
            if type(value) is int and not self.depth and not name.startswith("_"):
                self.seen.numbers.add((path, name, value))
            return value

        members = {"__getattribute__": read, "__module__": kind.__module__}
        metaclass: Any = type(kind)
        watched: type[nn.Module] = metaclass(kind.__name__, (kind,), members)
        return watched

    def enter(self, *_: Any) -> None:
        """A part begins to run."""
        self.depth += 1

    def leave(self, *_: Any) -> None:
        """It has run."""
        self.depth -= 1

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Whatever torch is asked to do, or to say of a tensor."""
        if not self.depth and func not in _HARMLESS:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and id(leaf) in self.names:
                    self.seen.tensors.add(self.names[id(leaf)])
        return func(*args, **(kwargs or {}))
