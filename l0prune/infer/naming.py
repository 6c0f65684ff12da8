"""Readable, unique names for axes, after the modules that write them."""

from __future__ import annotations

from l0prune.infer.expressions import Expr, Var, variables
from l0prune.infer.inference import Inference, Write
from l0prune.infer.nodes import operator_name

_SUFFIX = {"head": "heads", "head_dim": "head_dim", "group": "groups"}


class Namer:
    """Names each axis once; a second one of the same name gets a number."""

    def __init__(self, infer: Inference, writes: dict[Var, list[Write]]) -> None:
        self.infer = infer
        self.writes = writes
        self.taken: dict[str, int] = {}
        self.kinds = _first(infer, infer.kinds)
        self.given = _first(infer, infer.names)

    def name(self, var: Var) -> tuple[str, str]:
        """Name and kind of an axis."""
        writes = self.writes[var]
        write = next((w for w in writes if self.infer.has_rows(w.place[0])), writes[0])
        by_conv = "conv" in operator_name(write.node.target)
        kind = self.kinds.get(var, "channel" if by_conv else "neuron")
        owner, _, leaf = write.place[0].rpartition(".")
        base = owner if owner and leaf in ("weight", "bias") else write.place[0]
        base = self.given.get(var, base)
        if kind in _SUFFIX:
            base = f"{base}.{_SUFFIX[kind]}"
        return self._unique(base), kind

    def fine(self, weight: str) -> str:
        """Name of the input columns of the layer with this weight."""
        return self._unique(f"{weight.rpartition('.')[0] or weight}.in")

    def _unique(self, name: str) -> str:
        count = self.taken.get(name, 0)
        self.taken[name] = count + 1
        return f"{name}#{count + 1}" if count else name


def _first(infer: Inference, said: list[tuple[Expr, str]]) -> dict[Var, str]:
    """What was said first of each variable."""
    found: dict[Var, str] = {}
    for expr, text in said:
        for var in variables(infer.solver.resolve(expr)):
            found.setdefault(var, text)
    return found
