"""Casts of torch.autocast, written into a graph where rules can see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from l0prune.capture.compat import FakeTensor, OpOverload, TorchDispatchMode
from l0prune.capture.provenance import origin_of

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Autocast:
    """The autocast of a part of a forward: on which kind of device, to which dtype, if at all."""

    device: str
    dtype: torch.dtype | None
    enabled: bool

    def context(self) -> torch.autocast:
        """The context manager that it stands for."""
        return torch.autocast(self.device, self.dtype, self.enabled)


def write_casts(module: GraphModule, autocast: Autocast) -> bool:
    """Make nodes of all casts in the graph; False where what an operator does is not only casts.

    Each operator is run on fake tensors with autocast and without. What is cast of its operands
    with autocast alone is cast by a node before it; then it must give what was captured by itself.
    """
    return all(
        _write(module, node, autocast)
        for node in list(module.graph.nodes)
        if node.op == "call_function" and isinstance(node.target, OpOverload)
    )


@torch.no_grad()
def _write(module: GraphModule, node: Node, autocast: Autocast) -> bool:
    values: dict[Node, Any] = {n: n.meta.get("val") for n in node.all_input_nodes}
    fake = next((value for value in values.values() if isinstance(value, FakeTensor)), None)
    if fake is None:
        return True
    off = replace(autocast, enabled=False)
    with fake.fake_mode:
        casts, usual = _run(node, values, autocast)[1], dict[Node, torch.dtype]()
        result: Any = None
        with suppress(RuntimeError):  # without autocast it may not take operands of these dtypes
            result, usual = _run(node, values, off)
        to = {operand: dtype for operand, dtype in casts.items() if usual.get(operand) != dtype}
        cast = {n: value.to(to[n]) if n in to else value for n, value in values.items()}
        if to:
            result, _ = _run(node, cast, off)
        if _dtypes(result) != _dtypes(node.meta["val"]):
            return False
    for operand, dtype in to.items():
        with module.graph.inserting_before(node):
            new = module.graph.call_function(_ATEN.to.dtype, (operand, dtype))
        new.meta = origin_of(node) | {"val": cast[operand]}
        node.replace_input_with(operand, new)
    return True


def _run(
    node: Node, values: Mapping[Node, Any], autocast: Autocast
) -> tuple[Any, dict[Node, torch.dtype]]:
    """Return the operator's result, and the dtypes that its operands are cast to."""
    args, kwargs = pytree.tree_map_only(Node, values.__getitem__, (node.args, node.kwargs))
    operands = {id(value): operand for operand, value in values.items()}
    with _Casts() as casts, autocast.context():
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    return result, {operands[k]: dtype for k, dtype in casts.seen.items() if k in operands}


def _dtypes(result: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


class _Casts(TorchDispatchMode):
    """Sees, by the id of each tensor, to which dtype it is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, torch.dtype] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note it, and do it."""
        kwargs = kwargs or {}
        if func is _ATEN._to_copy.default and kwargs.get("dtype") is not None:
            self.seen[id(args[0])] = kwargs["dtype"]
        return func(*args, **kwargs)
