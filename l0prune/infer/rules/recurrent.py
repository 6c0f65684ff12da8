"""Recurrent layers and cells: every hidden unit is a slot, read by its own layer and the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from l0prune.infer.nodes import argument, operator_name, shape_of
from l0prune.infer.registry import Value, each, rule
from l0prune.infer.solver import Expr, cat, prod
from l0prune.plan.layout import Const

if TYPE_CHECKING:
    from l0prune.infer.inference import Inference


@dataclass(frozen=True)
class _Weights:
    """Weights of one direction of one layer; their rows are gates × hidden units.

    Attributes:
        inputs: of its inputs, shape (gates × units, inputs).
        hidden: of its previous output, shape (gates × units, outputs).
        biases: of shape (gates × units), two or none.
        projection: from units to outputs, where they differ: shape (outputs, units).
    """

    inputs: Node
    hidden: Node
    biases: tuple[Node, ...] = ()
    projection: Node | None = None

    @property
    def rows(self) -> tuple[Node, ...]:
        """Weights and biases with one row for each gate of each unit."""
        return (self.inputs, self.hidden, *self.biases)


@dataclass(frozen=True)
class _Units:
    """The hidden units of a layer, and its outputs: the same, or projections of them."""

    cell: Expr
    output: Expr

    @staticmethod
    def of(infer: Inference, weights: _Weights) -> _Units:
        """Return new units, as many as the weights have, named after the module."""
        place = infer.place(weights.inputs, 0)
        owner = place[0].rpartition(".")[0] if place else ""
        output = cell = infer.solver.fresh(_size(weights.hidden, 1))
        if weights.projection is not None:
            cell = infer.solver.fresh(_size(weights.projection, 1))
            infer.wider.append((cell, output))  # torch detects a projection by the sizes
        if owner:
            infer.name(cell, owner)
            infer.name(output, f"{owner}.projection")
        return _Units(cell, output)


def _size(node: Node, dim: int) -> int:
    return (shape_of(node) or [])[dim]


def _in_weights(node: Node) -> list[Node]:
    """The weights among the operands of a recurrent call."""
    if operator_name(node.target).endswith("_cell"):
        return [given for given in node.args[2:] if isinstance(given, Node)]
    given: Any = node.args[2]
    return [weight for weight in given if isinstance(weight, Node)]


def _at_rest(node: Node, operands: Sequence[bool | None]) -> bool:
    """A unit with initial state zero stays zero if its rows of all weights and biases are zero.

    An LSTM adds ``i · tanh(0)`` to ``f · 0``, and a GRU takes a mean of ``tanh(0)`` and 0.
    """
    pairs = zip(node.all_input_nodes, operands, strict=True)
    weights = set(_in_weights(node))
    is_written = any(is_zero is True for operand, is_zero in pairs if operand in weights)
    return is_written and each(node, operands)


@rule("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu", zero=_at_rest)
def recurrent(infer: Inference, node: Node) -> Value:
    """Stacked layers, in one direction or two: all of them keep the same hidden units.

    torch has one size for all layers and directions of a call, whose final states are in one
    tensor. So a slot is unit ``j`` of each of them: it dies where no layer's ``weight_hh`` and no
    reader of an output reads it.
    """
    x, state = node.args[:2]
    assert isinstance(x, Node)
    directions = 2 if argument(node, 7, "bidirectional") else 1
    weights = _by_direction(node, int(argument(node, 4, "num_layers")) * directions)
    units = _Units.of(infer, weights[0])
    *before, inner = infer.dims(x)
    time, batch = (1, 0) if argument(node, 8, "batch_first") else (0, 1)
    infer.solver.pin(before[time], "a recurrent layer steps over it")
    for number, mine in enumerate(weights):
        source = x if number < directions else node
        _step(infer, node, source, inner if source is x else cat([units.output] * directions),
              mine, units, before)  # fmt: skip
    states = state if isinstance(state, list | tuple) else (state,)
    for given, size in zip(states, (units.output, units.cell), strict=False):
        assert isinstance(given, Node)
        layers, rows, slots = infer.dims(given)
        infer.solver.pin(layers, "it counts the layers of a recurrent layer")
        infer.solver.unify(before[batch], rows)
        infer.solver.unify(slots, size)
    final = Const(len(weights), "layers and directions")
    ends = [(final, before[batch], size) for size in (units.output, units.cell)[: len(states)]]
    return [(*before, cat([units.output] * directions)), *ends]


def _by_direction(node: Node, count: int) -> list[_Weights]:
    """The weights of each direction of each layer, which torch takes in one list."""
    flat = _in_weights(node)
    each_has = len(flat) // count
    has_biases = bool(argument(node, 3, "has_biases"))
    found = []
    for start in range(0, len(flat), each_has):
        inputs, hidden, *others = flat[start : start + each_has]
        biases = tuple(others[:2]) if has_biases else ()
        projections = others[len(biases) :]
        found.append(_Weights(inputs, hidden, biases, projections[0] if projections else None))
    return found


def _step(
    infer: Inference,
    node: Node,
    x: Node,
    inner: Expr,
    weights: _Weights,
    units: _Units,
    before: Sequence[Expr],
) -> None:
    """Record the ties, reads, writes and work of one direction of one layer.

    ``x`` has the input; it is the call itself where that is the output of the layer below.
    """
    gates = _size(weights.hidden, 0) // units.cell.size
    rows = prod((Const(gates, "the gates of a recurrent layer"), units.cell))
    infer.solver.unify(inner, infer.dims(weights.inputs)[1])
    infer.solver.unify(units.output, infer.dims(weights.hidden)[1])
    infer.read(inner, node, (weights.inputs, 1), x)
    infer.read(units.output, node, (weights.hidden, 1), node)
    for weight in weights.rows:
        infer.solver.unify(infer.dims(weight)[0], rows)
        infer.write(units.cell, node, weight, 0)
    products = [weights.inputs, weights.hidden]
    if weights.projection is not None:
        infer.solver.unify(infer.dims(weights.projection)[0], units.output)
        infer.solver.unify(infer.dims(weights.projection)[1], units.cell)
        infer.read(units.cell, node, (weights.projection, 1), node)
        infer.write(units.output, node, weights.projection, 0)
        products.append(weights.projection)
    for weight in products:
        infer.work(node, (*before, *infer.dims(weight)), weight=weight)


_CELLS = ("aten.lstm_cell", "aten.gru_cell", "aten.rnn_tanh_cell", "aten.rnn_relu_cell")


@rule(*_CELLS, zero=_at_rest)
def cell(infer: Inference, node: Node) -> Value:
    """One step of one layer, from its state to the next one."""
    x, state = node.args[:2]
    assert isinstance(x, Node)
    inputs, hidden, *biases = _in_weights(node)
    weights = _Weights(inputs, hidden, tuple(biases))
    units = _Units.of(infer, weights)
    batch, inner = infer.dims(x)
    _step(infer, node, x, inner, weights, units, (batch,))
    for given in state if isinstance(state, list | tuple) else (state,):
        assert isinstance(given, Node)
        rows, slots = infer.dims(given)
        infer.solver.unify(batch, rows)
        infer.solver.unify(slots, units.cell)
    out = (batch, units.cell)
    return [out, out] if isinstance(state, list | tuple) else out
