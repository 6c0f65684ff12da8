"""Reasons why dims of weights stay whole, and names of axes, in terms that a user understands."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch.fx import Node

from l0prune.capture.provenance import class_of, module_of, source_of
from l0prune.infer.inference import Inference, Place, Write
from l0prune.infer.nodes import operator_name, shape_of
from l0prune.infer.solver import Expr, Reason, Var, variables
from l0prune.plan.layout import Cat, Const, Pick, Prod
from l0prune.plan.plan import Pin


def pins(infer: Inference, axes: Collection[Var], fine: Collection[Place]) -> tuple[Pin, ...]:
    """Return a pin for each dim of a weight of which some part belongs to no axis.

    ``axes`` are the variables that became axes, ``fine`` the dims with a separate axis.
    """
    places = [(f"{p[0]} dim {p[1]}", *of) for p, of in _places(infer) if p not in fine]
    places += [(c.where, c.expr, c.node) for c in infer.computed]
    resolve = infer.solver.resolve
    found = [_pin(where, resolve(expr), node, axes) for where, expr, node in places]
    return tuple(dict.fromkeys(pin for pin in found if pin is not None))


_PRODUCTS = ("aten.mul", "aten.mul_")


@dataclass(frozen=True, slots=True)
class Whole:
    """A stream between layers of which no slot can be cut.

    Attributes:
        where: the dim of a weight on it that a pin names, else the first one.
        size: the number of its slots.
        tensors: names of the parameters with a dim on it.
        reason: why it stays whole.
    """

    where: str
    size: int
    tensors: tuple[str, ...]
    reason: str


def whole_streams(
    infer: Inference, axes: Collection[Var], fine: Collection[Place], pins: Sequence[Pin]
) -> Iterator[Whole]:
    """Find the dims that weights write and others read without an axis; ``pins`` say why."""
    resolve = infer.solver.resolve
    made = [write.expr for write in infer.writes]
    made += [each.expr for each in infer.computed if each.is_written]
    written = {var for expr in made for var in variables(resolve(expr))}
    read = {v for each in infer.reads if not each.stays for v in variables(resolve(each.expr))}
    streams: list[tuple[set[Var], list[Place]]] = []
    for name, dims in infer.tensors.items():
        for dim, expr in enumerate(dims if name in infer.captured.parameters else ()):
            mine = set(variables(resolve(expr)))
            if mine.isdisjoint(written & read) or mine & set(axes) or (name, dim) in fine:
                continue
            near = [stream for stream in streams if stream[0] & mine]
            places = [place for _, of in near for place in of]
            streams = [stream for stream in streams if stream not in near]
            streams.append((mine.union(*(vars for vars, _ in near)), [*places, (name, dim)]))
    reasons = {pin.where: pin.reason for pin in reversed(pins)}
    for _, places in streams:
        texts = [f"{name} dim {dim}" for name, dim in places]
        where = next((text for text in texts if text in reasons), texts[0])
        name, dim = places[texts.index(where)]
        tensors = tuple(dict.fromkeys(name for name, _ in places))
        yield Whole(where, infer.tensors[name][dim].size, tensors, reasons.get(where, ""))


def _places(infer: Inference) -> Iterator[tuple[Place, tuple[Expr, Node | None]]]:
    """Yield the dims of parameters with two or more dims: first those that are read or written."""
    events = [(w.place, w.expr, w.node) for w in infer.writes]
    events += [(r.place, r.expr, r.node) for r in infer.reads if r.place is not None]
    seen: set[Place] = set()
    for place, expr, node in events:
        if place not in seen and len(infer.tensors[place[0]]) > 1:
            seen.add(place)
            yield place, (expr, node)
    for name, dims in infer.tensors.items():
        if name not in infer.captured.parameters or len(dims) < 2:
            continue
        for number, dim in enumerate(dims):
            # kernel heights and the like, which no rule ties or pins
            is_silent = any(v.pin is None for v in variables(infer.solver.resolve(dim)))
            if (name, number) not in seen and dim.size > 1 and not is_silent:
                yield (name, number), (dim, None)


def _pin(where: str, expr: Expr, node: Node | None, axes: Collection[Var]) -> Pin | None:
    """The pin of a dim, unless axes reach all of it."""
    reason = _reason(expr, axes)
    if reason is None:
        return None
    author = reason.node or node
    if author is None:
        return Pin(where, reason.text.replace("{who}", "a normalisation"))
    operator = operator_name(author.target) if author.op == "call_function" else ""
    text = _words(reason.text, where, author, operator)
    return Pin(where, text, operator, source_of(author))


def _words(text: str, where: str, author: Node, operator: str) -> str:
    """Complete a reason with its module: fill in ``{who}``, or append the path."""
    path = module_of(author)
    if "{who}" in text:
        place = f"{class_of(author)} at {path}" if path else f"{operator} in the model's forward"
        return text.replace("{who}", place)
    return text if not path or where.startswith(f"{path}.") else f"{text} ({path})"


def _reason(expr: Expr, axes: Collection[Var]) -> Reason | None:
    """Reason why a part of the expression became no axis; None if all of it did."""
    whole = list(_left_over(expr, axes))
    if not whole:
        return None
    pinned = next((v.pin for v in whole if isinstance(v, Var) and v.pin), None)
    first = whole[0]
    if pinned is None and isinstance(first, Const):
        return Reason(f"it is {first.what}", None)
    return pinned or Reason(
        "no weight writes it: it comes from a buffer or is made in forward", None
    )


def _left_over(expr: Expr, axes: Collection[Var]) -> Iterator[Const | Var]:
    """Yield the constants and variables of the positions that no axis can remove."""
    match expr:
        case Const():
            yield expr
        case Var():
            if expr not in axes:
                yield expr
        case Cat(parts):
            for part in parts:
                yield from _left_over(part, axes)
        case Pick(base, _):
            yield from _left_over(base, axes)
        case Prod(factors):
            each = [list(_left_over(factor, axes)) for factor in factors]
            if all(each):
                for left in each:
                    yield from left


_SUFFIX = {"head": "heads", "head_dim": "head_dim", "group": "groups"}


class Namer:
    """Unique names for axes: a second axis of the same name gets a number."""

    def __init__(self, infer: Inference, writes: dict[Var, list[Write]]) -> None:
        self.infer = infer
        self.writes = writes
        self.taken: dict[str, int] = {}
        self.kinds = _first(infer, infer.kinds)
        self.given = _first(infer, infer.names)

    def name(self, var: Var) -> tuple[str, str]:
        """Name and kind of an axis."""
        writes = self.writes[var]
        if not writes:  # a table whose rows nothing writes
            return self._unique(self.given[var]), self.kinds[var]
        rows = [w for w in writes if self.infer.has_rows(w.place[0])]
        gating = {w for w in rows if not self.infer.is_weight(w.node) and _only_multiplies(w.node)}
        write = next((w for w in rows if w not in gating), [*rows, *writes][0])
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


def _only_multiplies(node: Node) -> bool:
    """Return whether a value is only multiplied with larger ones, as in squeeze-and-excitation."""
    found, seen = False, [node]
    for top in seen:
        for user in top.users:
            larger = prod(shape_of(user) or ()) > prod(shape_of(top) or ())
            if larger and operator_name(user.target) not in _PRODUCTS:
                return False
            found |= larger
            seen += [] if larger or user in seen else [user]
    return found


def _first(infer: Inference, said: list[tuple[Expr, str]]) -> dict[Var, str]:
    """Return the first text given for each variable."""
    found: dict[Var, str] = {}
    for expr, text in said:
        for var in variables(infer.solver.resolve(expr)):
            found.setdefault(var, text)
    return found
