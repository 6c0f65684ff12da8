"""Reversible in-place cut of a gated model to fewer slots during training.

Nothing is folded: the gates of the remaining slots still multiply the same tensors, so that the
next step of any optimizer equals that of the whole model with the other gates closed. Parameters
and buffers stay the same objects; the values cut off are stored unchanged.
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
from l0prune.files.cut_layers import SKIPPED, become, tensors_of
from l0prune.files.given_sizes import GIVEN, GivenSizes
from l0prune.gating.attaching import holder
from l0prune.gating.bank import Gates
from l0prune.gating.gated_class import CHILD, gated_class, gating_of, original_class
from l0prune.gating.link import Link, Scale
from l0prune.gating.multiplying import LINK
from l0prune.infer.parts import Parts

PASSES = (check_class_alone, slice_by_plan, resize_class, drop_branches, verify_class)
# Several examples, also in training mode, and one; few, since training waits for each forward.
_BATCHES = (2, 1)
_MISSING = object()


@dataclass(frozen=True)
class Form:
    """Changes that cut a gated model's own class to fewer slots, found by the passes of an export.

    Attributes:
        kept: the slots that stay, bool, shape ``(plan.size,)``.
        changes: attributes that follow the sizes.
        layers: changes of modules that need more than that, by path.
        scales: factors of parameters beside their gates, by name.
        emptied: tensors left without elements, since only removed branches need them.
    """

    kept: Tensor
    changes: Changes
    layers: Mapping[str, Layer]
    scales: Mapping[str, Tensor]
    emptied: Set[str] = frozenset()


class Graph:
    """Cache of a gated model's graph, captured on first use: training does not change it."""

    def __init__(self) -> None:
        self._parts: Parts | None = None

    def of(self, network: Network) -> Parts:
        """Return the captured model, without its weights to save memory.

        Raises:
            L0pruneError: it can no longer be captured.
        """
        if self._parts is None:
            # the removed nodes of a graph do not depend on the batch
            self._parts = surveyed(network, frees_batch=False)
            for part in self._parts.found:
                part.analysis.captured.program.state_dict.clear()
        return self._parts


def smaller_form(model: nn.Module, kept: Tensor, graph: Graph) -> Form:
    """Find the form that cuts an uncut gated model to the ``kept`` slots; all others are closed.

    Args:
        model: gated; it is not changed.
        kept: as ``plan.kept`` returns it, bool, flat.
        graph: of the model, to find the modules to skip for removed branches.

    Raises:
        UsageError: its own class is not shown to compute and to train the same at these sizes.
        L0pruneError: the model cannot be copied, or captured.
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
    """State of a module before the cut, without tensors; its class as picklable parts."""

    module: nn.Module
    kind: type[nn.Module]
    gating: tuple[Any, ...]
    link: Link | None
    attributes: dict[str, Any]
    gained: tuple[str, ...]


class Cut:
    """Cut of a gated model in place, with all that ``undo`` needs.

    Attributes:
        kept: the slots that stay, bool, flat.
        places: remaining positions of each cut tensor, by its first name in the model.
        whole: uncut values of these tensors, on the CPU, by the same names.
        gained: names of tensors that only the cut model has.
    """

    def __init__(self, model: nn.Module, form: Form) -> None:
        """Cut the model; on any error it is restored.

        Raises:
            UsageError: its tensors have other shapes than when it was gated, or a module that has
                to change has a ``forward`` set on the instance.
        """
        self._root, self._gates = holder(model)
        self.kept = form.kept
        self._first: dict[str, str] = {}  # first name by every name of a cut tensor
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
        """Return the tensors to cut, or cut, by first name."""
        return {name: t for name, t in _stored(self._root) if name in self.places}

    def by_id(self) -> dict[int, Place]:
        """Return the places of the cut tensors by ``id``, which a cut does not change."""
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
        """Turn off ``requires_grad`` of empty parameters: DDP would wait for their gradients."""
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
            if own not in SKIPPED:
                self._gate_again(module, own, scales.get(path, {}))
            for name, value in attributes.items():
                setattr(module, name, value)
            device = next((p.device for p in module.parameters()), None)
            for name, tensor in layer.buffers.items():
                module.register_buffer(name, tensor.to(device))

    def _gate_again(
        self, module: nn.Module, own: type[nn.Module], scales: Mapping[str, Scale]
    ) -> None:
        """Gate a module again that has become of class ``own``, with scales for its parameters."""
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
        """Make the model whole: restore all that was cut off, with its gates closed."""
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
        """Return a model tensor's values at the whole shape, on the device of ``small``."""
        first = self._first.get(name)
        if first is None:
            return small
        return self.places[first].put(small, self.whole[first].to(small.device, small.dtype))

    def left(self, name: str, whole: Tensor) -> Tensor:
        """Return a model tensor's remaining part; ``whole`` itself if not of the whole shape."""
        first = self._first.get(name)
        if first is None or whole.shape != self.places[first].shape:
            return whole
        return self.places[first].cut(whole)

    def take(self, name: str, whole: Tensor) -> Tensor:
        """Cut a new value for a model tensor; the whole is stored for ``undo``."""
        left = self.left(name, whole)
        if left is not whole:
            self.whole[self._first[name]] = whole.detach().to("cpu", copy=True)
        return left


def _put_data(tensor: Tensor, data: Tensor, grad: Tensor | None) -> None:
    """Replace a tensor's data by data of another size, and its gradient.

    A live loss holds the tensor's AccumulateGrad node, which is made for one size; torch makes a
    new node if the dtype changes, so an empty tensor of another dtype is set in between.
    """
    tensor.grad = None
    other = torch.float16 if tensor.dtype != torch.float16 else torch.float32
    tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = data
    tensor.grad = grad


def _grad_of(place: Place, small: Tensor) -> Tensor:
    """Return the gradient at the whole shape from that of the cut tensor, zero elsewhere."""
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
    """Yield the paths of modules whose class changes."""
    yield from (path for path, layer in form.layers.items() if layer.kind)
    yield from (path for path, attributes in form.changes.items() if GIVEN in attributes)


def _scales(root: nn.Module, form: Form) -> dict[str, dict[str, Scale]]:
    """Return the factors applied when parameters are read, by path and name.

    Raises:
        UsageError: a tensor that would have to be scaled is no parameter.
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
    """Yield all tensors that the model's modules hold, by name, except those of its gates."""
    for path, module in root.named_modules(remove_duplicate=False):
        if not isinstance(module, Gates):
            for leaf, tensor in tensors_of(module):
                yield within(path, leaf), tensor
