"""A gated model at fewer slots, in place, while it goes on learning; and whole again.

Nothing is folded: the gates of the slots that are left multiply what they did, so that the next
step of any optimizer is that of the whole model whose other gates are closed. Parameters and
buffers stay the objects that they were; what is cut off them is kept as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.provenance import within
from l0prune.errors import UsageError
from l0prune.exporting.capture_parts import surveyed
from l0prune.exporting.certify.answers import BOTH
from l0prune.exporting.certify.verify import verify_class
from l0prune.exporting.network import Network, attempt, copies_of
from l0prune.exporting.own_class.layers import Layer
from l0prune.exporting.own_class.sizes import Changes
from l0prune.exporting.resize_class import check_class_alone, drop_branches, resize_class
from l0prune.exporting.slice import slice_by_plan
from l0prune.exporting.slicing.kept_slots import KeptSlots
from l0prune.exporting.slicing.tensors import Place
from l0prune.files.cut_layers import SkippedModule, become, tensors_of
from l0prune.files.given_sizes import GIVEN, GivenSizes
from l0prune.gating.attaching import holder
from l0prune.gating.bank import Gates
from l0prune.gating.gated_class import CHILD, gated_class, gating_of, original_class
from l0prune.gating.link import Link, Scale
from l0prune.gating.multiplying import LINK
from l0prune.infer.parts import Parts

PASSES = (check_class_alone, slice_by_plan, resize_class, drop_branches, verify_class)
# One example and several, and the several in training mode: each runs on the host while steps wait.
_BATCHES = (2, 1)
_MISSING = object()


@dataclass(frozen=True)
class Form:
    """A gated model's own class at fewer slots, as the passes of an export make it.

    Attributes:
        kept: the slots that are left, bool, shape ``(plan.size,)``.
        changes: attributes that follow the sizes.
        layers: by path, the modules that need more than that.
        scales: by parameter, what it is multiplied with beside its gates.
        emptied: tensors of which nothing is left, since only branches need them that are gone.
    """

    kept: Tensor
    changes: Changes
    layers: Mapping[str, Layer]
    scales: Mapping[str, Tensor]
    emptied: Set[str] = frozenset()


class Graph:
    """A gated model's graph, captured when it is first asked for: training does not change it."""

    def __init__(self) -> None:
        self._parts: Parts | None = None

    def of(self, network: Network) -> Parts:
        """The model as it is captured, without its weights, which are not kept for that.

        Raises:
            L0pruneError: it can no longer be captured.
        """
        if self._parts is None:
            # what is gone of a graph does not depend on the batch
            self._parts = surveyed(network, frees_batch=False)
            for part in self._parts.found:
                part.analysis.captured.program.state_dict.clear()
        return self._parts


def smaller_form(model: nn.Module, kept: Tensor, graph: Graph) -> Form:
    """The form of a gated model, whole so far, of which all other slots are closed.

    Args:
        model: gated; it is left as it is.
        kept: as ``plan.kept`` gives it, bool, flat.
        graph: of the model, for ways around branches that are gone.

    Raises:
        UsageError: its own class is not shown to compute and to train the same at these sizes.
        L0pruneError: the model cannot be copied, or what it computes cannot be told.
    """
    network = replace(copies_of(model), compared_in=BOTH[:1], batches=_BATCHES)
    chosen = KeptSlots(network.plan, network.z, kept)
    network = replace(network, chosen=chosen)
    if chosen.gone:
        parts = graph.of(network)
        by_part = {part.path: chosen.on(part.analysis.plan) for part in parts.found}
        network = replace(network, parts=parts, by_part=by_part)
    proven = attempt(PASSES, network)
    if proven is None:
        raise UsageError("its own class is not shown to be the same function at fewer slots")
    (comparison,) = proven.comparisons.values()
    if comparison.training:
        raise UsageError(f"in training mode {comparison.training}")
    if comparison.untried:
        raise UsageError(
            "whether it computes the same in training mode cannot be tried on its example "
            f"({comparison.untried})"
        )
    emptied = {name for name, tensor in proven.tensors.items() if not tensor.numel()}
    return Form(kept, proven.changes, proven.layers, proven.scales, emptied)


@dataclass(frozen=True)
class _Before:
    """State of a module beside its tensors; of its class the part that can be pickled."""

    module: nn.Module
    kind: type[nn.Module]
    gating: tuple[Any, ...]
    link: Link | None
    attributes: dict[str, Any]
    gained: tuple[str, ...]


class Cut:
    """A gated model that was cut in place, and what is needed to make it whole.

    Attributes:
        kept: the slots that are left, bool, flat.
        places: by a tensor's first name in the model, where it was cut.
        whole: by the same, what it was, on the CPU.
        gained: names of tensors that only the cut model has.
    """

    def __init__(self, model: nn.Module, form: Form) -> None:
        """Cut the model; all or nothing.

        Raises:
            UsageError: its tensors are not those that it was gated with, or the forward of a
                module that has to change was replaced on the module itself.
        """
        self._root, self._gates = holder(model)
        self.kept = form.kept
        self._first: dict[str, str] = {}  # of every name of a tensor that is cut
        self.places = self._found(form)
        self._check(form)
        tensors = self._tensors()
        self.whole = {n: t.detach().to("cpu", copy=True) for n, t in tensors.items()}
        self.gained = {
            within(path, name) for path, layer in form.layers.items() for name in layer.buffers
        }
        self._before: list[_Before] = []
        self._stopped: list[str] = []  # names of parameters
        try:
            self._resize(tensors)
            self._stop(tensors)
            self._reform(form)
            self._gates.cut_to(form.kept)
        except BaseException:
            self.undo()
            raise

    def _tensors(self) -> dict[str, Tensor]:
        """The model's tensors that are cut, by first name."""
        return {name: t for name, t in _stored(self._root) if name in self.places}

    def by_id(self) -> dict[int, Place]:
        """Places at which tensors are cut, by the ids that they keep throughout."""
        return {id(tensor): self.places[name] for name, tensor in self._tensors().items()}

    def _found(self, form: Form) -> dict[str, Place]:
        plan, kept = self._gates.plan, form.kept
        places: dict[str, Place] = {}
        first: dict[int, str] = {}
        for name, tensor in _stored(self._root):
            known = plan.aliases.get(name, name)
            dims = plan.tensors.get(known)
            if id(tensor) in first:
                self._first[name] = first[id(tensor)]
            elif known in form.emptied and tensor.numel():
                none = torch.empty(0, dtype=torch.long)
                places[name] = Place.of(tensor, (none,) * tensor.dim())
                first[id(tensor)] = self._first[name] = name
            elif dims is not None:
                if [dim.size for dim in dims] != list(tensor.shape):
                    raise UsageError(f"{name} has another shape than when the model was gated")
                masks = [plan.mask(dim, kept) for dim in dims]
                if not all(bool(mask.all()) for mask in masks):
                    left = tuple(None if m.all() else m.nonzero().flatten() for m in masks)
                    places[name] = Place.of(tensor, left)
                    first[id(tensor)] = self._first[name] = name
        return places

    def _check(self, form: Form) -> None:
        for path in _reclassed(form):
            if "forward" in vars(self._root.get_submodule(path)):
                raise UsageError(f"the forward of {path or 'the model'} is one of its own")

    @torch.no_grad()
    def _resize(self, tensors: Mapping[str, Tensor]) -> None:
        for name, place in self.places.items():
            tensor = tensors[name]
            grad = tensor.grad
            _put_data(tensor, place.cut(tensor.data), None if grad is None else place.cut(grad))

    def _stop(self, tensors: Mapping[str, Tensor]) -> None:
        """Let no gradient be waited for where nothing is left: replicas would, for ever."""
        for name, tensor in tensors.items():
            if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
                continue
            if not self.places[name].small.numel():
                tensor.requires_grad_(False)
                self._stopped.append(name)

    def _reform(self, form: Form) -> None:
        scales = _scales(self._root, form)
        changed = dict.fromkeys((*form.changes, *form.layers, *scales))
        for path in changed:
            module = self._root.get_submodule(path)
            attributes, layer = form.changes.get(path, {}), form.layers.get(path, Layer())
            attributes = {**attributes, **layer.attributes}
            gained = tuple(layer.buffers)
            self._before.append(
                _Before(
                    module,
                    original_class(module),
                    gating_of(module),
                    module.__dict__.get(LINK),
                    {name: vars(module).get(name, _MISSING) for name in attributes},
                    gained,
                )
            )
            own = original_class(module)
            if layer.kind or GIVEN in attributes:
                module.__class__ = own
                become(module, layer.kind or GivenSizes.__name__)
                own = type(module)
            if own is not SkippedModule:
                self._gate_again(module, own, scales.get(path, {}))
            for name, value in attributes.items():
                setattr(module, name, value)
            device = next((p.device for p in module.parameters()), None)
            for name, tensor in layer.buffers.items():
                module.register_buffer(name, tensor.to(device))

    def _gate_again(
        self, module: nn.Module, own: type[nn.Module], scales: Mapping[str, Scale]
    ) -> None:
        """Let it read its parameters as they are to be read, now that it is of this class."""
        link: Link | None = module.__dict__.get(LINK)
        link = link or Link(self._gates, {}, {})
        sites, lists = link.sites, link.lists
        quantized = () if link.quantizer is None else ("weight",)
        names = tuple(dict.fromkeys((*sites, *scales, *quantized)))
        if scales:
            module.__dict__[LINK] = replace(link, scales=dict(scales))
        module.__class__ = gated_class(own, names, tuple(lists), CHILD in module._modules)

    @torch.no_grad()
    def undo(self) -> None:
        """Make the model whole: what was cut off comes back as it was, its gates closed."""
        for before in reversed(self._before):
            _restore(before)
        self._before = []
        tensors = self._tensors()
        for name in self._stopped:
            tensors[name].requires_grad_()
        self._stopped = []
        for name, tensor in tensors.items():
            if tensor.shape != self.places[name].shape:
                whole, grad = self.in_whole(name, tensor.data), tensor.grad
                if grad is not None:
                    grad = _grad_of(self.places[name], grad)
                _put_data(tensor, whole, grad)
        self._gates.cut_to(None)

    @torch.no_grad()
    def in_whole(self, name: str, small: Tensor) -> Tensor:
        """A tensor of the model's, as it would be in the whole one; on the device of ``small``."""
        first = self._first.get(name)
        if first is None:
            return small
        return self.places[first].put(small, self.whole[first].to(small.device, small.dtype))

    def left(self, name: str, whole: Tensor) -> Tensor:
        """Rest of a tensor of the model's; itself, if it does not have the whole's shape."""
        first = self._first.get(name)
        if first is None or whole.shape != self.places[first].shape:
            return whole
        return self.places[first].cut(whole)

    def take(self, name: str, whole: Tensor) -> Tensor:
        """Cut a tensor that the model is to have; what is cut off is kept for its end."""
        left = self.left(name, whole)
        if left is not whole:
            self.whole[self._first[name]] = whole.detach().to("cpu", copy=True)
        return left


def _put_data(tensor: Tensor, data: Tensor, grad: Tensor | None) -> None:
    """Let a tensor be of another size.

    Whoever holds a loss holds the node that adds to the gradient, and that is made for one size.
    torch makes another where the dtype changes.
    """
    tensor.grad = None
    other = torch.float16 if tensor.dtype != torch.float16 else torch.float32
    tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = data
    tensor.grad = grad


def _grad_of(place: Place, small: Tensor) -> Tensor:
    """The gradient of a whole tensor, of which there is one of what is left."""
    if small.layout == torch.strided:
        return place.put(small)
    return place.put(small.to_dense()).to_sparse(small.sparse_dim())  # of an embedding


def _restore(before: _Before) -> None:
    module = before.module
    for name in before.gained:
        module._buffers.pop(name, None)
    for name, value in before.attributes.items():
        if value is _MISSING:
            module.__dict__.pop(name, None)
        else:
            setattr(module, name, value)
    module.__class__ = gated_class(before.kind, *before.gating)
    if before.link is None:
        module.__dict__.pop(LINK, None)
    else:
        module.__dict__[LINK] = before.link


def _reclassed(form: Form) -> Iterator[str]:
    """Paths of the modules that become of another class."""
    yield from (path for path, layer in form.layers.items() if layer.kind)
    yield from (path for path, attributes in form.changes.items() if GIVEN in attributes)


def _scales(root: nn.Module, form: Form) -> dict[str, dict[str, Scale]]:
    """Factors that parameters are read with, by path and name.

    Raises:
        UsageError: what would have to be scaled is no parameter.
    """
    found: dict[str, dict[str, Scale]] = {}
    for path, layer in form.layers.items():
        for name, _ in tensors_of(root.get_submodule(path)) if layer.scale != 1 else ():
            by = torch.tensor(layer.scale, dtype=torch.float64)
            found.setdefault(path, {})[name] = Scale(by, layer.offset)
    for tensor, by in form.scales.items():
        path, _, name = tensor.rpartition(".")
        found.setdefault(path, {})[name] = Scale(by)
    for path, scales in found.items():
        for name in scales:
            if name not in root.get_submodule(path)._parameters:
                raise UsageError(f"{within(path, name)} is no parameter, and would be scaled")
    return found


def _stored(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the model's modules hold, but for its gates."""
    for path, module in root.named_modules(remove_duplicate=False):
        if not isinstance(module, Gates):
            for leaf, tensor in tensors_of(module):
                yield within(path, leaf), tensor
