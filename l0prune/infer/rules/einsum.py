"""Sums of products by letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from l0prune.infer.expressions import Expr
from l0prune.infer.registry import Value, rule, some
from l0prune.infer.rules.contraction import name_heads

if TYPE_CHECKING:
    from l0prune.infer.inference import Inference


@rule("aten.einsum", zero=some)
def einsum(infer: Inference, node: Node) -> Value:
    """Letters tie dims; a letter absent from the output is contracted."""
    equation, operands = node.args[:2]
    assert isinstance(operands, list | tuple)
    nodes = [operand for operand in operands if isinstance(operand, Node)]
    inputs, output = spelled_out(str(equation), [len(infer.dims(operand)) for operand in nodes])
    letters: dict[str, Expr] = {}
    where: dict[str, list[tuple[Node, int]]] = {}
    for labels, operand in zip(inputs, nodes, strict=True):
        for position, (letter, dim) in enumerate(zip(labels, infer.dims(operand), strict=True)):
            known = letters.setdefault(letter, dim)
            if known.size == 1:  # stretched, as by an elementwise product
                letters[letter] = dim
            elif dim.size > 1:
                infer.solver.unify(known, dim)
            where.setdefault(letter, []).append((operand, position))
    for letter, dim in letters.items():
        whole = [(n, p) for n, p in where[letter] if infer.dims(n)[p].size == dim.size]
        stored = [(n, p) for n, p in whole if infer.place(n, p) is not None]
        if letter in output:
            for operand, position in stored:
                infer.write(dim, node, operand, position)
        else:
            infer.read(dim, node, stored[0] if stored else None, *nodes)
    if not any(infer.place(*found) for founds in where.values() for found in founds):
        carried = {letter for letter in output if len(where[letter]) > 1}
        batch = [dim for letter, dim in letters.items() if letter in carried]
        name_heads(infer, batch, [dim for letter, dim in letters.items() if letter not in carried])
    infer.work(node, tuple(letters.values()))
    return tuple(letters[letter] for letter in output)


def spelled_out(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """A letter for each dim of the operands and of the output.

    The dims that an ellipsis stands for are called 0, 1, … from the last, as they are broadcast.
    Without an arrow, the output has them, and then the letters that occur once, in their order.

    Args:
        equation: as ``torch.einsum`` takes it.
        ranks: numbers of dims of the operands.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    widths = [rank - len(t.replace("...", "")) for t, rank in zip(texts, ranks, strict=True)]
    inputs = [_letters(text, width) for text, width in zip(texts, widths, strict=True)]
    if arrow:
        return inputs, _letters(right, max(widths))
    once = sorted(letter for letter in set(left) - set(".,") if left.count(letter) == 1)
    return inputs, [*_letters("..." if "..." in left else "", max(widths)), *once]


def _letters(text: str, width: int) -> list[str]:
    """The letters of one operand, whose ellipsis stands for so many dims."""
    before, dots, after = text.partition("...")
    return [*before, *(str(n) for n in reversed(range(width if dots else 0))), *after]
