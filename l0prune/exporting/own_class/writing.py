"""The folder of a smaller model: tensors, its manifest, and what transformers reads.

One file of plain torch that loads a smaller model where l0prune is not installed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.threads import muted
from l0prune.exporting.own_class.config import configurations
from l0prune.exporting.own_class.origin import Trials, fault_of, tensors_of
from l0prune.files import cut_layers, given_sizes
from l0prune.files.atomic import PathLike, replaced_folder
from l0prune.files.manifest import GENERATION, Manifest
from l0prune.files.smaller_model import MANIFEST, WEIGHTS, as_text
from l0prune.files.tensor_file import SAVE, each_once, write_tensors

NAME = "l0prune_model.py"


_USAGE = """Give a model that your own code built the new sizes and weights of its smaller self.

    from l0prune_model import resize
    model = resize(MyModel(), "folder")

MyModel() is the model as it was before it was cut. This needs torch and safetensors.
"""


def loading_code() -> str:
    """Return one file of plain torch with ``resize`` and all the layers that a cut model has."""
    return "\n\n".join([f'"""{_USAGE}"""', _body(given_sizes), _body(cut_layers)]) + "\n"


def _body(module: ModuleType) -> str:
    """The source without its docstring, and without imports from the package."""
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


CONFIG = "config.json"


def write_folder(
    folder: PathLike, module: nn.Module, manifest: Manifest, trials: Trials, *, code: bool = False
) -> str:
    """Write the folder; what can load it, in a sentence or two.

    Args:
        folder: its path.
        module: of its own class.
        manifest: of it, with its origin.
        trials: inputs to compare on.
        code: whether to put a Python file beside it that loads it without l0prune.

    Raises:
        FileError: it cannot be written; what was there is unchanged.
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
    return "\n".join(lines)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """By which the weights of one save are told from those of another."""
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
        f"Only your own code builds this {manifest.kind}: give one the new sizes and weights with "
        f'l0prune.resize(model, "{folder}").'
    )


def _for_transformers(scratch: Path, module: nn.Module, manifest: Manifest, trials: Trials) -> str:
    """Write what transformers reads, and say whether it can load the model; that is tried."""
    settings = getattr(module, "generation_config", None)
    if settings is not None:
        (scratch / GENERATION).write_text(settings.to_json_string(), encoding="utf-8")
    name = manifest.origin.transformers
    found, reason = configurations(module, manifest)
    for config in found:
        _write_config(scratch, name, config)
        fault = _fault_of_loading(scratch, module, name, trials)
        reason = reason or fault  # that of the likeliest
        if not fault:
            others = "".join(f", and {auto}" for auto in _auto_classes(module))
            return f"So does {name}.from_pretrained of transformers{others}."
    _write_config(scratch, name, manifest.origin.config or {})
    return f"transformers cannot load it by itself: {reason}."


def _auto_classes(module: nn.Module) -> list[str]:
    """Those of transformers that make this class of this configuration."""
    known = vars(importlib.import_module("transformers.models.auto.modeling_auto"))
    names = [name for name in known if name.startswith("AutoModel")]
    mappings = {name: getattr(known[name], "_model_mapping", {}) for name in names}
    config: Any = type(module.config)
    return [
        name for name, each in mappings.items() if config in each and each[config] is type(module)
    ]


def _write_config(scratch: Path, name: str, config: Mapping[str, Any]) -> None:
    content = {**config, "architectures": [name]}
    text = json.dumps(content, indent=2, sort_keys=True)
    (scratch / CONFIG).write_text(text + "\n", encoding="utf-8")


def _fault_of_loading(scratch: Path, module: nn.Module, name: str, trials: Trials) -> str:
    """What is wrong with what transformers makes of the folder; empty if nothing is."""
    transformers = importlib.import_module("transformers")
    same_attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
    options = {"attn_implementation": same_attention} if same_attention else {}
    try:
        with _quietly(), torch.random.fork_rng(devices=[]):
            loaded, told = getattr(transformers, name).from_pretrained(
                scratch, local_files_only=True, output_loading_info=True, dtype="auto", **options
            )
    # It is another package's to say what it cannot load, and how.
    except Exception as error:
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    left = [key for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if told.get(key)]
    if left:
        return f"it has {left[0].replace('_', ' ')}"
    return fault_of(loaded, module, trials)


@contextmanager
def _quietly() -> Iterator[None]:
    """What transformers tells and shows of a trial is of no use to whoever saves."""
    told = importlib.import_module("transformers.utils.logging")
    level, shows = told.get_verbosity(), told.is_progress_bar_enabled()
    told.set_verbosity(logging.CRITICAL)
    told.disable_progress_bar()
    try:
        with muted():
            yield
    finally:
        told.set_verbosity(level)
        if shows:
            told.enable_progress_bar()
