"""The parameters that compute the queries of attention without an explicit scale.

``scaled_dot_product_attention`` divides by the root of the head's size, unless it is given a scale.
The class of a cut model would divide by the root of the smaller size. The queries compensate for
that, if the rows of the weights, biases and norms that compute them are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from l0prune.infer.build import Analysis
from l0prune.infer.nodes import (
    IDENTITIES,
    PERMUTATIONS,
    RESHAPES,
    SLICES,
    SPLITS,
    argument,
    hint,
    operator_name,
    shape_of,
)
from l0prune.plan.code import Factor
from l0prune.plan.layout import Layout, axes_of

_MOVED = (*RESHAPES, *PERMUTATIONS, *IDENTITIES, *SLICES, *SPLITS, "getitem")
_PIECES = (*SLICES, *SPLITS, "getitem", "aten.select", "aten.unbind")
_MOVED += tuple(
    f"aten.{name}"
    for name in (
        "select",
        "unbind",
        "unsqueeze",
        "squeeze",
        "expand",
        "repeat",
        "repeat_interleave",
    )
)
_SIGNED = ("aten.neg", "aten.mul", "aten.div")
_NORMS = {"aten.layer_norm": (2, 3), "aten.rms_norm": (2,)}
# Position of the matrix whose columns produce the result, and of the added operand.
_PRODUCTS = {"aten.matmul": (1,), "aten.mm": (1,), "aten.addmm": (2, 0)}

# By parameter and dim, the position along that dim that computes each entry of a tensor, −1 for
# none; with None for the dim, the index of the parameter's entry itself.
_Rows = dict[tuple[str, int | None], list[Tensor]]


class _Unknown(Exception):
    """Error: an operator is not followed."""


class _Missing(Exception):
    """Error: the rows of an operand are not known yet."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.name)
        self.node = node


def query_factors(analysis: Analysis) -> dict[Node, list[Factor] | None]:
    """Return the query factors of each attention whose scale follows the size of its heads.

    None where they are not known.
    """
    found: dict[Node, list[Factor] | None] = {}
    for node in analysis.captured.graph.nodes:
        if operator_name(node.target) != "aten.scaled_dot_product_attention":
            continue
        query = argument(node, 0, "query")
        head: Layout = analysis.layouts[query.name][-1]
        if not axes_of(head) or argument(node, 6, "scale") is not None:
            continue
        try:
            followed = _Followed(analysis)
            factors = list(_factors(followed.rows(query), head))
            found[node] = factors if followed.is_all_for(node) else None
        except _Unknown:
            found[node] = None
    return found


def _factors(rows: _Rows, head: Layout) -> Iterator[Factor]:
    for (name, dim), tensors in rows.items():
        if dim is not None:  # not a parameter that is a query itself
            yield Factor(name, dim, _ranges(_occurring(tensors)), head)


def _occurring(tensors: Sequence[Tensor]) -> list[int]:
    """The positions in these tensors, ascending; -1 is none."""
    # Many times faster than ``unique``, which sorts: each position repeats for all tokens.
    counts = torch.bincount(torch.cat([each.flatten() for each in tensors]) + 1)
    found: list[int] = counts[1:].nonzero().flatten().tolist()
    return found


def _ranges(positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending positions as ranges, each with its end exclusive."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return tuple(found)


class _Followed:
    """The nodes that lead to a query, each with the rows that compute it."""

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis
        self._known: dict[Node, Any] = {}

    def rows(self, node: Node) -> Any:
        """Return the rows that compute a node; a list for one with several outputs.

        Operands are visited first, iteratively: a network may be deeper than Python's stack.
        """
        waiting = [node]
        while waiting:
            try:
                self._known[waiting[-1]] = self._made(waiting[-1])
                waiting.pop()
            except _Missing as missing:
                waiting.append(missing.node)
        return self._known[node]

    def is_all_for(self, attention: Node) -> bool:
        """Check that the values and parameters of a query are read by it alone.

        Slices of them are excepted, which are the keys and values.
        """
        own = {node for node, rows in self._known.items() if rows}
        asked = [*attention.args, *attention.kwargs.values()]
        return sum(each in own for each in asked if isinstance(each, Node)) == 1 and all(
            user in own or user == attention or operator_name(user.target) in _PIECES
            for node in own
            for user in node.users
        )

    def _read(self, node: Node) -> Any:
        if node not in self._known:
            raise _Missing(node)
        return self._known[node]

    def _made(self, node: Node) -> Any:
        name, captured = operator_name(node.target), self._analysis.captured
        if node.op == "placeholder":
            stored = captured.names.get(node.name, "")
            if stored not in captured.parameters:
                return {}
            shape = shape_of(node) or []
            entries = torch.arange(prod(shape)).view(shape)
            return {(stored, 0 if len(shape) == 1 else None): [entries]}
        if name == "aten.linear":
            return self._of_operands(node, (1, 2))
        if name in _PRODUCTS:
            return self._of_columns(node, *_PRODUCTS[name])
        if name in _NORMS:
            return self._of_operands(node, _NORMS[name])
        if name in _MOVED:
            return self._moved(node)
        if name == "aten.cat":
            return self._joined(node)
        operands = list(node.args)
        if name == "aten.mul":  # a parameter scales the product, whatever the other factor is
            parameters = (arg for arg in operands if isinstance(arg, Node) and self._stores(arg))
            operands = next(([each] for each in parameters), operands)
        made = [self._read(arg) if isinstance(arg, Node) else {} for arg in operands]
        if name in ("aten.add", "aten.sub") and all(made):
            every: _Rows = {}
            for rows in made:
                for key, tensors in rows.items():
                    every.setdefault(key, []).extend(self._like(node, t) for t in tensors)
            return every
        if name == "aten.mul" and not all(made):
            made.sort(key=bool, reverse=True)
        if name in _SIGNED and made[0] and not any(made[1:]):
            return {key: [self._like(node, t) for t in ts] for key, ts in made[0].items()}
        if any(made):
            raise _Unknown
        return {}

    def _stores(self, node: Node) -> bool:
        """Check whether a node is a parameter."""
        return node.op == "placeholder" and bool(self._read(node))

    def _of_operands(self, node: Node, places: Sequence[int]) -> _Rows:
        """Return the rows of parameters whose dim 0 is the last dim of the result."""
        result: _Rows = {}
        for place in places:
            operand = node.args[place] if len(node.args) > place else None
            made = self._read(operand) if isinstance(operand, Node) else {}
            if isinstance(operand, Node) and not made:
                raise _Unknown
            for key, tensors in made.items():
                for each in tensors:
                    first = each if each.ndim == 1 else each.flatten(1)[:, 0]
                    key, positions = self._along(key, first)
                    result.setdefault(key, []).append(self._like(node, positions))
        return result

    def _of_columns(self, node: Node, matrix: int, added: int | None = None) -> _Rows:
        """Return the rows of a product with a weight on the right, as it is or transposed."""
        found = self._read(node.args[matrix])  # type: ignore[arg-type]
        if len(found) != 1 or any(each.ndim != 2 for each in next(iter(found.values()))):
            raise _Unknown
        ((key, (entries, *_)),) = found.items()
        key, positions = self._along(key, entries[0])
        result: _Rows = {key: [self._like(node, positions)]}
        return result if added is None else {**result, **self._of_operands(node, (added,))}

    def _moved(self, node: Node) -> Any:
        """Apply an operator that moves entries to their positions."""
        source, *args = node.args
        assert isinstance(source, Node)
        made = self._read(source)
        if isinstance(made, list):  # of a call with several outputs
            return made[args[0]]  # type: ignore[index]
        if operator_name(node.target) in IDENTITIES:
            return made
        call: Callable[..., Any] = node.target  # type: ignore[assignment]
        if any(isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes if n != source):
            raise _Unknown
        args, kwargs = map_arg((args, node.kwargs), lambda n: hint(n.meta["val"]))

        def moved(positions: Tensor) -> Any:
            try:
                return call(positions, *args, **kwargs)
            except RuntimeError:  # a view that the strides do not allow
                return call(positions.contiguous(), *args, **kwargs)

        results = {key: [moved(t) for t in ts] for key, ts in made.items()}
        if isinstance(node.meta["val"], Tensor):
            return results
        count = len(node.meta["val"])
        return [{key: [t[i] for t in ts] for key, ts in results.items()} for i in range(count)]

    def _joined(self, node: Node) -> _Rows:
        parts, dim = node.args[0], argument(node, 1, "dim", 0)
        assert isinstance(parts, list | tuple)
        made = [(part, self._read(part)) for part in parts if isinstance(part, Node)]
        result: _Rows = {}
        for key in dict.fromkeys(key for _, rows in made for key in rows):
            most = max(len(rows.get(key, ())) for _, rows in made)
            nowhere = [torch.full(shape_of(part) or [], -1) for part, _ in made]
            result[key] = [
                torch.cat(
                    [
                        rows[key][i] if i < len(rows.get(key, ())) else nowhere[number]
                        for number, (_, rows) in enumerate(made)
                    ],
                    dim,
                )
                for i in range(most)
            ]
        return result

    def _along(
        self, key: tuple[str, int | None], entries: Tensor
    ) -> tuple[tuple[str, int | None], Tensor]:
        """Return the dim of a matrix along which entries vary, and their positions on it."""
        name, dim = key
        if dim is not None:
            return key, entries
        shape = [each.size for each in self._analysis.plan.tensors[name]]
        places = torch.unravel_index(entries, shape)
        varying = [number for number, place in enumerate(places) if len(place.unique()) > 1]
        if len(varying) != 1:
            raise _Unknown
        return (name, varying[0]), places[varying[0]]

    @staticmethod
    def _like(node: Node, positions: Tensor) -> Tensor:
        return positions.expand(shape_of(node) or [])
