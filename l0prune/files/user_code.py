"""Models built by code: a Python file of the user (``file.py:name``), or a package by name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torch import nn

from l0prune.capture.threads import muted
from l0prune.errors import FileError, L0pruneError, UsageError, first_line, meant
from l0prune.files.consent import SOURCES, is_code, is_read, remember
from l0prune.gating.gated_class import CHILD


def named(spec: str) -> Any:
    """Return the object named by ``file.py:name``; the file is run, once until it changes.

    Its folder is put at the front of ``sys.path``, as Python does for a script. Files may name
    this code from now on, as long as it does not change.

    Raises:
        FileError: there is no such file, or it fails while it runs.
        UsageError: it defines no such name.
    """
    path, _, name = spec.rpartition(":")
    remember(spec)
    module = _imported(Path(path))
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UsageError(
            f"{path} has no {name!r}; it defines {', '.join(own) or 'no function'}"
            f"{meant(name, own) or '.'}"
        )
    return getattr(module, name)


def function(spec: str, what: str) -> Callable[..., Any]:
    """Return the function that ``file.py:function`` names; ``what`` it is for is in the error.

    Raises:
        FileError: there is no such file, or it fails while it runs.
        UsageError: it defines no function of this name.
    """
    found = named(spec)
    if not callable(found):
        raise UsageError(f"{spec} is a {type(found).__name__}, not a function for a {what}")
    return found  # type: ignore[no-any-return]


def called(function: Any, spec: str) -> Any:
    """Call the user's function without arguments.

    Raises:
        UsageError: it is no function, or fails.
    """
    if not callable(function):
        raise UsageError(f"{spec} is a {type(function).__name__}, not a function to call.")
    try:
        return function()
    except L0pruneError:
        raise
    except (Exception, SystemExit) as error:
        where = _place(error, spec.rpartition(":")[0])
        raise UsageError(
            f"{spec} failed when it was called without arguments: {error!r}{where}"
        ) from error


def _imported(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileError(f"{path} does not exist.")
    path = path.resolve()
    stat = path.stat()
    # Pickles find a class by the name of its module, so one content must have one module.
    version = hashlib.sha256(f"{path} {stat.st_mtime_ns} {stat.st_size}".encode()).hexdigest()[:8]
    name = f"l0prune_user_{path.stem}_{version}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _FromSource(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or path.suffix != ".py":
        raise FileError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        where = _place(error, str(path))
        raise FileError(f"{path} failed while it was imported: {error!r}{where}") from error
    return module


class _FromSource(SourceFileLoader):
    """Loader that compiles the source each time, and writes no ``__pycache__``.

    Python reuses compiled code if the file's size and the second of its last change are the same:
    a number that was edited right after a run would keep its old value.
    """

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _place(error: BaseException, path: str) -> str:
    """Return the last line of the user's file in the error's traceback, in brackets."""
    if isinstance(error, SyntaxError):
        return ""  # the message has the line
    file = str(Path(path).resolve())
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" ({path}, line {lines[-1]})" if lines else ""


def is_rebuildable(spec: str) -> bool:
    """Return whether the spec names a package, a Python file or another one to build from."""
    kind, _, name = spec.partition(":")
    return is_code(spec) or is_read(spec) or (kind in SOURCES and bool(name))


def from_code(spec: str) -> Any:
    """Build the model that a spec names, for which ``is_rebuildable`` holds.

    Raises:
        FileError: there is no such file, or it fails while it runs or is converted.
        UsageError: it names nothing.
    """
    kind, _, name = spec.partition(":")
    if kind in SOURCES and name:
        remember(spec)
        return SOURCES[kind](name)
    if is_read(spec):
        remember(spec)
        return SOURCES.named(Path(spec).suffix)(spec)
    factory = named(spec)
    return factory if isinstance(factory, nn.Module) else called(factory, spec)


def torchvision_model(name: str, weights: str | None = None) -> nn.Module:
    """Build a network of torchvision, with published weights if they are named.

    Raises:
        UsageError: there is none of that name.
    """
    from torchvision import models

    known = models.list_models()
    if name not in known:
        near = " or ".join(get_close_matches(name, known, n=2)) or "one of its list_models()"
        raise UsageError(f"torchvision has no model {name!r}; did you mean {near}?")
    options: dict[str, Any] = {"weights": weights}
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None  # else it downloads weights
    with muted():  # two families warn that their initialisation will change
        model: nn.Module = models.get_model(name, **options)
    return model


def _timm(name: str) -> nn.Module:
    timm = _package("timm")
    try:
        model: nn.Module = timm.create_model(name)
    except (RuntimeError, OSError) as error:
        raise UsageError(f"timm has no model {name!r}: {error}") from error
    return model


def _transformers(name: str) -> nn.Module:
    """Build a model of transformers of the class that its files name; a GGUF file by its path."""
    transformers = _package("transformers")
    path = Path(name)
    is_gguf = path.suffix == ".gguf"
    where, more = (str(path.parent), {"gguf_file": path.name}) if is_gguf else (name, {})
    options = {"trust_remote_code": False, **more}
    try:
        with muted():  # what these load lets torch warn of itself
            importlib.import_module("transformers.modeling_utils")
            config = transformers.AutoConfig.from_pretrained(where, **options)
            saved = getattr(transformers, (config.architectures or [""])[0], None)
        auto = transformers.AutoModelForCausalLM if is_gguf else transformers.AutoModel
        model: nn.Module
        model, told = (saved or auto).from_pretrained(where, output_loading_info=True, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"transformers cannot load {name!r}: {first_line(error)}") from error
    check_no_gates(told["unexpected_keys"], name)
    return _unpacked(model, name) if is_gguf else model


def _unpacked(model: Any, name: str) -> nn.Module:
    """Rebuild a model from a GGUF file, which cannot be written, as an ordinary one."""
    config = model.config
    del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    config.name_or_path = plain.name_or_path = name
    found: nn.Module = plain.eval()
    return found


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} is not installed here: pip install {name}") from error


SOURCES.update(torchvision=torchvision_model, timm=_timm, transformers=_transformers)


def check_no_gates(names: Iterable[str], where: str) -> None:
    """Refuse the weights of a gated model, which need their gates.

    Raises:
        UsageError: a gated model wrote them.
    """
    if any(CHILD in name.split(".") for name in names):
        raise UsageError(
            f"{where} holds the weights of a gated model: without their gates they compute "
            "something else. Build the model, gate it as it was (l0prune.gate), and load them with "
            "its load_state_dict; or keep gated models with l0prune.save and l0prune.load"
        )
