"""Folder of a smaller model: tensors, manifest, transformers' configuration, loading code."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from l0prune.capture.compat import attention_of, auto_classes
from l0prune.capture.configurations import changed, numbers_in, quietly
from l0prune.doors import Registry
from l0prune.errors import L0pruneError, in_a_line
from l0prune.exporting.own_class.origin import (
    Trials,
    configurations,
    fault_of,
    tensors_of,
)
from l0prune.exporting.own_class.sizes import Changes, joined
from l0prune.exporting.own_class.skipped_modules import numbers_of, renumbered
from l0prune.files import cut_layers, given_sizes
from l0prune.files.atomic import PathLike, replaced_folder
from l0prune.files.beside_weights import bring_along
from l0prune.files.cut_layers import LAYERS, SKIPPED
from l0prune.files.manifest import GENERATION, Manifest, Origin, built
from l0prune.files.smaller_model import MANIFEST, WEIGHTS, as_text, put_on
from l0prune.files.tensor_file import SAVE, each_once, write_tensors

NAME, CONFIG = "l0prune_model.py", "config.json"
Value = TypeVar("Value")
WRITERS: Registry[Callable[[Path, nn.Module], object]] = Registry("format", "writers")
"""Writers of files in other formats, by suffix: functions of the path and the network."""
Renamed = Callable[[str], str]  # from an old name to the new one; empty if it is removed


_USAGE = """Give a model that your own code built the new sizes and weights of its smaller self.

    from l0prune_model import resize
    model = resize(MyModel(), "folder")

MyModel() is the model as it was before it was cut. This needs torch and safetensors.
"""


def loading_code() -> str:
    """Return the source of a plain torch file that loads a smaller model without l0prune."""
    return "\n\n".join([f'"""{_USAGE}"""', _body(given_sizes), _body(cut_layers)]) + "\n"


def _body(module: ModuleType) -> str:
    """Return a Python module's source without its docstring and its imports from l0prune."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    for node in ast.parse(source).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_import = isinstance(node, ast.ImportFrom) and str(node.module).startswith(
            ("l0prune.", "__future__")
        )
        if is_import or (is_docstring and node.lineno == 1):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)  # type: ignore[operator]
    return "\n".join(lines).strip()


def write_folder(
    folder: PathLike, module: nn.Module, manifest: Manifest, trials: Trials, *, code: bool = False
) -> str:
    """Write the folder of a smaller model; return sentences for the user on how to load it.

    With ``code`` the folder has a Python file that loads it without l0prune.

    Raises:
        FileError: it cannot be written; the folder's old content is unchanged.
    """
    tensors, tied = each_once(tensors_of(manifest, module))
    save = _digest(tensors)
    manifest = manifest.model_copy(update={"tied": tied, "save": save})
    with replaced_folder(folder, MANIFEST, {WEIGHTS, CONFIG, GENERATION, NAME}) as scratch:
        write_tensors(scratch / WEIGHTS, tensors, {"format": "pt", SAVE: save})
        (scratch / MANIFEST).write_text(as_text(manifest, indent=1), encoding="utf-8")
        lines = [_way_back(folder, manifest)]
        if code:
            (scratch / NAME).write_text(loading_code(), encoding="utf-8")
            lines.append(f"{NAME} in it does what l0prune.resize does, without l0prune.")
        if manifest.origin.transformers:
            lines.append(_for_transformers(scratch, module, manifest, trials))
            lines.append(bring_along(module, scratch))
    return "\n".join(filter(None, lines))


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of the weights, to distinguish one save from another."""
    found = hashlib.blake2b(digest_size=8)
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        found.update(name.encode())
        found.update(plain.view(torch.uint8).numpy().data)
    return found.hexdigest()


def _way_back(folder: PathLike, manifest: Manifest) -> str:
    if manifest.origin.is_known:
        return f'l0prune.from_pretrained("{folder}") loads it.'
    return (
        f"Only your own code builds this {manifest.kind}: build a new one, as it was before "
        "its gates, and give that the new sizes and weights: "
        f'l0prune.resize(new, "{folder}").'
    )


def _for_transformers(scratch: Path, module: nn.Module, manifest: Manifest, trials: Trials) -> str:
    """Write the files that transformers reads, try to load them, and return the result as text."""
    settings = getattr(module, "generation_config", None)
    if settings is not None:
        (scratch / GENERATION).write_text(settings.to_json_string(), encoding="utf-8")
    name = manifest.origin.transformers
    found, reason = configurations(module, manifest)
    for config in found:
        _write_config(scratch, name, config)
        fault = _fault_of_loading(scratch, module, name, trials)
        reason = reason or fault  # of the likeliest configuration
        if not fault:
            others = "".join(f", and {auto}" for auto in auto_classes(module))
            return f"So does {name}.from_pretrained of transformers{others}."
    _write_config(scratch, name, manifest.origin.config or {})
    return f"transformers cannot load it by itself: {reason}."


def _write_config(scratch: Path, name: str, config: Mapping[str, Any]) -> None:
    content = {**config, "architectures": [name]}
    text = json.dumps(content, indent=2, sort_keys=True)
    (scratch / CONFIG).write_text(text + "\n", encoding="utf-8")


def _fault_of_loading(scratch: Path, module: nn.Module, name: str, trials: Trials) -> str:
    """Return what is wrong with the model that transformers loads; empty if nothing is."""
    transformers = importlib.import_module("transformers")
    same_attention = attention_of(module)
    options = {"attn_implementation": same_attention} if same_attention else {}
    try:
        with quietly(), torch.random.fork_rng(devices=[]):
            loaded, told = getattr(transformers, name).from_pretrained(
                scratch, local_files_only=True, output_loading_info=True, dtype="auto", **options
            )
    except Exception as error:  # of another package: any class
        return in_a_line(error)
    left = [key for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if told.get(key)]
    if left:
        return f"it has {left[0].replace('_', ' ')}"
    return fault_of(loaded, module, trials)


def shortened(
    module: nn.Module, manifest: Manifest, trials: Trials
) -> tuple[nn.Module, Manifest, Trials]:
    """Return a transformers model without the layers that only return their input.

    The exported module keeps them as no-ops. A configuration with fewer layers builds the model
    without them, so that transformers loads it by itself. If none fits, all is returned unchanged.
    """
    for path, count, left in _lists(module) if manifest.origin.transformers else ():
        renamed = _renaming(path, left)
        tensors = _renamed(tensors_of(manifest, module), renamed)
        for config in _configurations(manifest.origin.config or {}, count, left):
            origin = manifest.origin.model_copy(update={"config": config})
            found = _made(_shorter(manifest, origin, renamed), tensors)
            if found is None or fault_of(found[0], module, trials, renamed):
                continue
            for name in {"generation_config", "name_or_path"} & {*dir(module)}:
                setattr(found[0], name, getattr(module, name))
            others = [(new, given) for at, given in trials if (new := renamed(at)) or not at]
            return shortened(*found, others)
    return module, manifest, trials


def _lists(module: nn.Module) -> Iterator[tuple[str, int, list[int]]]:
    """Yield each layer list with skipped layers: path, length, and indices of the other layers."""
    for path, layers in module.named_modules():
        if isinstance(layers, nn.ModuleList):
            left = [
                number
                for number, layer in enumerate(layers)
                if not (isinstance(layer, SKIPPED) and getattr(layer, "gives", "input") == "input")
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
    """Yield configurations with one number ``whole`` reduced, and lists of ``whole`` entries."""

    def shorter(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: shorter(each) for name, each in value.items()}
        if isinstance(value, list) and len(value) == whole:
            return [value[number] for number in left]
        return value

    fields = [field for field, value in numbers_in(config) if value == whole]
    # names that suggest a count of layers first
    for field in sorted(fields, key=lambda field: not re.search(r"layer|depth|block", field[-1])):
        yield changed(shorter(config), {field: len(left)})


def _renamed(named: Mapping[str, Value], renamed: Renamed) -> dict[str, Value]:
    return {new: value for name, value in named.items() if (new := renamed(name))}


def _shorter(manifest: Manifest, origin: Origin, renamed: Renamed) -> Manifest:
    changed = {
        name: _renamed(getattr(manifest, name), renamed)
        for name in ("shapes", "constants", "attributes", "layers", "dropped")
    }
    return manifest.model_copy(update={"origin": origin, **changed})


def _made(manifest: Manifest, tensors: Mapping[str, Tensor]) -> tuple[nn.Module, Manifest] | None:
    """Build the manifest's model with these tensors; None if they do not fit."""
    try:
        with torch.device("meta"):  # most configurations that are tried build something else
            sizes = {n: list(t.shape) for n, t in built(manifest.origin, "").state_dict().items()}
        # A tensor that was cut away has no size in a manifest.
        if any(sizes.get(name) != shape.old for name, shape in manifest.shapes.items()):
            return None
        made = built(manifest.origin, "the model").eval()
        manifest = manifest.model_copy(update={"attributes": _attributes(made, manifest)})
        put_on(made, manifest, tensors, "the model")
    except L0pruneError:
        return None
    return made, manifest


def _attributes(fresh: nn.Module, manifest: Manifest) -> Changes:
    """Return the manifest's attributes for a new model, with its layers' indices recomputed."""
    numbers = numbers_of(fresh)
    others = {
        path: {name: value for name, value in of.items() if (path, name) not in numbers}
        for path, of in manifest.attributes.items()
    }
    passed = [path for path, kind in manifest.layers.items() if LAYERS[kind] in SKIPPED]
    return joined({path: of for path, of in others.items() if of}, renumbered(fresh, passed))
