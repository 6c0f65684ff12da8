"""The new sizes as a configuration of transformers, where one can say them.

Which numbers of a configuration a dim follows is tried: the model is built without values, with
one number doubled, and the dims are looked at that become twice as large.

A model of transformers whose layers are gone as wholes, built with as many as are left.

In the exported module a layer of which nothing is left hands on what it is given. Built by a
configuration that says fewer layers it is not there at all, and transformers loads it by itself.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from l0prune.errors import L0pruneError
from l0prune.exporting.own_class.origin import Trials, fault_of, tensors_of
from l0prune.exporting.own_class.sizes import Changes, joined
from l0prune.exporting.own_class.skipped_modules import numbers_of, renumbered
from l0prune.files.cut_layers import SkippedModule
from l0prune.files.manifest import Manifest, Origin, built
from l0prune.files.smaller_model import put_on

Field = tuple[str, ...]  # the keys that lead to a number of the configuration
Dim = tuple[str, int]  # name of a tensor, and which of its dims
Values = dict[Field, int]

_TRIES = 16  # ways to share a dim among two numbers
_NO_PLACE = "for which a configuration of transformers has no place"


def configurations(module: nn.Module, manifest: Manifest) -> tuple[list[dict[str, Any]], str]:
    """Configurations by which the class has the new shapes, the likeliest first; or why not.

    Args:
        module: at its new sizes.
        manifest: of it; a class of transformers is its origin.
    """
    if manifest.layers:
        path, kind = next(iter(manifest.layers.items()))
        return [], f"{path} has become a {kind}, which is no layer of transformers"
    if manifest.dropped:
        return [], f"{manifest.dropped[0]} is gone, and a model of transformers has it"
    cut = {name for name, each in manifest.constants.items() if each.old != each.new}
    if cut:
        return [], f"{min(cut)}, which its code makes anew, is cut"
    found = list(_candidates(_Config(manifest), module, manifest))
    return found, "" if found else _why_not(manifest)


class _Config:
    """The configuration, and what follows from its numbers."""

    def __init__(self, manifest: Manifest) -> None:
        origin = manifest.origin
        assert origin.config is not None
        self.origin, self.data = origin, origin.config
        self.old = {(n, d): v for n, s in manifest.shapes.items() for d, v in enumerate(s.old)}
        self.new = {(n, d): v for n, s in manifest.shapes.items() for d, v in enumerate(s.new)}
        cut = {self.old[dim] for dim in self.old if self.old[dim] != self.new[dim]}
        self.fields = {
            field: value
            for field, value in numbers_in(self.data)
            if any(size % value == 0 for size in cut)
        }
        self.follows: dict[Dim, list[Field]] = {}
        for field, value in self.fields.items():
            sizes = self.sizes({field: 2 * value}) or {}
            for dim, size in self.old.items():
                if sizes.get(dim) == 2 * size:
                    self.follows.setdefault(dim, []).append(field)

    def changed(self, values: Mapping[Field, Any]) -> dict[str, Any]:
        """The configuration with these values."""
        return changed(self.data, values)

    def sizes(self, values: Mapping[Field, Any]) -> dict[Dim, int] | None:
        """What the class makes of these values; None where it cannot be built so."""
        return _sizes(self.origin, self.changed(values))


def changed(data: Mapping[str, Any], values: Mapping[Field, Any]) -> dict[str, Any]:
    """A configuration with these values."""
    result = copy.deepcopy(dict(data))
    for field, value in values.items():
        place = result
        for key in field[:-1]:
            place = place[key]
        place[field[-1]] = value
    return result


def numbers_in(data: Mapping[str, Any], path: Field = ()) -> Iterator[tuple[Field, int]]:
    """The whole numbers of a configuration that may be sizes, and the keys that lead to them."""
    for key, value in data.items():
        if isinstance(value, dict):
            yield from numbers_in(value, (*path, key))
        elif type(value) is int and value > 0:
            yield (*path, key), value


def _sizes(origin: Origin, config: dict[str, Any]) -> dict[Dim, int] | None:
    try:
        with torch.device("meta"):
            model = built(origin.model_copy(update={"config": config}), "the model")
    except L0pruneError:
        return None
    state = model.state_dict()
    return {(n, d): v for n, t in state.items() for d, v in enumerate(t.shape)}


def _candidates(config: _Config, module: nn.Module, manifest: Manifest) -> Iterator[dict[str, Any]]:
    small = _small_numbers(config, module)
    hints = _hints(config, module)
    for values in _solutions(config, config.old, hints, {}):
        if config.sizes(values) == config.new:
            yield config.changed({**values, **small})
    if hasattr(_config_class(manifest.origin), "per_layer_config"):
        yield from _by_layer(config, hints, small)


def _config_class(origin: Origin) -> Any:
    return getattr(importlib.import_module("transformers"), origin.transformers).config_class


def _by_layer(
    config: _Config, hints: Mapping[str, int], small: Mapping[Field, float]
) -> Iterator[dict[str, Any]]:
    """One configuration for each layer, where the class of the model takes such."""
    layers: dict[str, list[Dim]] = {}
    for dim in config.old:
        match = re.match(r"(?:.*?\.)??(\d+)\.", dim[0])
        layers.setdefault(match[1] if match else "", []).append(dim)
    common = next(_solutions(config, layers.pop("", []), hints, {}), None)
    if common is None:
        return
    special: dict[str, dict[str, int]] = {}
    for number, dims in layers.items():
        values = next(_solutions(config, dims, hints, common), None)
        if values is None or any(len(field) > 1 for field in values.keys() - common.keys()):
            return
        own = {f[0]: value for f, value in values.items() if common.get(f) != value}
        own = {name: value for name, value in own.items() if config.fields[name,] != value}
        special |= {number: own} if own else {}
    whole = config.changed({**common, **small, ("per_layer_config",): special})
    if _sizes(config.origin, whole) == config.new:
        yield whole


def _solutions(
    config: _Config, dims: Collection[Dim], hints: Mapping[str, int], known: Values
) -> Iterator[Values]:
    """Values of the numbers such that these dims have their new sizes.

    Where two numbers share a dim, one is what the modules say, or stays, and the other follows.
    """
    waiting: list[Values] = [dict(known)]
    for _ in range(_TRIES):
        if not waiting:
            return
        values = _followed(config, dims, waiting.pop(0))
        if values is None:
            continue
        open_ = [f for dim in dims for f in config.follows.get(dim, ()) if f not in values]
        if not open_:
            yield values
            continue
        for field in dict.fromkeys(sorted(open_, key=lambda f: f[-1] not in hints)):
            whole = config.fields[field]
            for guess in dict.fromkeys((hints.get(field[-1], whole), whole)):
                waiting.append({**values, field: guess})


def _followed(config: _Config, dims: Collection[Dim], values: Values) -> Values | None:
    """With the numbers that follow from those that are known; None for a contradiction."""
    values = dict(values)
    while True:
        before = len(values)
        for dim in dims:
            fields = config.follows.get(dim, [])
            new, old = config.new[dim], config.old[dim]
            for field in fields:
                if field in values:
                    new, old = new * config.fields[field], old * values[field]
            unknown = [field for field in fields if field not in values]
            if (not unknown and new != old) or not old:
                return None
            if len(unknown) == 1:
                value, rest = divmod(config.fields[unknown[0]] * new, old)
                if rest or not value:
                    return None
                values[unknown[0]] = value
        if len(values) == before:
            return values


def _hints(config: _Config, module: nn.Module) -> dict[str, int]:
    """By the name of a number, what modules that bear it have, where they agree."""
    found: dict[str, set[int]] = {}
    for each in module.modules():
        for name, value in vars(each).items():
            if type(value) is int:
                found.setdefault(name, set()).add(value)
    names = {field[-1] for field in config.fields}
    return {name: min(of) for name, of in found.items() if len(of) == 1 and name in names}


def _small_numbers(config: _Config, module: nn.Module) -> dict[Field, float]:
    """ε of the norms: a cut one has its own, and a configuration one for all."""
    values = {
        value
        for each in module.modules()
        for name, value in vars(each).items()
        if isinstance(value, float) and "eps" in name
    }
    names = [f for f in config.data if "eps" in f and isinstance(config.data[f], float)]
    return {(names[0],): values.pop()} if len(values) == len(names) == 1 else {}


def _why_not(manifest: Manifest) -> str:
    """Where like tensors of the layers differ, that; else that no number says it."""
    alike: dict[str, dict[str, list[int]]] = {}
    for name, sizes in manifest.shapes.items():
        alike.setdefault(re.sub(r"\.\d+\.", ".*.", name), {})[name] = sizes.new
    for pattern, by_name in alike.items():
        first, *others = by_name.items()
        for name, shape in others:
            old = manifest.shapes
            if shape != first[1] and old[name].old == old[first[0]].old:
                return (
                    f"{pattern} is {'×'.join(map(str, first[1]))} in one layer and "
                    f"{'×'.join(map(str, shape))} in another, {_NO_PLACE}"
                )
    return f"it has sizes {_NO_PLACE}"


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
                if not (isinstance(layer, SkippedModule) and layer.gives == "input")
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
    passed = [path for path, kind in manifest.layers.items() if kind == SkippedModule.__name__]
    return joined({path: of for path, of in others.items() if of}, renumbered(fresh, passed))
