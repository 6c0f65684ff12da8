"""Recurrent layers as the operators LSTM, GRU and RNN of ONNX, one for each layer.

ONNX has no projections: an LSTM with them is a loop (``Scan``) over its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from l0prune.capture.recurrent import GATES, KIND_OF, RECURRENT
from l0prune.exporting.onnx.attention import around_its_tensors
from l0prune.infer.nodes import operator_name

if TYPE_CHECKING:
    import onnx_ir

# The operator of ONNX, and where it has the gates of torch: i, o, f, g for i, f, g, o of an LSTM;
# z, r, n for r, z, n of a GRU.
_OPERATORS = {
    "lstm": ("LSTM", (0, 3, 1, 2)),
    "gru": ("GRU", (1, 0, 2)),
    "rnn_tanh": ("RNN", (0,)),
    "rnn_relu": ("RNN", (0,)),
}
_RECURRENT = {name for name, _ in _OPERATORS.values()}
_ZEROS = ("aten.zeros", "aten.new_zeros", "aten.zeros_like")
_ARRANGING = ("Concat", "Slice", "Unsqueeze")


def with_one_operator(program: ExportedProgram) -> ExportedProgram:
    """Return the program, or a copy whose recurrent calls are of ``l0prune::recurrent``.

    States that are zero are left out, as ONNX takes them.
    """
    if not any(node.target in KIND_OF for node in program.graph.nodes):
        return program
    copied = around_its_tensors(program)
    for node in copied.graph.nodes:
        if node.target in KIND_OF:
            kind, (x, states, *rest) = KIND_OF[node.target], node.args
            given: Any = [states] if isinstance(states, Node) else states
            is_zero = all(operator_name(state.target) in _ZEROS for state in given)
            node.target, node.args = RECURRENT, (kind, x, [] if is_zero else given, *rest)
    copied.graph_module.recompile()
    return copied


def arrange_weights(model: onnx_ir.Model) -> None:
    """Let the weights of recurrent operators lie in the file as these take them, in place."""
    from onnxscript import optimizer

    found: set[onnx_ir.Node] = set()
    for node in model.graph:
        pending = list(node.inputs[1:4]) if node.op_type in _RECURRENT else []
        while pending:
            value = pending.pop()
            made_by = value.producer() if value is not None else None
            if made_by is not None and made_by.op_type in _ARRANGING:
                found.add(made_by)
                pending += made_by.inputs
    if found:
        optimizer.fold_constants(model, should_fold=found.__contains__)


def by_layer(
    kind: str,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[Tensor]:
    """Decompose a call of ``l0prune::recurrent`` into one operator of ONNX for each layer.

    ``states`` are empty where they are zero.
    """
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    is_projected = each > (4 if has_biases else 2)
    x = x.transpose(0, 1) if batch_first else x
    ends = []
    for layer in range(layers):
        start = layer * directions
        ways = [weights[each * way : each * (way + 1)] for way in range(start, start + directions)]
        mine = [state[start : start + directions] for state in states]
        if is_projected:
            x, *last = _scanned(x, mine, ways)
        else:
            x, *last = _layer(kind, x, mine, ways)
        ends.append(last)
    x = x.transpose(0, 1) if batch_first else x
    return [x, *map(torch.cat, zip(*ends, strict=True))]


def _layer(
    kind: str, x: Tensor, states: Sequence[Tensor], ways: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return the output (time, batch, directions × units) of one layer, and its last states."""
    name, _ = _OPERATORS[kind]
    inputs, hidden, *biases = (
        torch.stack([_arranged(weight, kind) for weight in alike])
        for alike in zip(*ways, strict=True)
    )
    units, directions = hidden.shape[-1], len(ways)
    attributes: dict[str, Any] = {
        "hidden_size": units,
        "direction": "bidirectional" if directions == 2 else "forward",
    }
    if name == "GRU":
        attributes["linear_before_reset"] = 1  # as torch has it
    elif name == "RNN":
        attributes["activations"] = [kind.removeprefix("rnn_").capitalize()] * directions
    bias = torch.cat(biases, 1) if biases else None
    ends = [(directions, x.shape[1], units)] * (2 if kind == "lstm" else 1)
    given = (x, inputs, hidden, bias, *((None, *states) if states else ()))
    output, *last = torch.onnx.ops.symbolic_multi_out(
        name,
        given,
        attributes,
        dtypes=[x.dtype] * (1 + len(ends)),
        shapes=[(x.shape[0], directions, x.shape[1], units), *ends],
    )
    if directions == 1:
        return [output.squeeze(1), *last]
    return [torch.cat((output[:, 0], output[:, 1]), -1), *last]


def _arranged(weight: Tensor, kind: str) -> Tensor:
    """Return a weight or bias whose rows are in the order of ONNX's gates."""
    size = weight.shape[0] // GATES[kind]
    _, order = _OPERATORS[kind]
    return torch.cat([weight[size * gate : size * (gate + 1)] for gate in order])


def _scanned(x: Tensor, states: Sequence[Tensor], ways: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the same of one layer of an LSTM with projections."""
    outputs, ends = [], []
    for number, (inputs, hidden, *others) in enumerate(ways):
        *biases, projection = others
        if states:
            h, c = (state[number] for state in states)
        else:
            h, c = (x.new_zeros(x.shape[1], size) for size in projection.shape)
        gates = torch.nn.functional.linear(
            x, inputs, torch.stack(biases).sum(0) if biases else None
        )
        gates = gates.flip(0) if number else gates

        def step(
            h: Tensor, c: Tensor, gates: Tensor, hidden: Tensor, projection: Tensor
        ) -> list[Tensor]:
            i, f, g, o = (gates + h @ hidden.t()).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = (o.sigmoid() * c.tanh()) @ projection.t()
            return [h, c, h.clone()]

        h, c, output = torch.ops.higher_order.scan(step, [h, c], [gates], (hidden, projection))
        outputs.append(output.flip(0) if number else output)
        ends.append((h, c))
    return [torch.cat(outputs, -1), *map(torch.stack, zip(*ends, strict=True))]
