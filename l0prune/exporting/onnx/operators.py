"""Decompositions of operators that torch's ONNX exporter lacks or writes inefficiently.

Attention: the exporter transposes the keys through three dims, whose sizes it reads at run time:
ten nodes and one more pass over the keys, and it takes four dims only. As products of matrices the
keys are transposed directly, and ONNX Runtime fuses that with the nodes before and after.

Recurrent layers: the operators LSTM, GRU and RNN of ONNX, one for each layer. ONNX has no
projections: an LSTM with them is a loop (``Scan``) over its steps.

Convolutions with separate filters for every example have as many groups as there are examples,
and in ONNX the number of groups is a constant. As products of matrices (of unfolded patches, or
followed by a fold) they leave the number of examples free.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import SymInt, Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.nn import functional as F

from l0prune.capture.assertions import erase_if_asserted
from l0prune.capture.compat import quiet_copies
from l0prune.capture.symbolic_patches import GATES, KIND_OF, RECURRENT, Settings
from l0prune.exporting.onnx.truth_values import CHOICES, chooses
from l0prune.infer.nodes import argument, operator_name

if TYPE_CHECKING:
    import onnx_ir


_ATEN = torch.ops.aten


def written_as_products(program: ExportedProgram) -> ExportedProgram:
    """Return the program, or a copy that shares its tensors, with attention as matrix products.

    Attention that is causal, or has fewer heads of keys than of queries, is left to the exporter.
    """
    if not any(_can_be_written(node) for node in program.graph.nodes):
        return program
    copied = around_its_tensors(program)
    for node in list(copied.graph.nodes):
        if _can_be_written(node):
            _write(copied.graph, node)
    views_that_may_copy(copied)  # products have other strides than the result of attention
    copied.graph_module.recompile()
    return copied


def without_checks(program: ExportedProgram) -> ExportedProgram:
    """Return the program, or a copy without assertions about values, which ONNX lacks.

    The exporter drops the assertions themselves, and fails at the values that they check.
    """
    if not program.graph.find_nodes(op="call_function", target=_ATEN.item.default):
        return program
    copied = around_its_tensors(program)
    for node in copied.graph.find_nodes(op="call_function", target=_ATEN.item.default):
        erase_if_asserted(node)
    copied.graph.eliminate_dead_code()
    copied.graph_module.recompile()
    return copied


def around_its_tensors(program: ExportedProgram) -> ExportedProgram:
    """Return a copy of the program that shares its parameters, buffers and constants."""
    held = [*program.state_dict.values(), *program.constants.values()]
    with quiet_copies():
        return copy.deepcopy(program, {id(each): each for each in held})


def views_that_may_copy(program: ExportedProgram) -> None:
    """Turn each view into a reshape, in place: in ONNX there is no difference."""
    for node in program.graph.find_nodes(op="call_function", target=_ATEN.view.default):
        node.target = _ATEN.reshape.default


def _can_be_written(node: Node) -> bool:
    if node.target is not _ATEN.scaled_dot_product_attention.default:
        return False
    return not (argument(node, 5, "is_causal", False) or argument(node, 7, "enable_gqa", False))


def _write(graph: Graph, node: Node) -> None:
    """``softmax(scale·q·kᵀ + mask)·v`` over any number of leading dims."""
    q, k, v = node.args[:3]
    mask, scale = argument(node, 3, "attn_mask"), argument(node, 6, "scale")
    assert isinstance(q, Node)
    scale = 1 / math.sqrt(q.meta["val"].shape[-1]) if scale is None else scale

    def call(operator: Any, *args: Any) -> Node:
        return graph.call_function(operator, args)

    with graph.inserting_before(node):
        turned = call(_ATEN.transpose.int, k, -2, -1)
        scores = call(_ATEN.matmul.default, call(_ATEN.mul.Tensor, q, scale), turned)
        is_boolean = isinstance(mask, Node) and _value(mask).dtype == torch.bool
        if is_boolean:  # made once for all layers that are given this mask
            mask = call(_ATEN.where.Scalar, mask, 0.0, -math.inf)
        if isinstance(mask, Node):
            scores = call(_ATEN.add.Tensor, scores, mask)
        weights = call(_ATEN.softmax.int, scores, -1)
        if is_boolean:  # torch returns zeros where all keys are masked
            nothing = call(_ATEN.isnan.default, weights)
            weights = call(_ATEN.masked_fill.Scalar, weights, nothing, 0.0)
        result = call(_ATEN.matmul.default, weights, v)
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _value(node: Node) -> Tensor:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value


def in_plain_terms(program: ExportedProgram) -> ExportedProgram:
    """Return a copy with reshapes instead of views, and with contiguous results of attention.

    The exporter decomposes causal attention into operators whose result has other strides than
    that of the fused operator, and then fails at the ``view`` that comes after it.
    """
    copied = around_its_tensors(program)
    views_that_may_copy(copied)
    attention = _ATEN.scaled_dot_product_attention.default
    for node in copied.graph.find_nodes(op="call_function", target=attention):
        _contiguous(copied.graph, node)
    copied.graph_module.recompile()
    return copied


def _contiguous(graph: Graph, node: Node) -> None:
    """Put the result of attention into row-major order."""
    with graph.inserting_after(node):
        kwargs: Any = {"memory_format": torch.contiguous_format}
        plain = graph.call_function(_ATEN.clone.default, (node,), kwargs)
    plain.meta = dict(node.meta)
    node.replace_all_uses_with(plain, delete_user_cb=lambda user: user is not plain)


# The operator of ONNX, and the order of torch's gates in it: i, o, f, g for torch's i, f, g, o of
# an LSTM; z, r, n for r, z, n of a GRU.
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
    """Return the program, or a copy whose recurrent layers call ``l0prune::recurrent``.

    Initial states of zero are left out: they are the default in ONNX.
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
    """Fold the rearrangement of recurrent operators' weights into constants, in place."""
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
    *settings: Any,
) -> list[Tensor]:
    """Decompose a call of ``l0prune::recurrent`` into one operator of ONNX for each layer.

    ``states`` are empty where they are zero.
    """
    given = Settings(*settings)
    directions = given.directions
    each = len(weights) // (given.layers * directions)
    is_projected = each > (4 if given.has_biases else 2)
    x = x.transpose(0, 1) if given.batch_first else x
    ends = []
    for layer in range(given.layers):
        start = layer * directions
        ways = [weights[each * way : each * (way + 1)] for way in range(start, start + directions)]
        mine = [state[start : start + directions] for state in states]
        if is_projected:
            x, *last = _scanned(x, mine, ways)
        else:
            x, *last = _layer(kind, x, mine, ways)
        ends.append(last)
    x = x.transpose(0, 1) if given.batch_first else x
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
        attributes["linear_before_reset"] = 1  # as in torch
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
    """Return the results of ``_layer`` for an LSTM with projections, by a scan."""
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


def written_out(program: ExportedProgram, *, recurrent: bool = True) -> ExportedProgram:
    """Return the program, or a copy in which operators without translation are decomposed.

    Without ``recurrent``, recurrent layers stay torch's operators.
    """
    program = with_one_operator(program) if recurrent else program
    targets = {node.target for node in program.graph.nodes if _has_to_be(node)}
    table: dict[Any, Any] = {target: _INSTEAD[target] for target in targets}
    if any(map(chooses, program.graph.nodes)):
        table |= CHOICES
    if not table:
        return program
    with quiet_copies():
        changed: ExportedProgram = program.run_decompositions(table)
    return changed


def _has_to_be(node: Node) -> bool:
    if node.target in _CONVOLUTIONS:
        return isinstance(argument(node, 6, "groups", 1), Node)
    if node.target == _SCATTER:
        return bool(argument(node, 4, "reduce") == "mean")
    return node.target in _INSTEAD


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """Return the distances from every point to every other."""
    apart = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    if p == 0:
        return (apart != 0).to(apart.dtype).sum(-1)
    if p == 2:
        return apart.square().sum(-1).sqrt()
    if math.isinf(p):
        return apart.abs().amax(-1)
    return apart.abs().pow(p).sum(-1).pow(1 / p)


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int | SymInt = 1,
) -> Tensor:
    """Convolve by a product of unfolded patches and filters where groups are symbolic."""
    if not isinstance(groups, SymInt):
        result: Tensor = _ATEN.convolution(
            x, weight, bias, stride, padding, dilation, False, [0, 0], groups
        )
        return result
    kernel, wide = weight.shape[2:], weight.shape[1:].numel()
    stride, padding, dilation = (_two(each) for each in (stride, padding, dilation))
    size = tuple(
        (old + 2 * p - d * (k - 1) - 1) // s + 1
        for old, k, s, p, d in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    )
    patches = F.unfold(x, tuple(kernel), dilation, padding, stride)
    patches = patches.reshape(x.shape[0], groups, wide, size[0] * size[1])
    result = weight.reshape(groups, weight.shape[0] // groups, wide) @ patches
    return _biased(result.reshape(x.shape[0], weight.shape[0], *size), bias)


def _conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int | SymInt = 1,
    dilation: Sequence[int] = (1,),
) -> Tensor:
    """Convolve transposed, by a matrix product and a fold, where groups are symbolic."""
    if not isinstance(groups, SymInt):
        result: Tensor = _ATEN.convolution(
            x, weight, bias, stride, padding, dilation, True, output_padding, groups
        )
        return result
    kernel, wide = weight.shape[2:], weight.shape[1:].numel()
    stride, padding, dilation = (_two(each) for each in (stride, padding, dilation))
    size = tuple(
        (old - 1) * s - 2 * p + d * (k - 1) + 1 + more
        for old, k, s, p, d, more in zip(
            x.shape[2:], kernel, stride, padding, dilation, _two(output_padding), strict=True
        )
    )
    inner, area = weight.shape[0] // groups, x.shape[2:].numel()
    filters = weight.reshape(groups, inner, wide).transpose(1, 2)
    written = filters @ x.reshape(x.shape[0], groups, inner, area)
    written = written.reshape(x.shape[0], groups * wide, area)
    return _biased(F.fold(written, size, tuple(kernel), dilation, padding, stride), bias)


def _two(sizes: Sequence[int]) -> tuple[int, ...]:
    return (*sizes,) * (2 // len(sizes))


def _biased(result: Tensor, bias: Tensor | None) -> Tensor:
    return result if bias is None else result + bias.reshape(-1, 1, 1)


def _scatter_mean(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """Compute a scattered mean as sum over count; ONNX has the other reductions."""
    if reduce != "mean":
        return NotImplemented
    given = src[tuple(slice(size) for size in index.shape)]
    count = torch.zeros_like(x).scatter_add(dim, index, torch.ones_like(given))
    if not include_self:
        x = x.masked_fill(count > 0, 0)
    return x.scatter_add(dim, index, given) / (count + 1 if include_self else count.clamp(min=1))


_SCATTER = _ATEN.scatter_reduce.two
_CONVOLUTIONS = (_ATEN.conv2d.default, _ATEN.conv_transpose2d.input)
_INSTEAD: dict[Any, Callable[..., Any]] = {
    _ATEN.cdist.default: _cdist,
    _SCATTER: _scatter_mean,
    _ATEN.conv2d.default: _conv2d,
    _ATEN.conv_transpose2d.input: _conv_transpose2d,
    RECURRENT: by_layer,
}
