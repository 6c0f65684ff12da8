"""The parts of a model that are captured separately: the whole model, or its islands.

Where torch.export cannot follow a whole model (a detector, whose later steps depend on what the
earlier ones found; a generation loop), it is run once on the example, and its largest submodules
that can be captured are, each on the inputs that it really received. The borders of such an
island stay whole. The rest is the user's Python code, which runs unchanged: weights of the parts,
or numbers such as sizes, that it was seen to read have to stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from l0prune.capture.capture import capture
from l0prune.capture.compat import pytree
from l0prune.capture.copying import copied
from l0prune.capture.example_inputs import examples_given, filled, keep, record
from l0prune.capture.model_checks import check_module, warn_of_nan
from l0prune.capture.provenance import within
from l0prune.capture.sizes import Inputs, batch_of, free_sizes
from l0prune.capture.threads import one_at_a_time
from l0prune.errors import CaptureError, UsageError, first_line
from l0prune.infer.build import Analysis, analyse
from l0prune.infer.dataflow import carried
from l0prune.infer.nodes import called, draws
from l0prune.infer.own_code import with_code
from l0prune.infer.registry import explained
from l0prune.plan.activations import steps
from l0prune.plan.branch import Branch, is_needed
from l0prune.plan.layout import Layout, Slots, axes_of, substitute
from l0prune.plan.plan import Cost, Pin, Plan

# Reads of a tensor whose result no cut changes.
_HARMLESS = {
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "is_cuda", "requires_grad", "ndim", "layout", "grad")
} | {Tensor.dim, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.ndimension}


@dataclass
class Seen:
    """Reads of a part's tensors and numbers by code outside of it.

    Attributes:
        tensors: names of parameters and buffers.
        numbers: path of the module, name and value of each whole number.
    """

    tensors: set[str] = field(default_factory=set)
    numbers: set[tuple[str, str, int]] = field(default_factory=set)

    def whole(self, plan: Plan) -> dict[int, str]:
        """Return the axes of a plan that these reads keep whole, each with the reason."""
        found: dict[int, str] = {}
        for name in sorted(self.tensors & plan.tensors.keys()):
            for dim in plan.tensors[name]:
                found |= dict.fromkeys(axes_of(dim), f"the code around the part reads {name}")
        for path, name, value in sorted(self.numbers):
            why = f"the code around the part reads {path}.{name}"
            for tensor, dims in plan.tensors.items():
                for dim in dims if tensor.startswith(f"{path}.") else ():
                    sizes = {i: plan.axes[i].size for i in axes_of(dim)}
                    is_all = dim.size == value
                    found |= {i: why for i, size in sizes.items() if is_all or size == value}
        return found


def read_outside(model: nn.Module, paths: Iterable[str], example: Inputs) -> Seen:
    """Run the model, which may change it, and record reads of the parts by code outside them."""
    watch = _Watch()
    for path in paths:
        part = model.get_submodule(path)
        for inner, module in part.named_modules(remove_duplicate=False):
            watch.add(within(path, inner), module)
        part.register_forward_pre_hook(watch.enter)
        part.register_forward_hook(watch.leave, always_call=True)
    with watch:
        record(model, (), example)
    return watch.seen


class _Watch(TorchFunctionMode):
    """Recorder of reads of the added modules' tensors and numbers while no part runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()
        self.depth = 1  # nothing counts before the model runs
        self.names: dict[int, str] = {}

    def __enter__(self) -> _Watch:
        self.depth = 0
        super().__enter__()
        return self

    def add(self, path: str, module: nn.Module) -> None:
        """Watch the tensors and whole numbers of a module, without its submodules."""
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                self.names.setdefault(id(tensor), within(path, name))
        with suppress(TypeError):  # the class cannot be replaced: only tensors are watched
            module.__class__ = self._watched(path, type(module))

    def _watched(self, path: str, kind: type[nn.Module]) -> type[nn.Module]:
        """Return a subclass that records each read of a whole number."""

        def read(module: nn.Module, name: str) -> Any:
            value = kind.__getattribute__(module, name)
            if type(value) is int and not self.depth and not name.startswith("_"):
                self.seen.numbers.add((path, name, value))
            return value

        members = {"__getattribute__": read, "__module__": kind.__module__}
        metaclass: Any = type(kind)
        watched: type[nn.Module] = metaclass(kind.__name__, (kind,), members)
        return watched

    def enter(self, *_: Any) -> None:
        """Count one more running part."""
        self.depth += 1

    def leave(self, *_: Any) -> None:
        """Count one running part less."""
        self.depth -= 1

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record the watched tensors of every call of torch outside of the parts."""
        if not self.depth and func not in _HARMLESS:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and id(leaf) in self.names:
                    self.seen.tensors.add(self.names[id(leaf)])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Part:
    """A submodule with its analysis; the whole model where the path is empty.

    Attributes:
        path: of the submodule; names in the analysis are the whole model's.
        analysis: of its graph.
        example: what it receives when the model runs on the example.
        calls: how often it is called then.
    """

    path: str
    analysis: Analysis
    example: Inputs
    calls: int = 1


@dataclass
class Parts:
    """The parts of a model that could be captured, and their joint plan.

    Attributes:
        plan: of the whole model.
        example: the inputs that it was made with, positional and by name.
        found: the parts whose plans it joins.
        unused: parameters that the eval-mode forward never touches.
    """

    plan: Plan
    example: Inputs
    found: list[Part] = field(default_factory=list)
    unused: tuple[str, ...] = ()

    @property
    def draws(self) -> tuple[str, ...]:
        """The operators that draw random numbers in eval mode, and where they are called."""
        nodes = (node for part in self.found for node in part.analysis.captured.graph.nodes)
        return tuple(dict.fromkeys(called(node) for node in nodes if draws(node)))

    @property
    def state(self) -> tuple[str, ...]:
        """The stored tensors that carry values from one call to the next."""
        found = []
        for captured in (part.analysis.captured for part in self.found):
            nodes = captured.graph.find_nodes(op="placeholder")
            stored = [node for node in nodes if node.name in captured.names]
            found += [captured.names[node.name] for node in carried(captured.graph, stored)]
        return tuple(dict.fromkeys(found))


@one_at_a_time()
@explained
def inferred(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None, dynamic_shapes: Any = None
) -> Parts:
    """Infer the plan of a model from the user's example inputs.

    Raises:
        CaptureError: torch.export cannot follow the model's forward on these inputs.
        UsageError: the model cannot be analysed, the example holds no tensor, or none that
            ``dynamic_shapes`` names.
    """
    check_module(model)
    warn_of_nan(model)
    args = args if isinstance(args, tuple) else (args,)
    by_name = dict(kwargs or {})
    if not batch_of(args, by_name):
        kinds = {type(leaf).__name__ for leaf in pytree.tree_leaves((args, by_name))} - {"Tensor"}
        found = f" ({', '.join(sorted(kinds))} was given)" if kinds else ""
        raise UsageError(
            f"The example inputs hold no tensor with a batch dimension{found}. Give them as the "
            "model takes them: survey(model, (torch.randn(2, 3, 224, 224),))."
        )
    example = keep(model, args, by_name)
    free_sizes(model, example, dynamic_shapes)
    return parts_of(model, example)


def parts_of(model: nn.Module, example: Inputs) -> Parts:
    """Capture and analyse the whole model as one part, or its islands.

    Raises:
        CaptureError: no part of it that can be captured can be cut; the text says what stopped
            the capture of the whole.
    """
    try:
        whole = part_at(model, "", example)
    except CaptureError as error:
        found = _islands(model, example)
        parts = _put_together(model, example, found, refused=first_line(error))
        if not parts.plan.axes:
            raise
        return parts
    return Parts(whole.analysis.plan, example, [whole], whole.analysis.captured.unused)


@explained
def part_at(model: nn.Module, path: str, example: Inputs) -> Part:
    """Capture and analyse the submodule at ``path`` on its example inputs."""
    analysis = analyse(capture(model, *example, path=path))
    return Part(path, with_code(analysis, model), example)


def _islands(model: nn.Module, example: Inputs) -> list[Part]:
    """The largest submodules that can be captured, from the top down."""
    found: list[Part] = []
    seen: set[int] = set()
    level = _children(model, "", seen)
    while level:
        try:
            calls = record(copied(model), level, example)  # a forward may change the model
        except Exception:  # it does not even run: the error of the whole capture says why
            return []
        received: dict[str, list[Inputs]] = {path: [] for path in level}
        for call in calls:
            received[call.path].append(filled(call.inputs))
        level = []
        for path, inputs in received.items():
            try:
                found.append(replace(_part_of_calls(model, path, inputs), calls=len(inputs)))
            except CaptureError:
                level += _children(model.get_submodule(path), path, seen)
    order = {name: i for i, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    return sorted(found, key=lambda part: order[part.path])


def _part_of_calls(model: nn.Module, path: str, received: Sequence[Inputs]) -> Part:
    """Return the submodule at ``path``, if one graph can represent all its calls.

    A container is never called, but its children may be: these are tried next.
    """
    kinds = [_kind_of_call(inputs) for inputs in received]
    if not received or any(kind != kinds[0] for kind in kinds):
        raise CaptureError(f"{path} is not called in one way")
    return part_at(model, path, received[0])


def _kind_of_call(inputs: Inputs) -> tuple[object, list[object]]:
    """Return the structure of the inputs, and their leaves with tensors as placeholders."""
    leaves, structure = pytree.tree_flatten(inputs)
    return structure, [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _children(module: nn.Module, path: str, seen: set[int]) -> list[str]:
    """Paths of the children that have parameters; a module under two names counts once."""
    paths = []
    for name, child in module.named_children():
        if id(child) not in seen and any(True for _ in child.parameters()):
            seen.add(id(child))
            paths.append(within(path, name))
    return paths


def _put_together(model: nn.Module, example: Inputs, found: list[Part], refused: str) -> Parts:
    """Join the plans of all islands, and pin the weights outside of them."""
    batch = examples_given(example)
    seen = read_outside(copied(model), [part.path for part in found], example) if found else Seen()
    plan = _join([_of_island(model, found, i, batch, seen) for i in range(len(found))])
    pins = [Pin("the model as a whole", f"{refused} So its parts are captured one by one.")]
    costs, unused = [], [name for part in found for name in part.analysis.captured.unused]
    for name, parameter in model.named_parameters():
        if name in plan.tensors or name in unused:
            continue
        owner = name.rpartition(".")[0]
        costs.append(Cost(owner, "params", float(parameter.numel()), (), name))
        if parameter.ndim > 1:
            why = "code that torch.export cannot follow may use it"
            pins += [Pin(f"{name} dim {dim}", why) for dim in range(parameter.ndim)]
    plan = replace(plan, pins=(*pins, *plan.pins), costs=(*plan.costs, *costs))
    return Parts(plan, example, found, tuple(unused))


def _of_island(
    model: nn.Module, found: Sequence[Part], number: int, batch: int, seen: Seen
) -> Plan:
    """Return the plan of one island as a part of the whole model's plan.

    Single input columns are not gated: cutting those takes a gather, which cannot be inserted
    into the user's code. Tensors that are shared with another island, or read by the code around
    it, stay whole; the former count once.
    """
    part, earlier, later = found[number], found[:number], found[number + 1 :]
    plan = part.analysis.plan
    shared = plan.tensors.keys() & (_tensors_of((*earlier, *later)) | _known_outside(model, part))
    whole = dict.fromkeys(
        (i for name in sorted(shared) for dim in plan.tensors[name] for i in axes_of(dim)),
        "something outside the part that was captured shares it",
    )
    borders = (i for i, axis in enumerate(plan.axes) if axis.kind == "input")
    whole |= dict.fromkeys(borders, f"it reads {part.path}'s inputs, all of which stay")
    whole |= seen.whole(plan)
    pins = plan.pins_of(whole)
    plan = plan.select({axis.name for i, axis in enumerate(plan.axes) if i not in whole})
    fixed = shared | seen.tensors
    branches = (branch for branch in plan.branches if fixed.isdisjoint(_needed_by(plan, branch)))
    examples = part.analysis.captured.batch / batch
    share = examples * part.calls
    costs = [c if c.unit == "params" else replace(c, scale=c.scale * share) for c in plan.costs]
    counted = _tensors_of(earlier)
    costs = [c for c in costs if c.unit == "macs" or c.tensor not in counted]
    return replace(
        plan,
        costs=tuple(costs),
        pins=(*plan.pins, *pins),
        parts=(part.path,),
        branches=tuple(branches),
        activations=tuple(each.of_examples(examples) for each in plan.activations),
    )


def _needed_by(plan: Plan, branch: Branch) -> set[str]:
    """The tensors that make a branch zero, and those that only it needs."""
    costs = (cost for cost in plan.costs if not is_needed(cost.needed, [branch.name]))
    return {*branch.tensors, *(cost.tensor for cost in costs)}


def _known_outside(model: nn.Module, part: Part) -> set[str]:
    """Tensors that have a name outside the part, too: code there may read them."""
    module = model.get_submodule(part.path)
    every = model.named_modules(remove_duplicate=False)
    own = tuple(f"{path}." for path, each in every if each is module)
    names = [(name, name) for name in part.analysis.plan.tensors]
    names += list(part.analysis.captured.aliases.items())
    return {tensor for name, tensor in names if not name.startswith(own)}


def _tensors_of(parts: Sequence[Part]) -> set[str]:
    return {name for part in parts for name in part.analysis.plan.tensors}


def _join(plans: Sequence[Plan]) -> Plan:
    """Join the plans of different submodules, with consecutive numbers of axes."""
    joined = Plan((), (), {}, (), (), parts=())
    for plan in plans:
        shift = partial(_shifted, by=len(joined.axes))
        known = {*joined.names, *(branch.name for branch in joined.branches)}
        plan = plan.mapped(
            (replace(axis, start=axis.start + joined.size) for axis in plan.axes),
            (replace(site, layout=shift(site.layout)) for site in plan.sites),
            shift,
        )
        before = steps(joined.activations)
        joined = Plan(
            axes=(*joined.axes, *plan.axes),
            pins=(*joined.pins, *plan.pins),
            tensors=joined.tensors | plan.tensors,
            sites=(*joined.sites, *plan.sites),
            costs=(*joined.costs, *plan.costs),
            aliases=joined.aliases | plan.aliases,
            parts=(*joined.parts, *plan.parts),
            roles=joined.roles | plan.roles,
            wider=(*joined.wider, *plan.wider),
            alike=(*joined.alike, *plan.alike),
            code=joined.code.joined(plan.code),
            branches=(*joined.branches, *(b for b in plan.branches if b.name not in known)),
            activations=(*joined.activations, *(each.later(before) for each in plan.activations)),
        )
    return joined


def _shifted(layout: Layout, by: int) -> Layout:
    return substitute(layout, lambda s: Slots(s.axis + by, s.start, s.stop))
