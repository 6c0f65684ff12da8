"""What builds the class of an exported model: found, tried, and shown to make the same model.

Is a model that was loaded the one that was saved?
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from l0prune import __version__
from l0prune.capture.sizes import Inputs
from l0prune.errors import CertificateError, L0pruneError
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
    class_of_transformers,
    parsed,
)
from l0prune.files.smaller_model import put_on
from l0prune.files.user_code import is_rebuildable

Trials = Sequence[tuple[str, Inputs]]  # a submodule's path, and what it is given


def fault_of(
    loaded: nn.Module,
    module: nn.Module,
    trials: Trials,
    renamed: Callable[[str], str] = lambda name: name,
) -> str:
    """What of it is not the same; empty if nothing is.

    Args:
        loaded: on the CPU.
        module: what it should be.
        trials: what both are given, in float32; by paths in ``module``.
        renamed: what a name in ``module`` is in ``loaded``; empty for what is gone.
    """
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
            return f"it would not run: {next(iter(str(error).splitlines()), '')}"
        if not difference(expected, found) <= TOLERANCE["float32"]:
            return "it would compute something else"
    return ""


def _numbers_in(model: nn.Module) -> dict[str, float]:
    """The settings that are no sizes: ε of a norm, a scale. An output may hardly show them."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is float
    }


def described(
    module: nn.Module, facts: Mapping[str, Any], trials: Trials, spec: str = ""
) -> Manifest:
    """The manifest of a module: with what builds it, where it is of its own class.

    Each way is tried: it counts if the model that it builds, at the new sizes, is the module.

    Args:
        module: at its new sizes.
        facts: shapes, attributes and layers, as ``own_class.manifest`` gives them, and more.
        trials: inputs to compare on.
        spec: of ``load_model``, by which the user says that it was built; empty for none.
    """
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    versions = {"l0prune": __version__, "torch": torch.__version__}
    content = {"version": FORMAT, "versions": versions, "origin": {"kind": kind}, **facts}
    manifest = parsed(json.dumps(sealed(content)), "the manifest")
    return _with_origin(manifest, module, spec, trials) if manifest.rebuild.verified else manifest


def _configuration(module: nn.Module) -> dict[str, Any] | None:
    """That of a model of transformers, as JSON data; None for others."""
    config: Any = getattr(module, "config", None)
    if not class_of_transformers(type(module)) or not hasattr(config, "to_json_string"):
        return None
    data: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return data


def _with_origin(manifest: Manifest, module: nn.Module, spec: str, trials: Trials) -> Manifest:
    """The manifest, with what builds the model if anything but the user's own code does."""
    for origin in _candidates(manifest, module, spec):
        try:
            fresh = built(origin, "the model", trust=True)
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


def tensors_of(manifest: Manifest, module: nn.Module) -> dict[str, Tensor]:
    """What a file of the module has to hold."""
    state = {n: t for n, t in module.state_dict().items() if isinstance(t, Tensor)}
    return {**state, **apart_from_state(manifest, module)}


def apart_from_state(manifest: Manifest, module: nn.Module) -> dict[str, Tensor]:
    """What of that is in no state_dict."""
    held = tensors_held(module) if manifest.constants else {}
    return {name: held[name].detach() for name in manifest.constants if name in held}


def _candidates(manifest: Manifest, module: nn.Module, spec: str) -> Iterator[Origin]:
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
    """Networks that torchvision builds in the file of this class, of these old sizes."""
    from torchvision import models

    for name in models.list_models():
        builder = models.get_model_builder(name)
        if builder.__module__ == type(module).__module__:
            with torch.device("meta"):
                state = builder(weights=None).state_dict()
            if {n: list(t.shape) for n, t in state.items()} == {
                n: sizes.old for n, sizes in manifest.shapes.items()
            }:
                yield name


def _with_constants(manifest: Manifest, module: nn.Module, fresh: nn.Module) -> Manifest:
    """The manifest, with the tensors that the code does not make as the module has them."""
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
