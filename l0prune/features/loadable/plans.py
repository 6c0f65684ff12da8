"""Plans whose cuts other programs can load, since a configuration describes the sizes.

A configuration has one number for a size of all layers. Which number a dim follows is found by
trial: the class is built without values, with one number doubled. An axis may be cut if all dims
that follow the same numbers consist of axes that can be cut alike, which keep equally many slots;
all others stay whole, with the reason.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.compat import pytree
from l0prune.capture.configurations import (
    Configured,
    Dim,
    Field,
    class_of_transformers,
    numbers_in,
    sizes_of,
)
from l0prune.capture.example_inputs import call
from l0prune.capture.model_checks import evaluating
from l0prune.capture.sizes import Inputs
from l0prune.doors import missing
from l0prune.errors import NothingToPrune, UsageError, meant, warn
from l0prune.features.loadable.programs import PROGRAMS, Rules
from l0prune.plan.branch import KIND
from l0prune.plan.cost import CostModel
from l0prune.plan.divisor import Divisor
from l0prune.plan.layout import Cat, Const, Layout, Prod, Slots, axes_of
from l0prune.plan.plan import Plan
from l0prune.plan.switches import dead_parameters

_MANY = 32  # slots, above which widths are tried in steps only
Group = tuple[int, int, str]  # its first axis, and size and kind of all


@dataclass
class Loadable:
    """Axes and branches that can be cut so that a configuration describes the result.

    Attributes:
        configured: the model's class, by its configuration.
        rules: what the program can say.
        whole: why axes stay whole, by number.
        fixed: why numbers of the configuration stay as they are.
    """

    plan: Plan
    model: nn.Module
    configured: Configured
    rules: Rules
    whole: dict[int, str] = field(default_factory=dict)
    fixed: dict[Field, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan, self.by_layer = self.plan, self.rules.by_layer
        self.slots = {n for n, axis in enumerate(plan.axes) if axis.kind != KIND}
        sizes = sizes_of(self.model)
        cut = {sizes[dim] for dim, layout in self._dims() if self._axes(layout)}
        fields = {
            name: value
            for name, value in numbers_in(self.configured.data)
            if any(size % value == 0 for size in cut)
        }
        follows = self.configured.following(fields)
        self.follows = {dim: frozenset(of) for dim, of in follows.items()}
        used = frozenset().union(*self.follows.values())
        self.fields = {name: value for name, value in fields.items() if name in used}
        self.fixed.update(self.rules.fixed)

    def _axes(self, layout: Layout) -> frozenset[int]:
        return axes_of(layout) & self.slots

    def _dims(self) -> Iterator[tuple[Dim, Layout]]:
        """Yield the dims of the model's state, those of tied tensors by each of their names."""
        for name in self.model.state_dict():
            layouts = self.plan.tensors.get(self.plan.aliases.get(name, name), ())
            for number, layout in enumerate(layouts):
                yield (name, number), layout

    def leave_whole(self, axes: frozenset[int], why: str) -> bool:
        """Record why axes stay whole; return whether that is new for any of them."""
        new = [axis for axis in axes if axis not in self.whole]
        self.whole.update(dict.fromkeys(new, why))
        return bool(new)

    def find(self, example: Inputs) -> None:
        """Find all axes that have to stay whole, and why."""
        state = self.model.state_dict()
        for name, layouts in self.plan.tensors.items():
            if name not in state and name not in self.plan.aliases.values():
                for layout in layouts:
                    self.leave_whole(self._axes(layout), f"its code makes {name} anew")
        self._find_numbers_in_code(example)
        self._find_unequal_norms()
        for dim, layout in self._dims():
            if dim not in self.follows:
                why = f"no number of its configuration says the size of {_shown(dim)}"
                self.leave_whole(self._axes(layout), why)
        while self._find_mismatch():
            pass

    def _find_numbers_in_code(self, example: Inputs) -> None:
        """Fix the numbers of the configuration that the code also computes with."""
        fixed, outputs = _floats(self.configured.built({})), _outputs(self.model, example)
        for name, value in self.fields.items():
            other, text = _floats(self.configured.built({name: 2 * value})), ".".join(name)
            differing = [each for each in fixed if other.get(each, fixed[each]) != fixed[each]]
            why = f"{differing[0]} follows {text}" if differing else ""
            with _other_number(self.model, name, 2 * value):
                if not _are_same(outputs, _outputs(self.model, example)):
                    why = f"its forward computes with {text}"
            if why:
                self.fixed[name] = why

    def _find_unequal_norms(self) -> None:
        """Leave axes of unequal norms whole: over k of n slots each norm needs a separate ε."""
        over: set[frozenset[int]] = set()
        for path, module in self.model.named_modules():
            if any("eps" in name and type(value) is float for name, value in vars(module).items()):
                dims = self.plan.code.averages.get(path, ())
                over.add(self._axes(dims[-1]) if dims else frozenset())
        if len(over) > 1:
            why = "norms over other dims share its ε, and a configuration has one for all"
            self.leave_whole(frozenset().union(*over), why)

    def _find_mismatch(self) -> bool:
        """Leave an axis whole whose numbers also determine other dims; False if there is none."""
        groups, by_fields = self.groups(), self._by_fields()
        for (fields, _), dims in by_fields.items():
            made_of = {dim: self._made_of(layout, groups) for dim, layout in dims.items()}
            first, *others = dims
            odd = next((dim for dim in others if made_of[dim] != made_of[first]), None)
            if odd is not None or made_of[first] is None:
                why = f"{_names(fields)} says {_shown(odd or first)}, too, which is cut otherwise"
                if self._leave_inner_whole(dims.values(), groups, why):
                    return True
            if self._leave_unsaid_whole(fields, made_of[first] or (), dims.values(), groups):
                return True
        return False

    def _leave_unsaid_whole(
        self,
        fields: frozenset[Field],
        made_of: tuple[Group, ...],
        dims: Collection[Layout],
        groups: Mapping[int, Group],
    ) -> bool:
        """Leave axes whole that these numbers cannot express; ``head_dim`` axes before others."""
        if self._assigned(fields, made_of) is not None:
            return False
        fixed = [why for name, why in self.fixed.items() if name in fields]
        why = fixed[0] if fixed else f"{_names(fields)} does not divide into its slots"
        return self._leave_inner_whole(dims, groups, why)

    def _leave_inner_whole(
        self, dims: Collection[Layout], groups: Mapping[int, Group], why: str
    ) -> bool:
        axes = frozenset().union(*map(self._axes, dims)) & groups.keys()
        inner = frozenset(axis for axis in axes if self.plan.axes[axis].kind == "head_dim")
        return self.leave_whole(inner or axes, why)

    def _assigned(
        self, fields: frozenset[Field], made_of: tuple[Group, ...]
    ) -> dict[Group, Field] | None:
        """Return the number that determines each factor of a dim; None if a factor has none."""
        if not made_of:
            return {}
        (first, *others), (_, size, _) = made_of, made_of[0]
        open_ = [name for name in fields - self.fixed.keys() if self.fields[name] % size == 0]
        for name in sorted(open_, key=lambda name: (self.fields[name] != size, name)):
            rest = self._assigned(fields - {name}, tuple(others))
            if rest is not None:
                return {first: name, **rest}
        return None

    def widths(self) -> tuple[dict[Group, tuple[int, ...]], dict[Group, Divisor]]:
        """Return the widths of each group with which the class can be built; large axes in steps.

        If the numbers of two groups depend on each other, widths of one are left out that fail at
        the smallest or the second largest width of the other; unless its number has to divide that
        of the other, as heads the hidden size. Then it has all that divide one, and a divisor.
        """
        numbers = {g: of for g, of in self._numbers_of_groups().items() if not of <= self.by_layer}
        found = {group: self._buildable(group, numbers[group]) for group in numbers}
        some = [group for group, widths in found.items() if len(widths) < group[1]]
        divisors: dict[Group, Divisor] = {}
        for group in (group for group in found if group[1] <= _MANY):
            at = {width: {group: width} for width in found[group]}
            for other in (other for other in some if other != group):
                of_other = found[other]
                if group not in divisors and (rule := self._divisor(group, other, numbers, found)):
                    divisors[group] = rule
                    for v in reversed(of_other):
                        for w in rule.among(range(1, group[1]), v):
                            at.setdefault(w, {group: w, other: v})
                    continue
                extremes = (of_other[0], of_other[-2:][0])
                at = {
                    width: beside
                    for width, beside in at.items()
                    if all(self._builds(numbers, {**beside, other: x}) for x in extremes)
                }
            found[group] = tuple(sorted(at))
        limited = {g: of for g, of in found.items() if len(of) < g[1] or g in divisors}
        return limited, divisors

    def _divisor(
        self,
        group: Group,
        other: Group,
        numbers: Mapping[Group, set[Field]],
        found: Mapping[Group, tuple[int, ...]],
    ) -> Divisor | None:
        """Return the rule that a number of the group divides one of the other; None without.

        It has to say with which widths of the group the class can be built, at the other's largest
        and smallest width and at one between them that lets the group have a new width.
        """
        size, whole = group[1], other[1]
        for name, others in product(sorted(numbers[group]), sorted(numbers[other])):
            each, of_other = self.fields[name] // size, self.fields[others] // whole
            axis, beside = (self.plan.axes[first].name for first, *_ in (group, other))
            rule = Divisor(axis, each, beside, of_other, whole)
            new = (v for v in found[other] if set(rule.among(range(1, size), v)) - {*found[group]})
            between = next(new, None)
            if between is None or rule.among(range(1, size + 1), whole) != found[group]:
                continue
            if all(
                self._builds(numbers, {group: w, other: v}) == bool(rule.among([w], v))
                for v in (between, found[other][0])
                for w in range(1, size + 1)
            ):
                return rule
        return None

    def _numbers_of_groups(self) -> dict[Group, set[Field]]:
        groups, found = self.groups(), defaultdict(set)
        for (fields, _), dims in self._by_fields().items():
            made_of = self._made_of(next(iter(dims.values())), groups) or ()
            for group, name in (self._assigned(fields, made_of) or {}).items():
                found[group].add(name)
        return dict(found)

    def _buildable(self, group: Group, names: set[Field]) -> tuple[int, ...]:
        size, numbers = group[1], {group: names}
        if size <= _MANY:
            widths = (w for w in range(1, size) if self._builds(numbers, {group: w}))
            return (*widths, size)
        steps = (step for step in range(1, size) if size % step == 0)
        step = next(
            (s for s in steps if all(self._builds(numbers, {group: w}) for w in (s, size - s))),
            size,
        )
        return tuple(range(step, size + 1, step))

    def _builds(self, numbers: Mapping[Group, set[Field]], widths: Mapping[Group, int]) -> bool:
        values = {
            name: self.fields[name] * width // group[1]
            for group, width in widths.items()
            for name in numbers[group]
        }
        return self.configured.built(values) is not None

    def _by_fields(self) -> Mapping[tuple[frozenset[Field], str], Mapping[Dim, Layout]]:
        """Return dims by the numbers that they follow, and by layer if these differ by layer."""
        found: dict[tuple[frozenset[Field], str], dict[Dim, Layout]] = defaultdict(dict)
        for dim, layout in self._dims():
            if fields := self.follows.get(dim):
                layer = _layer_of(dim[0]) if fields <= self.by_layer else ""
                found[fields, layer][dim] = layout
        return found

    def groups(self) -> dict[int, Group]:
        """Return the group of each axis that may be cut, by number of the axis."""
        axes = self.plan.axes
        first: dict[int, int] = {}
        for dims in self._by_fields().values():
            alike: dict[tuple[int, str], set[int]] = defaultdict(set)
            for axis in frozenset().union(*map(self._axes, dims.values())) - self.whole.keys():
                alike[axes[axis].size, axes[axis].kind].add(axis)
            for joined in alike.values():
                roots = {first.get(axis, axis) for axis in joined}
                joined |= {axis for axis, root in first.items() if root in roots}
                first.update(dict.fromkeys(joined, min(joined)))
        return {n: (root, axes[n].size, axes[n].kind) for n, root in first.items()}

    def _made_of(self, layout: Layout, groups: Mapping[int, Group]) -> tuple[Group, ...] | None:
        """Return the groups whose product the dim is; None if it is no such product."""
        match layout:
            case Const():
                return ()
            case Slots(axis):
                return (groups[axis],) if axis in groups else ()
            case Prod(factors):
                each = [self._made_of(factor, groups) for factor in factors]
                known = [of for of in each if of is not None]
                return tuple(g for of in known for g in of) if len(known) == len(each) else None
            case Cat(parts):
                same = {self._made_of(part, groups) for part in parts}
                return same.pop() if len(same) == 1 else None
            case _:
                return None if self._axes(layout) & groups.keys() else ()

    # --- whole layers ---------------------------------------------------------------------------

    def layers(self) -> list[tuple[str, ...]]:
        """Return the branches that can be removed: all branches of a whole layer together.

        If layers may differ, each alone, if need be except the first.
        """
        named: dict[str, list[str]] = defaultdict(list)
        gated = {axis.name for axis in self.plan.axes if axis.kind == KIND}
        for branch in self.plan.branches:
            path = _layer_of(next(iter(branch.tensors), ""))
            if path and branch.name in gated:
                named[path].append(branch.name)
        if self.by_layer:
            alone = [(name,) for names in named.values() for name in names]
            first = next((branch.name for branch in self.plan.branches), "")
            return [each for each in alone if each != (first,) or not self.rules.keeps_first]
        # Tensors that a forward makes are among the plan's, and are no parameters.
        held = {self.plan.aliases.get(name, name) for name, _ in self.model.named_parameters()}
        return [
            tuple(names)
            for path, names in named.items()
            if {each for each in held if each.startswith(f"{path}.")}
            <= set(dead_parameters(self.plan, names))
        ]


def _layer_of(name: str) -> str:
    """Return the path of the outermost numbered module that holds a tensor; empty for others."""
    path = re.match(r".*?\.\d+(?=\.)", name)
    return path[0] if path else ""


def _names(fields: Collection[Field]) -> str:
    return " × ".join(sorted(map(".".join, fields)))


def _shown(dim: Dim) -> str:
    return f"{dim[0]} dim {dim[1]}"


def _floats(model: nn.Module | None) -> dict[str, float]:
    """Return the float attributes of a model's modules, such as the scale of heads."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in (model.named_modules() if model is not None else ())
        for name, value in vars(module).items()
        if type(value) is float
    }


def _outputs(model: nn.Module, example: Inputs) -> list[Any] | None:
    """Return the model's outputs in eval mode; None if the forward fails."""
    try:
        with evaluating(model):
            return [*pytree.tree_leaves(call(model, example))]
    # The user's code may fail in any way with a changed number.
    except Exception:
        return None


def _are_same(some: list[Any] | None, others: list[Any] | None) -> bool:
    """Return whether outputs are equal; those of a forward that fails count as equal."""
    if some is None or others is None:
        return True
    pairs = ((a, b) for a, b in zip(some, others, strict=False) if isinstance(a, Tensor))
    return len(some) == len(others) and all(a.is_meta or torch.equal(a, b) for a, b in pairs)


@contextmanager
def _other_number(model: Any, name: Field, value: int) -> Iterator[None]:
    """Change a number of the model's live configuration within the context."""
    place = model.config
    for key in name[:-1]:
        place = place.get(key) if isinstance(place, dict) else getattr(place, key)
    before = vars(place).get(name[-1]) if hasattr(place, "__dict__") else None
    if type(before) is not int:
        yield
        return
    vars(place)[name[-1]] = value
    try:
        yield
    finally:
        vars(place)[name[-1]] = before


def loadable(
    plan: Plan, model: nn.Module, by: str, example: Inputs, ours: Sequence[Layout]
) -> Plan:
    """Return the plan restricted to cuts that this program loads by itself, with equal widths.

    A warning says what stays whole for that, why, and what it costs. ``ours`` are dims that only a
    layer of l0prune can have cut.
    """
    kind = class_of_transformers(type(model))
    if by not in PROGRAMS:
        known = ", ".join(map(repr, PROGRAMS))
        is_one = f"loadable_by is one of {known}, not {by!r}{meant(by, PROGRAMS)}"
        raise UsageError(missing(by) or is_one)
    if not kind:
        raise UsageError(
            f"loadable_by={by!r} is for models of a class in transformers, which its "
            f"configuration builds; this is a {type(model).__qualname__}"
        )
    said = PROGRAMS[by](model, example)
    found = Loadable(plan, model, said.configured.with_numbers(), said)
    for layout in ours:
        found.leave_whole(
            axes_of(layout) & found.slots, "without it takes a layer of l0prune's own"
        )
    found.find(example)
    groups: dict[Group, list[str]] = defaultdict(list)
    for number, group in sorted(found.groups().items()):
        groups[group].append(plan.axes[number].name)
    layers = found.layers()
    kept = {name for names in (*groups.values(), *layers) for name in names}
    if not kept:
        why = _reasons(found) or "a layer goes with all of its branches, and some have no gate"
        raise NothingToPrune(f"nothing can be cut that {by} loads by itself: {why}")
    widths, rules = found.widths()
    allowed = {name: of for group, of in widths.items() for name in groups[group]}
    divisors = (replace(of, axis=name) for group, of in rules.items() for name in groups[group])
    together = tuple(tuple(names) for names in (*groups.values(), *layers) if len(names) > 1)
    result = replace(plan.select(kept), together=together, allowed=allowed)
    result = replace(result, divisors=tuple(divisors))
    _warn_of_cost(found, result, by)
    return result


def _reasons(found: Loadable, most: int = 4) -> str:
    """List the axes that stay whole and why, those of one reason and of like names together."""
    texts: dict[tuple[str, str], str] = {}
    for number, why in sorted(found.whole.items()):
        name = found.plan.axes[number].name
        texts.setdefault((re.sub(r"\d+", "*", name), re.sub(r"\d+", "*", why)), f"{name}: {why}")
    more = f"; and {len(texts) - most} more of other names" if len(texts) > most else ""
    return "; ".join([*texts.values()][:most]) + more


def _warn_of_cost(found: Loadable, result: Plan, by: str) -> None:
    before, after = CostModel(found.plan), CostModel(result)
    shares = " and ".join(
        f"{reached} of the {label}" + f" (else {else_})" * (else_ != reached)
        for unit, label in (("params", "params"), ("macs", "MACs"))
        for reached, else_ in [(f"{after.reachable(unit):.1%}", f"{before.reachable(unit):.1%}")]
    )
    branches = {axis.name for axis in found.plan.axes if axis.kind == KIND}
    alone = len(branches - set(result.names))
    first = found.rules.keeps_first
    which = "The first branch has" if first else "Branches that are no whole layer have"
    blocks = f" {which} no gate: {alone}." if alone else ""
    differing = found.by_layer - found.fixed.keys()
    own = f" but for {_names(differing)}, of which each has its own" * bool(differing)
    whole = f" These stay whole: {_reasons(found)}." if found.whole else ""
    warn(
        f"for {by} to load the result by itself, layers keep one width{own}, and gates reach "
        f"{shares}.{whole}{blocks}"
    )
