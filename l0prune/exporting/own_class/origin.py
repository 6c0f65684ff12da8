"""Search for code or a configuration that builds a smaller model's class; each is tried."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from l0prune import __version__
from l0prune.capture.configurations import (
    Configured,
    Dim,
    Field,
    changed,
    class_of_transformers,
    configuration_of,
    numbers_in,
)
from l0prune.capture.sizes import Inputs
from l0prune.errors import CertificateError, L0pruneError, first_line
from l0prune.exporting.certify.answers import output_of
from l0prune.exporting.certify.certificate import TOLERANCE
from l0prune.exporting.certify.difference import difference
from l0prune.exporting.certify.dtypes import lent
from l0prune.files.checked_json import sealed
from l0prune.files.cut_layers import tensors_held
from l0prune.files.manifest import (
    FORMAT,
    Manifest,
    Origin,
    Sizes,
    built,
    parsed,
)
from l0prune.files.smaller_model import put_on
from l0prune.files.user_code import is_rebuildable, torchvision_model
from l0prune.running.device import device_of

Trials = Sequence[tuple[str, Inputs]]  # a submodule's path and its inputs
Values = dict[Field, int]

_TRIES = 16  # ways to share a dim among two numbers
_NO_PLACE = "for which a configuration of transformers has no place"


def fault_of(
    loaded: nn.Module,
    module: nn.Module,
    trials: Trials,
    renamed: Callable[[str], str] = lambda name: name,
) -> str:
    """Return the first difference of a loaded model from ``module``, as a clause; empty if none.

    Both run on ``trials`` in float32, by paths in ``module``; ``renamed`` maps a name of ``module``
    to the one in ``loaded``, empty for removed modules.
    """
    loaded.to(device_of(module))
    numbers = _numbers_in(loaded)
    for old, value in _numbers_in(module).items():
        if not (name := renamed(old)):
            continue
        other = numbers.get(name)
        if other is None or abs(other - value) > 1e-9 * abs(value):
            return f"{name} would be {other}, not {value}"
    for path, inputs in trials:
        try:
            expected, found = (
                output_of(lent(each.eval(), torch.float32).get_submodule(at), inputs, torch.float32)
                for each, at in ((module, path), (loaded, renamed(path)))
            )
        except (AttributeError, CertificateError) as error:
            return f"it would not run: {first_line(error)}"
        if not difference(expected, found) <= TOLERANCE["float32"]:
            return "it would compute something else"
    return ""


def _numbers_in(model: nn.Module) -> dict[str, float]:
    """Return float attributes by name (ε of a norm, a scale), which outputs hardly depend on."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is float
    }


def described(
    module: nn.Module, facts: Mapping[str, Any], trials: Trials, spec: str = ""
) -> Manifest:
    """Return the manifest of a module, with its origin if it is of the user's class.

    Each possible origin is tried: it counts if the model that it builds, at the new sizes, equals
    the module. ``spec`` is the user's statement of the origin, as for ``load_model``.
    """
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    versions = {"l0prune": __version__, "torch": torch.__version__}
    content = {"version": FORMAT, "versions": versions, "origin": {"kind": kind}, **facts}
    manifest = parsed(json.dumps(sealed(content)), "the manifest")
    return _with_origin(manifest, module, spec, trials) if manifest.rebuild.verified else manifest


def _configuration(module: nn.Module) -> dict[str, Any] | None:
    """Return the configuration of a model of transformers, as JSON data; None for others."""
    config: Any = getattr(module, "config", None)
    if not class_of_transformers(type(module)) or not hasattr(config, "to_json_string"):
        return None
    return configuration_of(module)


def _with_origin(manifest: Manifest, module: nn.Module, spec: str, trials: Trials) -> Manifest:
    """Add the model's origin to the manifest, if a known one builds a model like the module."""
    for origin in _origins(manifest, module, spec):
        try:
            fresh = _built(origin, manifest)
        except L0pruneError:
            continue
        tried = _with_constants(manifest.model_copy(update={"origin": origin}), module, fresh)
        tensors = tensors_of(tried, module)
        try:
            put_on(fresh, tried, tensors, "the model")
        except L0pruneError:
            continue
        if not fault_of(fresh, module, trials):
            return tried
    return manifest


def _built(origin: Origin, manifest: Manifest) -> nn.Module:
    """Build a model that gets the manifest's tensors: one of transformers without values of them.

    Raises:
        L0pruneError: the origin builds no model.
    """
    if origin.transformers and not manifest.dropped:
        with suppress(L0pruneError), _ParametersWithoutValues():
            made = built(origin, "the model")
            others = tensors_held(made).keys() - manifest.shapes.keys()
            if not any(tensors_held(made)[name].is_meta for name in others):
                return made
    return built(origin, "the model", trust=True)


def tensors_of(manifest: Manifest, module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors for a file of the module: state_dict and constants, by name."""
    state = {n: t for n, t in module.state_dict().items() if isinstance(t, Tensor)}
    return {**state, **apart_from_state(manifest, module)}


def apart_from_state(manifest: Manifest, module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors for a file that are not in the state_dict, by name."""
    held = tensors_held(module) if manifest.constants else {}
    return {name: held[name].detach() for name in manifest.constants if name in held}


def _origins(manifest: Manifest, module: nn.Module, spec: str) -> Iterator[Origin]:
    kind = manifest.origin.kind
    config = _configuration(module)
    if config is not None:
        yield Origin(kind=kind, transformers=type(module).__name__, config=config)
    if is_rebuildable(spec) and not spec.startswith("transformers:"):
        yield Origin(kind=kind, spec=spec)
    package = kind.partition(".")[0]
    if package == "timm":
        known = getattr(module, "pretrained_cfg", None) or {}
        if known.get("architecture"):
            yield Origin(kind=kind, spec=f"timm:{known['architecture']}")
    if package == "torchvision":
        for name in _of_torchvision(manifest, module):
            yield Origin(kind=kind, spec=f"torchvision:{name}")


def _of_torchvision(manifest: Manifest, module: nn.Module) -> Iterator[str]:
    """Yield names of torchvision models of this class with the manifest's old shapes."""
    from torchvision import models

    kind, shapes = type(module), {name: sizes.old for name, sizes in manifest.shapes.items()}
    for name in models.list_models():
        file = sys.modules[models.get_model_builder(name).__module__]
        if getattr(file, kind.__name__, None) is not kind:
            continue
        made = _without_values(name)
        if type(made) is kind and shapes == {n: [*t.shape] for n, t in made.state_dict().items()}:
            yield name


def _without_values(name: str) -> nn.Module:
    """Build a network of torchvision with parameters on the meta device."""
    try:
        with torch.device("meta"):
            return torchvision_model(name)
    except NotImplementedError:  # its builder reads tensors that it has computed
        with _ParametersWithoutValues():
            return torchvision_model(name)


class _ParametersWithoutValues(TorchFunctionMode):
    """Creates parameters on the meta device, and computes with tensors of values as always."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        return func(*args, **({**given, "device": "meta"} if func is torch.empty else given))


def _with_constants(manifest: Manifest, module: nn.Module, fresh: nn.Module) -> Manifest:
    """Add to the manifest the tensors outside of state_dict whose values differ from ``fresh``."""
    first, constants = tensors_held(fresh), dict(manifest.constants)
    for name, tensor in tensors_held(module).items():
        known = name in manifest.shapes or name in constants or name in manifest.dropped
        if known or name not in first:
            continue
        other = first[name]
        is_same = other.dtype == tensor.dtype and torch.equal(other, tensor.detach().cpu())
        if tensor.shape == other.shape and not tensor.is_meta and not is_same:
            constants[name] = Sizes(old=list(other.shape), new=list(tensor.shape))
    return manifest.model_copy(update={"constants": constants})


def configurations(module: nn.Module, manifest: Manifest) -> tuple[list[dict[str, Any]], str]:
    """Return configurations that give the class its new shapes, likeliest first, or why none does.

    A dim follows a number of the configuration if it doubles in a model that is built, without
    values, with that number doubled.
    """
    if manifest.layers:
        path, kind = next(iter(manifest.layers.items()))
        return [], f"{path} has become a {kind}, which is no layer of transformers"
    if manifest.dropped:
        return [], f"{next(iter(manifest.dropped))} is gone, and a model of transformers has it"
    cut = {name for name, each in manifest.constants.items() if each.old != each.new}
    if cut:
        return [], f"{min(cut)}, which its code makes anew, is cut"
    origin = manifest.origin
    kind = getattr(importlib.import_module("transformers"), origin.transformers)
    given = Configured(kind, origin.config or {})
    found = list(_candidates(_Config(given, manifest), module))
    found = found or list(_candidates(_Config(given.with_numbers(), manifest), module))
    return found, "" if found else _why_not(manifest)


class _Config(Configured):
    """A configuration, and the dims that follow from its numbers."""

    def __init__(self, configured: Configured, manifest: Manifest) -> None:
        super().__init__(configured.kind, configured.data)
        self.old = {(n, d): v for n, s in manifest.shapes.items() for d, v in enumerate(s.old)}
        self.new = {(n, d): v for n, s in manifest.shapes.items() for d, v in enumerate(s.new)}
        cut = {self.old[dim] for dim in self.old if self.old[dim] != self.new[dim]}
        self.fields = {
            field: value
            for field, value in numbers_in(self.data)
            if any(size % value == 0 for size in cut)
        }
        self.follows = self.following(self.fields)


def _candidates(config: _Config, module: nn.Module) -> Iterator[dict[str, Any]]:
    small = _small_numbers(config, module)
    hints = _hints(config, module)
    for values in _solutions(config, config.old, hints, {}):
        if config.sizes(values) == config.new:
            yield changed(config.data, {**values, **small})
    if hasattr(config.kind.config_class, "per_layer_config"):
        yield from _by_layer(config, hints, small)


def _by_layer(
    config: _Config, hints: Mapping[str, int], small: Mapping[Field, float]
) -> Iterator[dict[str, Any]]:
    """Yield a configuration with per-layer numbers (``per_layer_config``), if all layers fit."""
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
    values_by_layer = {**common, **small, ("per_layer_config",): special}
    if config.sizes(values_by_layer) == config.new:
        yield changed(config.data, values_by_layer)


def _solutions(
    config: _Config, dims: Collection[Dim], hints: Mapping[str, int], known: Values
) -> Iterator[Values]:
    """Yield values of the configuration's numbers that give these dims their new sizes.

    Of two numbers whose product is a dim, one takes its hint or its old value; the other follows.
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
    """Add the numbers that follow from those that are known; None for a contradiction."""
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
    """Return, by number name, the value of the modules' attributes of that name, if all agree."""
    found: dict[str, set[int]] = {}
    for each in module.modules():
        for name, value in vars(each).items():
            if type(value) is int:
                found.setdefault(name, set()).add(value)
    names = {field[-1] for field in config.fields}
    return {name: min(of) for name, of in found.items() if len(of) == 1 and name in names}


def _small_numbers(config: _Config, module: nn.Module) -> dict[Field, float]:
    """Return the norms' new ε if all share one, by its configuration field; else empty."""
    values = {
        value
        for each in module.modules()
        for name, value in vars(each).items()
        if isinstance(value, float) and "eps" in name
    }
    names = [f for f in config.data if "eps" in f and isinstance(config.data[f], float)]
    return {(names[0],): values.pop()} if len(values) == len(names) == 1 else {}


def _why_not(manifest: Manifest) -> str:
    """Return why no configuration fits: layers that differ, or else the first changed shape."""
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
    for name, sizes in manifest.shapes.items():
        if sizes.new != sizes.old:
            is_now, was = ("×".join(map(str, shape)) for shape in (sizes.new, sizes.old))
            return f"{name} is {is_now} where it was {was}, {_NO_PLACE}"
    return f"it has sizes {_NO_PLACE}"
