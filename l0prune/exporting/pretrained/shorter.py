"""A model of transformers whose layers are gone as wholes, built with as many as are left.

In the exported module a layer of which nothing is left hands on what it is given. Built by a
configuration that says fewer layers it is not there at all, and transformers loads it by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from l0prune.errors import L0pruneError
from l0prune.exporting.own_class.numbering import numbers_of, renumbered
from l0prune.exporting.own_class.resizing import Changes, joined
from l0prune.exporting.pretrained.in_config import changed, numbers_in
from l0prune.exporting.pretrained.origin import tensors_of
from l0prune.exporting.pretrained.trial import Trials, fault_of
from l0prune.files.pretrained.cut_layers import PassedBy
from l0prune.files.pretrained.manifest import Manifest, Origin
from l0prune.files.pretrained.origin import built
from l0prune.files.pretrained.resizing import put_on

Value = TypeVar("Value")
Renamed = Callable[[str], str]  # what a name becomes; empty for what is gone


def shortened(
    module: nn.Module, manifest: Manifest, trials: Trials
) -> tuple[nn.Module, Manifest, Trials]:
    """The model without the layers that hand on their input; as it is where none can go.

    Args:
        module: at its new sizes.
        manifest: of it.
        trials: inputs on which both have to be the same.
    """
    for path, count, left in _lists(module) if manifest.origin.transformers else ():
        renamed = _renaming(path, left)
        tensors = _renamed(tensors_of(manifest, module), renamed)
        for config in _configurations(manifest.origin.config or {}, count, left):
            origin = manifest.origin.model_copy(update={"config": config})
            found = _made(_shorter(manifest, origin, renamed), tensors)
            if found is None or fault_of(found[0], module, trials, renamed):
                continue
            if hasattr(module, "generation_config"):
                found[0].generation_config = module.generation_config
            others = [(new, given) for at, given in trials if (new := renamed(at)) or not at]
            return shortened(*found, others)
    return module, manifest, trials


def _lists(module: nn.Module) -> Iterator[tuple[str, int, list[int]]]:
    """By path of a list, how many layers it has, and the numbers of those that do something."""
    for path, layers in module.named_modules():
        if isinstance(layers, nn.ModuleList):
            left = [
                number
                for number, layer in enumerate(layers)
                if not (isinstance(layer, PassedBy) and layer.gives == "input")
            ]
            if 0 < len(left) < len(layers):
                yield path, len(layers), left


def _renaming(path: str, left: list[int]) -> Renamed:
    numbers = {str(old): str(new) for new, old in enumerate(left)}
    start = f"{path}."

    def renamed(name: str) -> str:
        if not name.startswith(start):
            return name
        number, dot, rest = name.removeprefix(start).partition(".")
        return f"{start}{numbers[number]}{dot}{rest}" if number in numbers else ""

    return renamed


def _configurations(config: Mapping[str, Any], whole: int, left: list[int]) -> Iterator[Any]:
    """Configurations with fewer layers: one number that may be theirs, and lists of as many."""

    def shorter(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: shorter(each) for name, each in value.items()}
        if isinstance(value, list) and len(value) == whole:
            return [value[number] for number in left]
        return value

    fields = [field for field, value in numbers_in(config) if value == whole]
    # those that are called like layers first
    for field in sorted(fields, key=lambda field: not re.search(r"layer|depth|block", field[-1])):
        yield changed(shorter(config), {field: len(left)})


def _renamed(named: Mapping[str, Value], renamed: Renamed) -> dict[str, Value]:
    return {new: value for name, value in named.items() if (new := renamed(name))}


def _shorter(manifest: Manifest, origin: Origin, renamed: Renamed) -> Manifest:
    changed = {
        name: _renamed(getattr(manifest, name), renamed)
        for name in ("shapes", "constants", "attributes", "layers")
    }
    dropped = [new for name in manifest.dropped if (new := renamed(name))]
    return manifest.model_copy(update={"origin": origin, "dropped": dropped, **changed})


def _made(manifest: Manifest, tensors: Mapping[str, Tensor]) -> tuple[nn.Module, Manifest] | None:
    """What its configuration builds, with these tensors; None if they do not fit."""
    try:
        with torch.device("meta"):  # most configurations that are tried build something else
            sizes = {n: list(t.shape) for n, t in built(manifest.origin, "").state_dict().items()}
        if sizes != {name: shape.old for name, shape in manifest.shapes.items()}:
            return None
        made = built(manifest.origin, "the model").eval()
        manifest = manifest.model_copy(update={"attributes": _attributes(made, manifest)})
        put_on(made, manifest, tensors, "the model")
    except L0pruneError:
        return None
    return made, manifest


def _attributes(fresh: nn.Module, manifest: Manifest) -> Changes:
    """What changes in a fresh model: the numbers of its layers are counted anew."""
    numbers = numbers_of(fresh)
    others = {
        path: {name: value for name, value in of.items() if (path, name) not in numbers}
        for path, of in manifest.attributes.items()
    }
    passed = [path for path, kind in manifest.layers.items() if kind == PassedBy.__name__]
    return joined({path: of for path, of in others.items() if of}, renumbered(fresh, passed))
