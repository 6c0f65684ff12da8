"""The plan of a finished inference: which variables become axes, and where their gates act."""

from __future__ import annotations

from cmath import isnan
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod as product

import torch
from torch.fx import Node

from l0prune.capture.capture import Captured
from l0prune.capture.raw_reads import BY_NAME, OF_STATE, raw_reads
from l0prune.infer.branches import Branches, branches, closing
from l0prune.infer.dataflow import Ending, activations, drop_unneeded, folded
from l0prune.infer.decomposition import take_apart
from l0prune.infer.inference import Inference, Mixed, Place, Read, Write
from l0prune.infer.nodes import operator_name, valued
from l0prune.infer.reasons import Namer, Whole, pins, whole_streams
from l0prune.infer.registry import explained
from l0prune.infer.solver import COPIES, Expr, Reason, Var, picks, variables
from l0prune.infer.zero_flow import Zeros, when_zero, zeroing
from l0prune.plan import layout as data
from l0prune.plan.branch import Branch, Needs
from l0prune.plan.code import Code
from l0prune.plan.layout import Cat, Const, Pick, Prod
from l0prune.plan.plan import Axis, Cost, Plan, Site


@dataclass(frozen=True)
class Analysis:
    """A captured graph with its plan and a layout for each dim of each node.

    ``layouts`` maps node names to one layout per dim (a tuple of such tuples for an operator
    with many outputs); ``picks`` has the positions that calls with a constant index pick;
    ``closed`` for sums and variances the nodes that are zero at closed slots and from which the
    reduced values there follow (none where these are zero themselves); ``mixed`` the contractions
    of kernels with shares that stay whole; ``branches`` those of the graph; ``whole`` the streams
    of which nothing can be cut.
    """

    captured: Captured
    plan: Plan
    layouts: dict[str, tuple]
    picks: dict[str, tuple[int, ...]]
    closed: dict[str, frozenset[str]]
    mixed: dict[str, Mixed] = field(default_factory=dict)
    branches: Branches = field(default_factory=Branches)
    whole: tuple[Whole, ...] = ()


@explained
def analyse(captured: Captured) -> Analysis:
    """Infer the axes of a captured graph and build its plan.

    Calls without a rule are decomposed in the captured program, where torch has a decomposition.

    Raises:
        CaptureError: a pass failed; the text names the operator at which it did.
    """
    drop_unneeded(captured.graph)
    by_name, unreached = (_read_raw(captured, key) for key in (BY_NAME, OF_STATE))
    infer = Inference(captured, by_name=tuple(by_name), unreached=unreached)
    take_apart(captured.program)
    infer.run()
    return analysed(infer)


def _read_raw(captured: Captured, key: str) -> dict[str, Node]:
    """Return the stored tensors whose values are read in the way of a key, each with a reader."""
    return {
        captured.names[stored.name]: node
        for node in captured.graph.nodes
        for operand, stored in raw_reads(node, key).items()
        if operand in valued(node)
    }


def analysed(infer: Inference, only: Var | None = None) -> Analysis:
    """Build the plan and the layouts of a finished inference; see ``Builder.build``."""
    builder = Builder(infer)
    plan = builder.build(only)
    layouts = builder.node_layouts()
    whole = tuple(whole_streams(infer, builder.numbers, builder.fine, plan.pins))
    return Analysis(
        infer.captured,
        plan,
        layouts,
        infer.picks,
        infer.closed,
        infer.mixed,
        builder.branches,
        whole,
    )


@dataclass
class Builder:
    """Builder of a plan: steps from variables to axes, which fill fields for later steps."""

    infer: Inference
    reads: dict[Var, list[Read]] = field(default_factory=lambda: defaultdict(list))
    writes: dict[Var, list[Write]] = field(default_factory=lambda: defaultdict(list))
    # where each variable's gates act: reads of weights, and writes where a read has no weight
    acting: dict[Var, dict[Place, str]] = field(default_factory=dict)
    numbers: dict[Var, int] = field(default_factory=dict)
    fine: dict[Place, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    branches: Branches = field(default_factory=Branches)

    def build(self, only: Var | None = None) -> Plan:
        """Build the plan of the inferred graph.

        With ``only``, that variable is the single axis, even if it is pinned, and no gates act.
        """
        self._index_events()
        if only is None:
            self._pin_repeated()
            for var in list(self.writes):
                self._decide(var)
        else:
            self.acting[only] = {}
        for var in self.acting:
            self.numbers[var] = len(self.sizes)
            self.sizes.append(var.size)
        if only is None:
            self._add_fine_axes()
        axes = self._axes()
        self.branches = branches(self.infer, self.numbers, [axis.name for axis in axes])
        plan = Plan(
            axes=axes,
            pins=pins(self.infer, self.numbers, self.fine),
            tensors={name: self.tensor_layouts(name) for name in self.infer.tensors},
            sites=tuple(self._sites()),
            costs=tuple(self._costs()),
            aliases=self.infer.captured.aliases,
            roles=self._roles(),
            wider=tuple(self._wider()),
            activations=tuple(activations(self.infer, self.layout)),
            branches=tuple(self._branch(ending, axes) for ending in self.branches.endings),
            code=Code(by_name=self.infer.by_name),
        )
        plan = replace(plan, axes=tuple(self._kept_ones(plan)))
        kept = {axis.name for axis in plan.axes if axis.keeps_one}
        left = tuple(branch for branch in plan.branches if kept.isdisjoint(branch.axes))
        return replace(plan, branches=tuple(closing(replace(plan, branches=left))))

    def _kept_ones(self, plan: Plan) -> Iterator[Axis]:
        """Yield the axes, with ``keeps_one`` set where closing all their gates would give 0/0."""
        axes: dict[str, set[int]] = defaultdict(set)
        for site in plan.sites:
            axes[site.tensor] |= data.axes_of(site.layout)
        with torch.device("cpu"):  # also where the caller plans on the meta device
            closed = torch.zeros(plan.size, dtype=torch.bool)
            empty = {s.tensor for s in plan.sites if not plan.mask(s.layout, closed).any()}
        kept: set[int] = set()
        while empty:
            found = when_zero(self.infer, empty, self.infer.captured.graph.nodes)
            guilty = next((names for number, names in found.values() if isnan(number)), None)
            if guilty is None:
                break
            empty -= guilty
            kept |= {number for name in guilty for number in axes[name]}
        for number, axis in enumerate(plan.axes):
            yield replace(axis, keeps_one=number in kept)

    def _branch(self, ending: Ending, axes: Sequence[Axis]) -> Branch:
        own = self.branches.tensors(ending.name)
        sizes = [product(dim.size for dim in self.infer.tensors[name]) for name in own]
        modules = self.branches.modules(ending.name)
        parts = tuple(axes[self.numbers[var]].name for var in ending.axes)
        return Branch(ending.name, ending.tensors, sum(sizes), modules, parts)

    def _wider(self) -> Iterator[tuple[data.Layout, data.Layout]]:
        """Yield pairs of dims of which the first keeps more positions than the second.

        An axis keeps at least one slot. But a pick of some of its slots may keep none, and some
        operators do not accept a dim of size 0.
        """
        yield from ((self.layout(wide), self.layout(other)) for wide, other in self.infer.wider)
        resolved = map(self.infer.solver.resolve, self._everything())
        some = [each for expr in dict.fromkeys(resolved) for each in picks(expr)]
        for layout in dict.fromkeys(map(self.layout, filter(_leaves_out, some))):
            if data.axes_of(layout):
                yield layout, data.Const(0)

    def _everything(self) -> Iterator[Expr]:
        """The dims of all tensors and values."""
        for dims in self.infer.tensors.values():
            yield from dims
        for value in self.infer.values.values():
            for dims in value if isinstance(value, list) else [value or ()]:
                yield from dims

    # --- which variables may be cut ---------------------------------------------------------

    def _index_events(self) -> None:
        for read in self.infer.reads:
            for var in dict.fromkeys(self._variables(read.expr)):
                self.reads[var].append(read)
        for write in dict.fromkeys(self.infer.writes):
            for var in dict.fromkeys(self._variables(write.expr)):
                self.writes[var].append(write)
        computed = [c for c in self.infer.computed if c.is_written]
        for write in dict.fromkeys(chain.from_iterable(map(self.infer.writes_of, computed))):
            for var in dict.fromkeys(self._variables(write.expr)):
                if var in self.reads:  # others are a kernel's height, which shared a dim with rows
                    self.writes[var].append(write)

    def _variables(self, expr: Expr) -> list[Var]:
        return list(variables(self.infer.solver.resolve(expr)))

    def _pin_repeated(self) -> None:
        """Pin variables that are nested in themselves: their slots are not independent."""
        for expr in self._everything():
            for var in _nested(self.infer.solver.resolve(expr)):
                self._pin(var, "it is combined with itself", None)

    def _pin(self, var: Var, text: str, node: Node | None) -> None:
        var.pin = var.pin or Reason(text, node)

    def _decide(self, var: Var) -> None:
        """Choose where a variable's gates act so that closed slots have no effect, or pin it."""
        if var.pin:
            return
        if not self.reads[var]:
            self._pin(var, "nothing reads it", None)
            return
        unreached = self.infer.unreached
        places = readers = {read.place: "read" for read in self.reads[var] if read.place}
        weightless = [read for read in self.reads[var] if read.place is None]
        if weightless:
            # z² where both q and k are written under the gate: exact all the same
            places = dict.fromkeys((write.place for write in self.writes[var]), "write")
            written, zeros, missed = zeroing(self.infer, var, places, self.reads[var])
            if missed is not None and readers:
                # the weight that writes it may be divided by its norm, which gives 0/0
                other = zeroing(self.infer, var, readers, self.reads[var])
                if other[-1] is None:
                    places, (written, zeros, missed) = readers, other
            if missed is not None:
                self._pin_missed(var, zeros, missed)
                return
            if not self._agrees(zeros, weightless):
                self._pin(var, "it is summed up together with slots that end otherwise", None)
                return
            weighted = [read for read in self.reads[var] if read.place]
            places = {place: places.get(place, "write") for place in written}
            for read in weighted:
                if zeros.at(read.operands[0]) is not True and read.place:
                    places.setdefault(read.place, "read")
        acting = {place: role for place, role in places.items() if place}
        reader = next((unreached[name] for name, _ in acting if name in unreached), None)
        if reader is not None:
            self._pin(var, _UNREACHED, reader)
            return
        self.acting[var] = acting

    def _pin_missed(self, var: Var, zeros: Zeros, missed: Read) -> None:
        """Pin a variable that is not zero where ``missed`` reads it without a weight."""
        failed = next(filter(zeros.dims_of, self.infer.failed), None)
        if failed is not None:
            self._pin(var, self.infer.failed[failed], failed)
            return
        why = f"{missed.why}, and it is not zero there, or has no gradient"
        self._pin(var, why, missed.node)

    def _agrees(self, zeros: Zeros, reads: list[Read]) -> bool:
        """Check that the known zeros of the reads agree with those of other axes; record them."""
        known_zeros = {read.node.name: zeros.known_zeros(read) for read in reads}
        names = {
            node: frozenset(zero.name for zero in zeros_of)
            for node, zeros_of in known_zeros.items()
            if zeros_of is not None
        }
        if any(self.infer.closed.get(node, of) != of for node, of in names.items()):
            return False
        self.infer.closed |= names
        return True

    def _add_fine_axes(self) -> None:
        """One gate per column of a Linear that reads a flattened map or the model's input."""
        users = self._users()
        for read in self.infer.reads:
            place = read.place
            if place is None or operator_name(read.node.target) != "aten.linear":
                continue
            if users[place[0]] != {read.node} or place[0] in self.infer.unreached:
                continue  # other users of the weight read its columns, too, or no gate reaches it
            activation = self.infer.dims(read.operands[0])[-1]
            if activation.size > 1 and self._is_worth_a_fine_axis(activation):
                self.fine[place] = len(self.sizes)
                self.sizes.append(activation.size)

    def _users(self) -> dict[str, set[Node]]:
        """Return the direct users of each stored tensor, by its name."""
        users: dict[str, set[Node]] = defaultdict(set)
        for node in self.infer.captured.graph.find_nodes(op="placeholder"):
            users[self.infer.captured.names.get(node.name, "")].update(node.users)
        return users

    def _is_worth_a_fine_axis(self, activation: Expr) -> bool:
        if isinstance(activation, Const):
            return activation.is_input
        inner = list(variables(activation))
        return bool(inner) and all(v in self.numbers for v in inner) and _has_positions(activation)

    # --- the plan's parts ---------------------------------------------------------------------

    def layout(self, expr: Expr) -> data.Layout:
        """An expression as plain data; pinned variables become constants."""
        return data.substitute(self.infer.solver.resolve(expr), self._slots)

    def _slots(self, var: Var) -> data.Layout:
        number = self.numbers.get(var)
        return data.Const(var.size) if number is None else data.Slots(number, 0, var.size)

    def tensor_layouts(self, name: str) -> data.Layouts:
        """The layouts of a stored tensor, fine axes included."""
        dims = enumerate(self.infer.tensors[name])
        return tuple(self._with_fine(self.layout(expr), (name, dim)) for dim, expr in dims)

    def _with_fine(self, base: data.Layout, place: Place) -> data.Layout:
        if place not in self.fine:
            return base
        return data.Gated(base, data.Slots(self.fine[place], 0, base.size))

    def node_layouts(self) -> dict[str, tuple]:
        """For each node, the layouts of its dims."""
        return {
            node.name: (
                tuple(tuple(map(self.layout, dims)) for dims in value)
                if isinstance(value, list)
                else tuple(map(self.layout, value))
            )
            for node, value in self.infer.values.items()
            if value is not None
        }

    def _sites(self) -> list[Site]:
        """Return one site per stored dim, with all axes whose gates act there."""
        roles: dict[Place, str] = {}
        axes: dict[Place, set[int]] = defaultdict(set)
        for var, places in self.acting.items():
            for place, role in places.items():
                roles.setdefault(place, role)
                axes[place].add(self.numbers[var])
        for place in self.fine:
            roles.setdefault(place, "read")
        sites = []
        for (name, dim), role in roles.items():
            base = data.only(self.layout(self.infer.tensors[name][dim]), frozenset(axes[name, dim]))
            layout = self._with_fine(base, (name, dim))
            sites.append(Site(name, dim, layout, "write" if role == "write" else "read"))
        return sites

    def _costs(self) -> list[Cost]:
        """Parameters of each stored parameter, then the recorded work of each node.

        Parameters that the eval graph never reads (auxiliary heads) are in no export: not counted.
        """
        costs, captured = [], self.infer.captured
        counted = captured.parameters.difference(captured.unused)
        needs = self.branches.parameters
        for name in self.infer.tensors:
            if name in counted:
                owner, of = name.rpartition(".")[0], needs[name]
                costs.append(_cost(owner, "params", 1.0, self.tensor_layouts(name), name, of))
        for work in self.infer.works:
            dims = [self.layout(expr) for expr in work.dims]
            dims += [self.tensor_layouts(name)[dim] for name, dim in work.places]
            of = self.branches.needs[work.node]
            costs.append(_cost(work.owner, "macs", work.scale, tuple(dims), work.tensor, of))
        return costs

    def _roles(self) -> dict[str, tuple[str, ...]]:
        """Return the roles of the dims of each multiplied parameter with two or more dims."""
        events = [(w.place, "write") for w in self.infer.writes]
        events += [(r.place, "read") for r in self.infer.reads if r.place is not None]
        roles: dict[str, list[str]] = {}
        for (name, dim), role in events:
            rank = len(self.infer.tensors[name])
            if rank > 1:
                roles.setdefault(name, [""] * rank)[dim] = role
        return {name: tuple(of) for name, of in roles.items()}

    def _axes(self) -> tuple[Axis, ...]:
        namer = Namer(self.infer, self.writes)
        axes, start = [], 0
        named: list[tuple[str, str, int]] = []
        for var in self.numbers:
            name, kind = namer.name(var)
            named.append((name, kind, self._group_size(var, kind)))
        for name, _ in self.fine:
            columns = self.infer.tensors[name]
            named.append((namer.fine(name), "input", columns[0].size))
        for (name, kind, group), size in zip(named, self.sizes, strict=True):
            axes.append(Axis(name, kind, size, start, group))
            start += size
        return tuple(axes)

    def _group_size(self, var: Var, kind: str) -> int:
        """|g| of eq. 16: the filter that writes a map, else the columns that read a neuron."""
        places = (
            {w.place for w in self.writes[var]}
            if kind in ("channel", "group")
            else {r.place for r in self.reads[var] if r.place}
        )
        weights = [p for p in places if len(self.infer.tensors[p[0]]) > 1]
        numel = [product(d.size for d in self.infer.tensors[name]) for name, _ in weights]
        return max(sum(numel) // var.size, 1)


_UNREACHED = (
    "the forward gets its weight by state_dict(), where no gate reaches it; gates do reach what "
    "code gets as module.weight or by named_parameters()"
)


def _leaves_out(some: Pick) -> bool:
    return set(some.index) != set(range(some.base.size))


def _nested(expr: Expr) -> list[Var]:
    """Variables that occur in more than one factor of one product."""
    match expr:
        case Prod(factors):
            sets = [set(variables(f)) for f in factors]
            twice = [v for i, a in enumerate(sets) for b in sets[i + 1 :] for v in a & b]
            return twice + [v for f in factors for v in _nested(f)]
        case Cat(parts):
            return [v for part in parts for v in _nested(part)]
        case Pick(base, _):
            return _nested(base)
        case _:
            return []


def _has_positions(expr: Expr) -> bool:
    """Check whether slots repeat over positions, as in a flattened map."""
    match expr:
        case Prod(factors):
            positions = (isinstance(f, Const) and f.what != COPIES for f in factors)
            return any(positions) or any(map(_has_positions, factors))
        case Cat(parts):
            return any(map(_has_positions, parts))
        case Pick(base, _):
            return _has_positions(base)
        case _:
            return False


def _cost(
    owner: str, unit: str, scale: float, dims: data.Layouts, tensor: str, needs: Needs
) -> Cost:
    """A cost term with its constant dims folded into the scale."""
    scale, varying = folded(scale, dims)
    needed = tuple(sorted(tuple(sorted(each)) for each in needs))
    return Cost(owner, unit, scale, varying, tensor, needed)
