"""Deep copies of models, without the wrappers that other packages put around them.

``copy.deepcopy`` takes a function as it is. So the copy of a model with ``self.act = lambda x:
self.scale * x``, or with a hook that fills ``self.features``, would read and write the original.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from l0prune.capture.compat import quiet_copies
from l0prune.errors import UsageError

# Attributes that accelerate's prepare sets: a forward under autocast, and the one before it.
_WRAPPED, _OWN = "forward", "_original_forward"


@contextmanager
def class_forwards(model: nn.Module) -> Iterator[None]:
    """Remove wrapped forwards within the context, so that every module runs its class's."""
    found = [(module, taken) for module in model.modules() if (taken := _taken_off(module))]
    try:
        yield
    finally:
        for module, taken in found:
            vars(module).update(taken)


def take_off(model: nn.Module) -> None:
    """Remove wrapped forwards from every module of a copy, for good."""
    for module in model.modules():
        _taken_off(module)


def _taken_off(module: nn.Module) -> dict[str, Any]:
    held = vars(module)
    return {name: held.pop(name) for name in (_WRAPPED, _OWN)} if _OWN in held else {}


Model = TypeVar("Model", bound=nn.Module)


def copied(model: Model, replaced: Mapping[int, Any] | None = None) -> Model:
    """Return a deep copy whose functions refer to the copy, with the forward of its class.

    Args:
        model: any module. Objects that its code reaches by a global are not copied.
        replaced: by id of an object of the model, its replacement in the copy.

    Raises:
        UsageError: it holds what cannot be copied, such as a lock or an open file.
    """
    memo: dict[int, Any] = dict(replaced or {})
    try:
        with _Detached(), quiet_copies():
            result: Model = copy.deepcopy(model, memo)
            renewal = _Renewal({id(module) for module in model.modules()}, memo)
            for module in result.modules():
                renewal.of(vars(module))
    except Exception as error:
        raise UsageError(
            f"the model cannot be copied, and its copies are what is worked on: {error}. Keep what "
            "is no part of the network (locks, files) out of it, or give it a __deepcopy__"
        ) from error
    take_off(result)
    return result


def copied_around(model: Model) -> Model:
    """Return a copy that shares the model's weights, which must not be written to.

    Buffers are copied, since a forward writes into them; and so are parameters of subclasses,
    which may hold more than a tensor.
    """
    shared = {id(p): _sharing(p) for p in model.parameters() if type(p) is nn.Parameter}
    return copied(model, shared)


def _sharing(parameter: nn.Parameter) -> nn.Parameter:
    result = nn.Parameter(parameter.detach(), parameter.requires_grad)
    vars(result).update(vars(parameter))
    return result


class _Detached(TorchFunctionMode):
    """Mode in which deepcopy also copies non-leaf tensors, without their autograd graph.

    Models keep such tensors of their last forward (a loss beside the output, the weight that
    torch's old ``weight_norm`` computes), and torch refuses to copy them.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not Tensor.__deepcopy__ or args[0].is_leaf:
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(id(tensor), tensor.detach().clone())


class _Renewal:
    """Rebuilder of the functions in a deep copy, so that they refer to the copied objects.

    Args:
        own: ids of the original's modules.
        memo: of the deep copy: by id, the copy of everything that was copied.
    """

    def __init__(self, own: set[int], memo: dict[int, Any]) -> None:
        self.own = own
        self.memo = memo
        self.made: dict[int, FunctionType] = {}
        self.cells: dict[int, CellType] = {}
        self.seen: set[int] = set()

    def of(self, value: Any) -> Any:
        """Return the value with its functions rebuilt; dicts and lists are changed in place."""
        if isinstance(value, FunctionType):
            return self._function(value) if self._speaks_of_model(value) else value
        if isinstance(value, MethodType):
            return MethodType(self.of(value.__func__), value.__self__)
        if type(value) is functools.partial:
            keywords = {name: self.of(each) for name, each in value.keywords.items()}
            return functools.partial(self.of(value.func), *map(self.of, value.args), **keywords)
        if type(value) is tuple:
            return tuple(map(self.of, value))
        if isinstance(value, dict | list) and id(value) not in self.seen:
            self.seen.add(id(value))
            for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
                new = self.of(each)
                if new is not each:
                    value[key] = new
        return value

    def _function(self, function: FunctionType) -> FunctionType:
        if id(function) in self.made:
            return self.made[id(function)]
        closure = function.__closure__ or ()
        cells = tuple(self.cells.setdefault(id(cell), CellType()) for cell in closure)
        again = FunctionType(
            function.__code__, function.__globals__, function.__name__, None, cells or None
        )
        self.made[id(function)] = again
        for cell, new in zip(closure, cells, strict=True):
            for content in _contents(cell):
                new.cell_contents = self._copied(content)
        again.__defaults__ = self._copied(function.__defaults__)
        again.__kwdefaults__ = self._copied(function.__kwdefaults__)
        again.__dict__.update(function.__dict__)
        return again

    def _copied(self, value: Any) -> Any:
        return self.of(copy.deepcopy(value, self.memo))

    def _speaks_of_model(self, function: FunctionType) -> bool:
        """Return whether the function holds a module of the model."""
        pending: list[Any] = [function]
        seen: set[int] = set()
        while pending:
            top = pending.pop()
            if id(top) in self.own:
                return True
            if id(top) not in seen and not isinstance(top, nn.Module | Tensor):
                seen.add(id(top))
                pending += _held(top)
        return False


def _held(value: Any) -> Iterable[Any]:
    """Return the values that a container or a function holds."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set):
        return value
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, FunctionType):
        closed = (content for cell in value.__closure__ or () for content in _contents(cell))
        return (*closed, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    return ()


def _contents(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing is in it yet
        return []


def inside(model: nn.Module) -> nn.Module:
    """Return the user's model without DataParallel, DDP and torch.compile around it."""
    while True:
        inner = _wrapped(model)
        if inner is None:
            return model
        model = inner


def _wrapped(model: nn.Module) -> nn.Module | None:
    is_spread = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner = getattr(model, "module" if is_spread else "_orig_mod", None)  # torch.compile's name
    return inner if isinstance(inner, nn.Module) else None


def holds_ddp(model: nn.Module) -> bool:
    """Return whether the model, or a module of it, is in DDP."""
    ddp = nn.parallel.DistributedDataParallel
    return any(isinstance(module, ddp) for module in model.modules())


def is_distributed(model: nn.Module) -> bool:
    """Return whether DDP wraps the model, and so has registered its parameters already."""
    outer: nn.Module | None = model
    while outer is not None:
        if isinstance(outer, nn.parallel.DistributedDataParallel):
            return True
        outer = _wrapped(outer)
    return False
