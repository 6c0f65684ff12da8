"""The axis of a vocabulary: rows of tables that input ids choose, and output logits.

Which rows are read depends on the data, so that no gate acts here and the axis is pinned in other
plans. But input ids can be renumbered, and logits are identified by their position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from l0prune.capture.capture import Captured
from l0prune.capture.compat import pytree
from l0prune.errors import UsageError
from l0prune.infer.build import Analysis, analysed
from l0prune.infer.decomposition import take_apart
from l0prune.infer.inference import Inference
from l0prune.infer.nodes import (
    CONCATENATIONS,
    IDENTITIES,
    PERMUTATIONS,
    PIECES,
    RESHAPES,
    called,
    operator_name,
    shape_of,
)
from l0prune.infer.registry import explained
from l0prune.infer.solver import Var, variables
from l0prune.plan.layout import Slots

KIND = "vocabulary"
# Operators that move ids to other positions, and change no id.
_MOVES = (
    *IDENTITIES,
    *PERMUTATIONS,
    *PIECES,
    *RESHAPES,
    *CONCATENATIONS,
    *(f"aten.{name}" for name in ("select", "squeeze", "unsqueeze", "expand", "flip", "roll")),
)


@dataclass(frozen=True)
class Vocabulary:
    """A captured model whose plan has one axis, that of its vocabulary.

    Attributes:
        analysis: the analysis of the model, whose plan has the axis.
        inputs: names of the placeholders that are ids.
        outputs: for each tensor of the output the dim that is the vocabulary, if one is.
    """

    analysis: Analysis
    inputs: tuple[str, ...]
    outputs: tuple[int | None, ...]


@explained
def vocabulary_of(captured: Captured, least: int) -> Vocabulary:
    """Find the tables of which the model's ids choose rows, and the outputs over these rows.

    An output is of the vocabulary where the rows of a weight write it and nothing in the model
    reads it, as logits are.

    Args:
        captured: the model.
        least: the least rows of a table, as ids choose from those of types or positions, too.

    Raises:
        UsageError: there is no such table, its rows are no separate axis, or tables differ in size.
    """
    take_apart(captured.program)
    infer = Inference(captured)
    infer.run()
    tables: list[Var] = []
    ids: list[str] = []
    for node in captured.graph.nodes:
        if operator_name(node.target) not in ("aten.embedding", "aten.embedding_bag"):
            continue
        weight, index = node.args[:2]
        given = list(_given(infer, index))
        rows = infer.dims(weight)[0]
        if given and infer.is_parameter(weight) and rows.size >= least:
            if not isinstance(rows, Var):
                where = called(node)
                raise UsageError(f"the rows of the table at {where} are no axis of their own")
            tables.append(rows)
            ids += given
    if not tables:
        raise UsageError(
            f"no input of the model chooses rows of a table of {least:,} rows or more: either the "
            "model does not take ids of tokens (or works on them before it looks them up), or the "
            "tokenizer is another model's"
        )
    rows = tables[0]
    for other in (*tables[1:], *_heads(infer, rows.size)):
        if other.size != rows.size:
            raise UsageError(
                f"the model has tables of {rows.size:,} and of {other.size:,} rows, which cannot "
                "be one vocabulary"
            )
        infer.solver.unify(rows, other)
    (axis,) = variables(infer.solver.resolve(rows))
    infer.kinds.insert(0, (axis, KIND))
    infer.names.insert(0, (axis, KIND))
    analysis = analysed(infer, only=axis)
    outputs = tuple(_dim_of(analysis, node) for node in _outputs(captured))
    return Vocabulary(analysis, tuple(dict.fromkeys(ids)), outputs)


def _given(infer: Inference, index: object) -> Iterator[str]:
    """Yield the inputs that an index only moves; none where an operator changes their values."""
    if not isinstance(index, Node):
        return
    if index.op == "placeholder":
        yield from (index.name,) if index.name in infer.captured.inputs else ()
    elif operator_name(index.target) in _MOVES:
        for operand in index.all_input_nodes:
            yield from _given(infer, operand)


def _outputs(captured: Captured) -> list[Node]:
    """The tensors that the model returns, in their order."""
    found = pytree.tree_leaves(captured.graph.output_node().args[0])
    return [node for node in found if isinstance(node, Node) and shape_of(node) is not None]


def _heads(infer: Inference, size: int) -> Iterator[Var]:
    """Yield the last dims of outputs of this size that weights write and the model never reads."""
    resolve = infer.solver.resolve
    read = {var for each in infer.reads for var in variables(resolve(each.expr))}
    written = {var for each in infer.writes for var in variables(resolve(each.expr))}
    for node in _outputs(infer.captured):
        for dim in infer.dims(node)[-1:] if isinstance(infer.values[node], tuple) else ():
            if isinstance(dim, Var) and dim.size == size and dim in written - read:
                yield dim


def _dim_of(analysis: Analysis, node: Node) -> int | None:
    """The dim of a value that is the vocabulary."""
    dims = analysis.layouts.get(node.name, ())
    return next((number for number, dim in enumerate(dims) if isinstance(dim, Slots)), None)
