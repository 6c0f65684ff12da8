"""Kernels that the input mixes: their contraction with shares is the weight of a layer.

Dynamic convolutions (Yang et al. 2019, Chen et al. 2020) have several kernels, and attention gives
the share of each. Shares that a softmax has normalised depend on one another, so that all of
them stay. The kernels are an axis all the same: closed ones are not read, and where the two meet
the export picks the shares of the kept ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from l0prune.capture.provenance import within
from l0prune.infer.nodes import IDENTITIES, PERMUTATIONS, PIECES, RESHAPES, operator_name, shape_of
from l0prune.infer.solver import variables

if TYPE_CHECKING:
    from l0prune.infer.inference import Inference, Place

_PASSING = {*IDENTITIES, *PERMUTATIONS, *PIECES, *RESHAPES, "aten.select", "aten.unbind",
            "aten.squeeze", "aten.unsqueeze"}  # fmt: skip
_LAYERS = {"aten.linear", "aten.convolution", *(f"aten.conv{n}d" for n in (1, 2, 3)),
           *(f"aten.conv_transpose{n}d" for n in (1, 2, 3))}  # fmt: skip


def shares_in(
    infer: Inference, node: Node, one: tuple[Node, int], other: tuple[Node, int]
) -> Node | None:
    """Return the operand whose dim is not to be tied to that of stored kernels; None to tie them.

    Args:
        infer: what is known so far.
        node: the contraction.
        one: an operand, and its dim that is contracted.
        other: the same of the other one.
    """
    for (shares, dim), (kernels, kernels_dim) in ((one, other), (other, one)):
        place = _place(infer, kernels, kernels_dim)
        if place is None or infer.is_weight(shares) or not _makes_a_weight(node):
            continue
        infer.kernels[kernels, kernels_dim] = place
        expr = infer.dims(kernels)[kernels_dim]
        infer.kind(expr, "kernel")
        infer.name(expr, within(place[0].rpartition(".")[0], "kernels"))
        if all(var.pin is None for var in variables(infer.dims(shares)[dim])):
            return None
        for earlier in infer.mixed.values():  # of a weight and its bias
            if (earlier.shares, earlier.shares_dim) == (shares.name, dim):
                before = next(n for n in infer.values if n.name == earlier.kernels)
                infer.solver.unify(infer.dims(before)[earlier.kernels_dim], expr)
        infer.write(expr, node, kernels, kernels_dim, inner=True)
        infer.note_mixed(node, shares, dim, kernels, kernels_dim)
        return shares
    return None


def _place(infer: Inference, node: Node, dim: int) -> Place | None:
    """Return the parameter and its dim that a dim is, with any regrouping of later dims."""
    while operator_name(node.target) in RESHAPES:
        source = node.args[0]
        before, after = (shape_of(each) or [] for each in (source, node))  # type: ignore[arg-type]
        if not isinstance(source, Node) or before[: dim + 1] != after[: dim + 1]:
            return None
        node = source
    return infer.place(node, dim)


def _makes_a_weight(node: Node) -> bool:
    """Return whether a layer uses the result as its weight or bias."""
    seen = [node]
    for top in seen:
        for user in top.users:
            name = operator_name(user.target)
            if name in _LAYERS and any(top is each for each in user.args[1:3]):
                return True
            if name in _PASSING and user not in seen:
                seen.append(user)
    return False
