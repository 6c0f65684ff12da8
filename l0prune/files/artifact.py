"""Our own files: a gated model with its plan, gates and information, as tensors plus JSON.

One ``torch.save`` archive that holds only tensors, numbers and text. The module's structure is in
it as the bytes of a pickle without weights, which is only read where its classes can be trusted;
where they cannot, the information may name the code that builds the module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.errors import FileError, NotGated, UsageError
from l0prune.files.atomic import PathLike, atomic_write
from l0prune.files.consent import check_consent
from l0prune.files.loading import load_pickle
from l0prune.files.model_sources import is_rebuildable, load_model
from l0prune.files.structure import check_fits, fill, pack, unpack
from l0prune.gating.attaching import attach, check_ungated, detach, gates_of
from l0prune.gating.bank import Gates
from l0prune.gating.kinds.base import gate_from_dict, gate_to_dict
from l0prune.plan.plan import Plan

FORMAT = 1  # raised when older versions cannot read what this one writes

_LOG_ALPHA = "l0prune_gates.log_alpha"
_TYPES = {"info": str, "state": dict, "training": list, "frozen": list}
_GATE_TYPES = {"plan": str, "gate": str, "fixed": bool, "example": tuple}


def save(model: nn.Module, path: PathLike, info: Mapping[str, Any] | None = None) -> None:
    """Write the model with its gates to one file, atomically. The model is left as it is.

    ``info`` is free JSON data that ``read_info`` gives back. Where ``info["model"]`` names code
    (``timm:NAME``, ``file.py:factory``), ``load`` builds by it a module whose classes it would
    not unpickle.

    Raises:
        FileError: the file cannot be written, or the model cannot be stored in one.
        UsageError: ``info`` is no JSON data, or the gated model is only a part of ``model``.
    """
    try:
        text = json.dumps(dict(info or {}))
    except (TypeError, ValueError) as error:
        raise UsageError(f"info must be data that JSON can hold: {error}") from error
    gates = _gates_or_none(model)
    content = {
        "l0prune": FORMAT,
        "info": text,
        "state": dict(model.state_dict()),
        "training": [name for name, module in model.named_modules() if module.training],
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
        **pack(model, path, can_be_built=is_rebuildable(_spec(json.loads(text)))),
    }
    if gates is not None:
        content["gates"] = {
            "plan": gates.plan.to_json(),
            "gate": json.dumps(gate_to_dict(gates.gate)),
            "fixed": gates.fixed,
            "example": gates.example,
        }
        _check_plain(gates.example, path)
    atomic_write(path, lambda file: torch.save(content, file))


def load(
    path: PathLike, model: nn.Module | None = None, *, trust_pickle: bool = False
) -> nn.Module:
    """The model that ``save`` wrote, on the CPU, with its gates on.

    Args:
        path: the file.
        model: an ungated module of the same class to load into, for classes that are neither
            torch.nn nor torchvision.models; built from the file where None. It is what is
            returned; after an error it is as it was.
        trust_pickle: unpickle any class in the file, run any code and fetch any network that it
            names. Without, only what the user has named before on this machine (``load_model``).

    Raises:
        AlreadyGated: ``model`` carries gates.
        FileError: the file is missing, damaged, from a newer version, of another model, or needs
            code that it may not run.
    """
    content = _read(path)
    if model is not None:
        check_ungated(model)
    try:
        if model is None:
            model = _built(content, path, trust_pickle)
        state = {name: v for name, v in content["state"].items() if name != _LOG_ALPHA}
        check_fits(state, model, path)
        if "gates" in content:
            attach(model, _gates(content))
    except FileError:
        raise
    # What a file says of itself, and of the model, can be wrong in as many ways as there are.
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise FileError(f"{path} is damaged: {error!r}") from error
    except UsageError as error:
        raise FileError(f"{path} does not fit this model: {error}") from error
    try:
        fill(model, content["state"])
    except BaseException:
        if "gates" in content:
            detach(model)
        raise
    training, frozen = set(content["training"]), set(content["frozen"])
    for name, module in model.named_modules():
        module.training = name in training
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return model


def read_info(path: PathLike) -> dict[str, Any]:
    """The information that was given to ``save``; no model is built and no weights are read.

    Raises:
        FileError: the file is missing, damaged, or none of ours.
    """
    content = _read(path, mmap=True)
    return _info(content, path)


def _info(content: Mapping[str, Any], path: PathLike) -> dict[str, Any]:
    try:
        return dict(json.loads(content["info"]))
    except (ValueError, TypeError) as error:
        raise FileError(f"{path} is damaged: {error}") from error


def _read(path: PathLike, *, mmap: bool = False) -> dict[str, Any]:
    """The content of an artifact, of a version and of types that this version knows."""
    content = load_pickle(path, mmap=mmap)
    version = content.get("l0prune") if isinstance(content, dict) else None
    if not isinstance(version, int) or version < 1:
        raise FileError(
            f"{path} holds no gated model. `l0prune gate {path} --input …` makes one of a "
            "pickled module."
        )
    if version > FORMAT:
        raise FileError(
            f"{path} was written by a newer l0prune (format {version}, this one reads up to "
            f"{FORMAT}). Upgrade with: pip install --upgrade l0prune"
        )
    wrong = [key for key, kind in _TYPES.items() if not isinstance(content.get(key), kind)]
    gates = content.get("gates", {key: kind() for key, kind in _GATE_TYPES.items()})
    if not isinstance(gates, dict):
        wrong.append("gates")
    else:
        wrong += [key for key, kind in _GATE_TYPES.items() if not isinstance(gates.get(key), kind)]
    if wrong:
        raise FileError(f"{path} is damaged: {', '.join(wrong)} missing or of the wrong type.")
    return content  # type: ignore[no-any-return]


def _built(content: dict[str, Any], path: PathLike, trust: bool) -> nn.Module:
    """The ungated module, by the safest way that the file leaves."""
    if "module" in content:
        return unpack(content["module"], content, path)
    spec = _spec(_info(content, path))
    if is_rebuildable(spec):
        if not trust:
            check_consent(spec, path)
        return load_model(spec)
    return unpack(content["foreign_module"], content, path, trust=trust)


def _spec(info: Mapping[str, Any]) -> str:
    return str(info.get("model") or "")


def _gates(content: Mapping[str, Any]) -> Gates:
    saved, log_alpha = content["gates"], content["state"][_LOG_ALPHA]
    plan = Plan.from_json(saved["plan"])
    if log_alpha.shape != (plan.size,):
        raise ValueError(f"{tuple(log_alpha.shape)} gates where the plan has {plan.size}")
    gates = Gates(plan, gate_from_dict(json.loads(saved["gate"])), log_alpha, saved["example"])
    gates.fixed = saved["fixed"]
    return gates


def _gates_or_none(model: nn.Module) -> Gates | None:
    try:
        gates = gates_of(model)
    except NotGated:
        return None
    if _LOG_ALPHA not in model.state_dict():
        raise UsageError(
            "this module only wraps the gated model; save the gated model itself (the .module of "
            "a DataParallel or DistributedDataParallel)"
        )
    return gates


def _check_plain(example: Any, path: PathLike) -> None:
    """Refuse example inputs that no file without pickled classes can hold."""
    parts = (*example, *example.values()) if type(example) is dict else example
    if type(example) in (tuple, list, dict):
        for part in parts:
            _check_plain(part, path)
    elif type(example) not in (Tensor, nn.Parameter, int, float, complex, bool, str, type(None)):
        raise FileError(
            f"{path} was not written: the example inputs hold a {type(example).__name__}, and a "
            "file can only hold tensors, numbers and text in tuples, lists and dicts."
        )
