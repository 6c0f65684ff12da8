"""Survey of a network: possible cuts, and the reasons for what stays whole.

Tables stay short for networks of any depth: numbered names share a row, ``layer3.{0..5}.conv1``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from torch import nn

from l0prune.capture.capture import fixed_batch, fixed_sizes
from l0prune.capture.copying import inside
from l0prune.capture.sizes import ALL_FIXED, free_sizes
from l0prune.capture.weights import Weight, weights_of
from l0prune.exporting.preview import why_no_class
from l0prune.files.source_file import source_file_of
from l0prune.gating.axis_trials import offered
from l0prune.gating.branch_trials import REFUSED
from l0prune.infer.reasons import Whole
from l0prune.plan.branch import Branch
from l0prune.plan.cost import CostModel, cost_of
from l0prune.plan.globs import listed
from l0prune.plan.layout import axes_of
from l0prune.plan.measures import measure_of
from l0prune.plan.plan import Axis, Pin, Plan
from l0prune.plan.targets import TARGET
from l0prune.progress.display import displayed
from l0prune.report.layers import UNUSED, Layer, Side, layers_of
from l0prune.running.environment import as_html
from l0prune.selection.fitting import times_on

T = TypeVar("T")

# Counters are separate numbers (``blocks.3``) or numbers inside a path (``layer3.0``), but not at
# the end of its last name: conv1 is not conv2.
_COUNTER = re.compile(r"(?<!\w)\d+(?!\w)|(?<=[A-Za-z_])\d+(?=\.\w)")


def mask_numbers(text: str) -> str:
    """Return the text with counters masked: equal for texts that differ only in these."""
    return _COUNTER.sub("#", text)


def join_numbered(texts: Sequence[str]) -> str:
    """Join texts of one pattern to a single one, with ranges where counters differ."""
    counters = [_COUNTER.findall(text) for text in texts]
    columns = [[int(n) for n in column] for column in zip(*counters, strict=True)]
    ranges = map(_number_range, columns)
    return _COUNTER.sub(lambda match: next(ranges), texts[0])


def _number_range(numbers: Sequence[int]) -> str:
    """Format numbers as ``3``, ``{0..5}`` or ``{1,4,6}``."""
    found = sorted(set(numbers))
    if len(found) == 1:
        return str(found[0])
    is_run = found == list(range(found[0], found[-1] + 1))
    if is_run and len(found) > 2:
        return f"{{{found[0]}..{found[-1]}}}"
    shown = found if len(found) < 5 else [*found[:2], "…", found[-1]]
    return "{" + ",".join(map(str, shown)) + "}"


def list_names(names: Iterable[str]) -> str:
    """Return a short list of names: those of one pattern joined, and at most three."""
    shown = [join_numbered(group) for group in group_by(names, mask_numbers)]
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return " + ".join(shown[:3]) + more


def group_by(things: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Group things by a key, in the order in which each key first appears."""
    groups: dict[Hashable, list[T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return list(groups.values())


def tables(
    plan: Plan, layers: Sequence[Layer], params: int, macs: int
) -> Iterator[Table | Text | str]:
    """Yield the tables of a survey: axes; layers, similar ones in one row; remarks and hints."""
    if plan.axes:
        yield _axes(plan)
    if layers:
        yield _layers(layers, params, macs)
    rest = macs - sum(layer.macs for layer in layers)
    if macs and rest / macs > 0.0005:
        yield (
            f"The other {rest / macs:.1%} of the MACs multiply activations with one another, or "
            "with weights that the forward computes."
        )
    hints = [s.reason.partition("; ")[2] for x in layers for s in (x.input, x.output)]
    yield from map(Text, dict.fromkeys(hint for hint in hints if hint))


def _axes(plan: Plan) -> Table:
    """Return the table of axes; those whose names differ only in counters share a row."""
    table = _table("Can be cut", "axis", "slots", "gates multiply")
    sites: dict[int, list[str]] = {}
    for site in plan.sites:
        for number in axes_of(site.layout):
            sites.setdefault(number, []).append(site.tensor)

    def alike(numbered: tuple[int, Axis]) -> tuple[str, str]:
        return mask_numbers(numbered[1].name), numbered[1].kind

    for group in group_by(enumerate(plan.axes), alike):
        sizes, kind = _range([axis.size for _, axis in group]), group[0][1].kind
        table.add_row(
            join_numbered([axis.name for _, axis in group]),
            _times(len(group), f"{sizes} {kind}s"),
            list_names(name for number, _ in group for name in sites.get(number, ())),
        )
    return table


def _layers(layers: Sequence[Layer], params: int, macs: int) -> Table:
    """Return the table of layers, whose two sides show their axes or why they stay whole."""
    title = "Every layer: what can be cut on its two sides, or why it stays whole"
    table = _table(title, "layer", "input side", "output side")
    for column in ("params", "MACs"):
        table.add_column(column, justify="right")
    for group in group_by(layers, _alike):
        inputs, outputs = _side([x.input for x in group]), _side([x.output for x in group])
        table.add_row(
            join_numbered([x.name for x in group]) + "\n  " + _times(len(group), group[0].kind),
            inputs,
            outputs if group[0].used else "",
            _percent(sum(x.params for x in group), params),
            _percent(sum(x.macs for x in group), macs),
        )
    return table


class _PlainTable(Table):
    """Table whose cells are shown as they are: names may hold brackets, rich's markup."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(Text(cell) for cell in cells), **options)


def _table(title: str, *columns: str) -> Table:
    table = _PlainTable(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")  # names are to be copied, so never truncated
    return table


def _alike(layer: Layer) -> tuple[Hashable, ...]:
    """Return the key that the layers of one row share."""
    carries = layer.input.axes == layer.output.axes
    sides = (_short(layer.input), _short(layer.output))
    return (mask_numbers(layer.name), layer.kind, carries, *sides)


def _short(side: Side) -> str:
    """Return the key of a side, which is the same for layers that share a row."""
    return ", ".join(dict.fromkeys(map(mask_numbers, side.axes))) + " | " + mask_numbers(_why(side))


def _side(sides: Sequence[Side]) -> str:
    """Describe the sides of layers that share a row."""
    names = list_names(name for side in sides for name in side.axes)
    why = join_numbered([_why(side) for side in sides])
    if not names:
        return why if why == UNUSED else f"whole: {why}"
    if not why:
        return names
    return f"{names}; {_shares([1 - side.share for side in sides])} whole: {why}"


def _why(side: Side) -> str:
    """Return the reason without the hint that follows it."""
    return side.reason.partition("; ")[0]


def _shares(shares: list[float]) -> str:
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return low if low == high else f"{low} to {high}"


def _times(count: int, what: str) -> str:
    return what if count == 1 else f"{count} × {what}"


def _range(sizes: list[int]) -> str:
    low, high = min(sizes), max(sizes)
    return str(low) if low == high else f"{low} to {high}"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if part and whole else "-"


@dataclass(frozen=True)
class Survey:
    """Prunable axes of a model, and the reasons for what stays whole. Printing it shows tables.

    Attributes:
        plan: the axes, pins and costs as data.
        example: the example inputs of the survey, positional and by name.
        unused: parameters that the eval-mode forward never uses (auxiliary heads).
        layers: every Linear, convolution, embedding and bare weight of the model, with the axes
            on its two sides or the reason why they stay whole.
        draws: operators that draw random numbers in eval mode, each with its source line.
        fixed: reasons, by name, for sizes that were requested to be free but cannot be.
        no_class: why an export will be the captured graph and not of the model's own class, found
            by a trial with half of all slots cut; empty if it keeps its class, None if not tried.
        weights: the weights that the layers were found by.
        whole: the streams between layers of which nothing can be cut, though each weight on one
            may be cut on its other side; those with the most parameters first.
        state: buffers that carry values from one call to the next.
    """

    plan: Plan
    example: tuple[tuple[Any, ...], dict[str, Any]]
    unused: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()
    draws: tuple[str, ...] = ()
    fixed: Mapping[str, str] = field(default_factory=dict)
    no_class: str | None = None
    weights: tuple[Weight, ...] = field(default=(), repr=False)
    whole: tuple[Whole, ...] = ()
    state: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Axes that can be cut."""
        return self.plan.axes

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Places that cannot be cut, with reasons."""
        return self.plan.pins

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Branches that can be removed as a whole, if they get a separate gate: see ``gate``."""
        return self.plan.branches

    @property
    def closing(self) -> dict[str, str]:
        """Axes that may close completely, each with the branch that this removes if it has a gate.

        Any other axis keeps one slot: later values depend on it, or its branch adds a bias.
        """
        return {name: branch.name for branch in self.branches for name in branch.closing}

    @property
    def params(self) -> int:
        """Number of parameters of the dense model that its forward uses."""
        return cost_of(self.plan).dense("params")

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the dense model for one example (1 MAC = 2 FLOPs)."""
        return cost_of(self.plan).dense("macs")

    def reachable(self, measure: str) -> float:
        """Return the share of the model's ``"params"``, ``"macs"``, … that axes can remove.

        Raises:
            UsageError: there is no such measure, or it needs more than the model.
        """
        return measure_of(self.plan, measure).reachable()

    @property
    def params_on_whole_streams(self) -> float:
        """Share of the parameters that have a side on a stream of ``whole``, from 0 to 1.

        A weight that is cut on one side only shrinks linearly in the share of kept slots, one that
        is cut on both sides quadratically. ``reachable`` does not distinguish these.
        """
        return _share(self.plan, {name for stream in self.whole for name in stream.tensors})

    def to_dict(self) -> dict[str, Any]:
        """Return the survey as plain data."""
        return {
            "params": self.params,
            "macs": self.macs,
            "gates": self.plan.size,
            "params_reachable": self.reachable("params"),
            "macs_reachable": self.reachable("macs"),
            "params_on_whole_streams": self.params_on_whole_streams,
            "whole_streams": [
                {**asdict(stream), "params": _share(self.plan, stream.tensors)}
                for stream in self.whole
            ],
            "axes": [
                {"name": a.name, "kind": a.kind, "size": a.size, "group_size": a.group_size}
                for a in self.axes
            ],
            "pins": [
                {"where": p.where, "reason": p.reason, "operator": p.operator, "source": p.source}
                for p in self.pins
            ],
            "branches": [asdict(branch) for branch in self.branches],
            "closing": self.closing,
            "layers": [asdict(layer) for layer in self.layers],
            "unused": list(self.unused),
            "parts": list(self.plan.parts),
            "draws": list(self.draws),
            "state": list(self.state),
            "fixed_sizes": dict(self.fixed),
            "own_class": None if self.no_class is None else not self.no_class,
            "no_class": self.no_class,
            "reused_sizes": [each.text(self.plan.names) for each in self.plan.code.reused],
        }

    def to_json(self) -> str:
        """Return ``to_dict`` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a summary of possible cuts, then the tables of axes and layers."""
        yield (
            f"{self.params:,} params, {self.macs:,} MACs (multiply-accumulates) an example; "
            f"{self.plan.size:,} slots (channels, neurons, heads and the like) on {len(self.axes)} "
            f"axes can have a gate and be cut: up to {self.reachable('params'):.1%} of the params "
            f"and {self.reachable('macs'):.1%} of the MACs"
        )
        if self.whole:
            count, first = len(self.whole), self.whole[0]
            yield Text(
                f"{count} stream{'s' * (count > 1)} between layers stay{'s' * (count == 1)} whole, "
                f"and {self.params_on_whole_streams:.1%} of the params have a side on "
                f"{'one' if count > 1 else 'it'}, so that they can be cut on the other side alone: "
                f"{listed([f'{each.where} ({each.size} slots)' for each in self.whole], 4)}. "
                f"The first stays whole because {first.reason.partition('; ')[0]}."
            )
        if self.branches:
            count = len(self.branches)
            names = listed([branch.name for branch in self.branches], 4)
            theirs = [cost for cost in self.plan.costs if () not in cost.needed]
            size = CostModel(self.plan, theirs).dense("params")
            yield Text(
                f"{count} branch{'es' * (count > 1)} can go as a whole, with "
                f"{size / max(self.params, 1):.1%} of the params (not with branches=False, "
                f"--no-branches): {names}."
            )
            closing = self.closing
            if closing:
                yield Text(
                    f"{len(closing)} ax{'es' if len(closing) > 1 else 'is'} may close completely, "
                    f"and a branch with each: {listed(list(closing), 4)}. Of any other axis one "
                    "slot stays, since what follows is computed from it or its branch adds a bias."
                )
        refused = (pin for pin in self.pins if pin.where.startswith(REFUSED))
        yield from (Text(f"The {pin.where}: {pin.reason}.") for pin in refused)
        if self.plan.in_parts:
            yield Text(
                "torch.export cannot follow the whole model, so it is captured in parts: "
                f"{', '.join(self.plan.parts)}. The code between them runs on as it is, and its "
                "MACs are not counted."
            )
        if self.draws:
            yield Text(
                f"In eval mode the model draws random numbers ({', '.join(self.draws)}): an "
                "axis that a draw is as wide as stays whole, and no ONNX file can be made, since "
                "ONNX Runtime draws others. Noise that is an input of the model has neither limit."
            )
        if self.state:
            yield Text(
                f"The model keeps {listed(list(self.state), 4)} from one call to the next: its "
                "ONNX file has that as last inputs and outputs. Files in 8 or 16 bits, .pte and "
                ".tflite will be refused, unless the forward takes and returns it."
            )
        yield from map(Text, self.fixed.values())
        if self.no_class:
            yield Text(
                "Tried with half of all slots cut, an export is the captured graph, not of the "
                f"model's own class: {self.no_class}."
            )
        elif self.no_class is not None and self.plan.code.reused:
            yield Text(self._on_class())
        times = times_on(TARGET)
        if max(blocks := times.blocks(self.plan), default=1) > 1:
            yield Text(f"By default a cut leaves {times.describe(blocks)}.")
        yield from tables(self.plan, self.layers, self.params, self.macs)

    def _on_class(self) -> str:
        """Describe the modules whose code determines a size without an attribute for it."""
        first, *others = self.plan.code.reused
        more = f" (and {len(others)} more of that kind)" if others else ""
        return (
            f"{first.text(self.plan.names)}{more}. In the exported model such modules are given "
            "their sizes (GivenSizes); keep_class='native' leaves these dims whole."
        )

    def __repr__(self) -> str:
        return (
            f"Survey({self.params:,} params, {self.macs:,} MACs; {self.plan.size:,} gates on "
            f"{len(self.axes)} axes reach {self.reachable('params'):.1%} of the params and "
            f"{self.reachable('macs'):.1%} of the MACs)"
        )

    def _repr_html_(self) -> str:
        return as_html(self)

    def __str__(self) -> str:
        console = Console(width=120)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


@displayed
def survey(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    own_class: bool = True,
    progress: bool = True,
) -> Survey:
    """Find every axis of the model that can be cut, without changing the model.

    Args:
        model: any module that torch.export can capture, as a whole or in parts; it may live on
            the meta device. Of a compiled one, or one in DataParallel or DDP, it is that inside.
        args: example positional inputs of its forward, a tuple (or a single tensor).
        kwargs: example inputs by name, a dict: ``survey(model, (x,), {"mask": mask})``.
        dynamic_shapes: sizes of the inputs that are to be free beside the batch, in torch.export's
            format (``{"x": {2: "height", 3: "width"}}``): which of them the model's code fixes, and
            does it fix the batch? ``{}`` asks for the batch alone.
        own_class: try on a copy with half of all slots cut whether an export can be of the model's
            own class. It takes about as long as the model on a few inputs in float64.
        progress: show progress on stderr.

    Raises:
        CaptureError: torch.export cannot follow the model's forward on these inputs.
        UsageError: the model is none that can be looked into, or the example holds no tensor.
    """
    if isinstance(model, nn.Module):
        model = inside(model)
    parts = offered(model, args, kwargs, dynamic_shapes)
    weights = weights_of(model)
    layers = layers_of(parts.plan, weights, parts.unused)
    free = free_sizes(model, parts.example, dynamic_shapes)
    fixed = fixed_sizes(model, parts.example, free)
    if dynamic_shapes is not None and not parts.plan.in_parts:
        fixed = fixed_batch(model, parts.example) | fixed
    no_class = None
    if own_class and source_file_of(model) is None:  # a file has no class of the user's
        no_class = why_no_class(model, parts.plan, parts.example, ALL_FIXED if fixed else free)
    found = (stream for part in parts.found for stream in part.analysis.whole)
    whole = tuple(sorted(found, key=lambda each: -_share(parts.plan, each.tensors)))
    return Survey(
        parts.plan,
        parts.example,
        parts.unused,
        layers,
        parts.draws,
        fixed,
        no_class,
        weights,
        whole,
        parts.state,
    )


def _share(plan: Plan, tensors: Collection[str]) -> float:
    """Return the share of all parameters that are in these tensors."""
    costs = [cost for cost in plan.costs if cost.unit == "params"]
    mine = CostModel(plan, [cost for cost in costs if cost.tensor in tensors])
    return mine.dense("params") / max(CostModel(plan, costs).dense("params"), 1)
