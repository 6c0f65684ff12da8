"""Our own files: a gated model with its plan, gates and information, as tensors plus JSON.

One ``torch.save`` archive that holds only tensors, numbers and text. The module's structure is in
it as pickled bytes, which are only read where their classes can be trusted, or as the name of the
code that builds it.
"""

from __future__ import annotations

import copy
import io
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from l0prune.errors import FileError, NotGated
from l0prune.files import atomic_write, load_pickle
from l0prune.gates import Gates, gate_from_dict, gate_to_dict
from l0prune.models import is_rebuildable, load_model
from l0prune.plan import Plan
from l0prune.rewrite import attach, detach, gates_of

FORMAT = 1  # raised when a file of this version cannot be read by older ones

Model = TypeVar("Model", bound=nn.Module)


def save(
    model: nn.Module, path: str | os.PathLike[str], info: Mapping[str, Any] | None = None
) -> None:
    """Write the model with its gates to one file, atomically. The model is left as it is.

    ``info`` is free JSON data that ``read_info`` gives back. Where ``info["model"]`` names code
    (``torchvision:NAME``, ``file.py:factory``), the file holds weights only and loading builds
    the module from that code; else it holds the pickled module.

    Raises:
        FileError: the file cannot be written, or the model cannot be pickled.
    """
    info = dict(info or {})
    plain = _without_gates(model)
    content: dict[str, Any] = {
        "l0prune": FORMAT,
        "info": json.dumps(info),
        "training": [name for name, module in plain.named_modules() if module.training],
        "frozen": [name for name, p in plain.named_parameters() if not p.requires_grad],
    }
    if is_rebuildable(str(info.get("model", ""))):
        content["state"] = dict(plain.state_dict())
    else:
        module, is_ordinary = _pickled(plain, Path(path))
        content["module"] = module
        if not is_ordinary:
            content["state"] = dict(plain.state_dict())
    gates = _gates_or_none(model)
    if gates is not None:
        content["plan"] = gates.plan.to_json()
        content["gate"] = json.dumps(gate_to_dict(gates.gate))
        content["log_alpha"] = gates.log_alpha.detach()
        content["fixed"] = gates.fixed
        content["example"] = gates.example
    atomic_write(path, lambda file: torch.save(content, file))


def load(
    path: str | os.PathLike[str], model: Model | None = None, *, trust_pickle: bool = False
) -> nn.Module:
    """The model that ``save`` wrote, with its gates on.

    Args:
        path: the file.
        model: an ungated module of the same class to load into, for classes that are neither
            torch.nn nor torchvision.models; built from the file where None.
        trust_pickle: unpickle any class in the file, which runs its code.

    Raises:
        FileError: the file is missing, damaged, from a newer version, or needs code it may not run.
    """
    content = _read(path)
    if model is None:
        model = _module_in(content, path, trust_pickle)  # type: ignore[assignment]
    elif "state" in content:
        _fill(model, content["state"], path)
    else:
        _fill(model, _unpickled(content["module"], path, trust_pickle).state_dict(), path)
    assert model is not None
    training, frozen = set(content["training"]), set(content["frozen"])
    for name, module in model.named_modules():
        module.training = name in training
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if "plan" in content:
        _attach(model, content, path)
    return model


def read_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The information that was given to ``save``; no model is built.

    Raises:
        FileError: the file is missing, damaged, or none of ours.
    """
    return dict(json.loads(_read(path)["info"]))


def is_artifact(path: str | os.PathLike[str]) -> bool:
    """Whether the file was written by ``save``."""
    try:
        _read(path)
    except FileError:
        return False
    return True


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    content = load_pickle(path)
    if not isinstance(content, dict) or "l0prune" not in content:
        raise FileError(
            f"{path} holds no gated model. `l0prune gate {path} --input …` makes one of a "
            "pickled module."
        )
    if content["l0prune"] > FORMAT:
        raise FileError(
            f"{path} was written by a newer l0prune (format {content['l0prune']}, this one reads "
            f"up to {FORMAT}). Upgrade with: pip install --upgrade l0prune"
        )
    return content


def _without_gates(model: nn.Module) -> nn.Module:
    if _gates_or_none(model) is None:
        return model
    plain = copy.deepcopy(model)
    detach(plain)
    return plain


def _gates_or_none(model: nn.Module) -> Gates | None:
    try:
        return gates_of(model)
    except NotGated:
        return None


def _pickled(module: nn.Module, path: Path) -> tuple[Tensor, bool]:
    """The module as bytes in a tensor, and whether it loads without being trusted."""
    buffer = io.BytesIO()
    try:
        torch.save(module, buffer)
    except Exception as error:
        raise FileError(
            f"{path} was not written: the model cannot be pickled ({error}). Build it by a "
            "function in a file instead: --model path.py:factory."
        ) from error
    content = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    try:
        _unpickled(content, path, trust_pickle=False)
    except FileError:
        return content, False
    return content, True


def _unpickled(content: Tensor, path: str | os.PathLike[str], trust_pickle: bool) -> nn.Module:
    """The module in the bytes, under the same rules as any other pickled file."""
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder, Path(path).name)
        inner.write_bytes(content.numpy().tobytes())
        try:
            module = load_pickle(inner, trust=trust_pickle)
        except FileError as error:
            raise FileError(str(error).replace(str(inner), str(path))) from error
    if not isinstance(module, nn.Module):
        raise FileError(f"{path} holds a {type(module).__name__} where a module should be.")
    return module


def _module_in(
    content: dict[str, Any], path: str | os.PathLike[str], trust_pickle: bool
) -> nn.Module:
    if "module" in content:
        return _unpickled(content["module"], path, trust_pickle)
    model = load_model(json.loads(content["info"])["model"])
    _fill(model, content["state"], path)
    return model


def _fill(model: nn.Module, state: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    try:
        dtypes = {t.dtype for t in state.values() if t.is_floating_point()}
        if dtypes == {torch.float64}:
            model.double()
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = "\n".join(str(error).splitlines()[:6])
        raise FileError(f"the weights in {path} do not fit this model:\n{lines}") from error


def _attach(model: nn.Module, content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    try:
        plan = Plan.from_json(content["plan"])
        gate = gate_from_dict(json.loads(content["gate"]))
        gates = Gates(plan, gate, content["log_alpha"], content["example"])
        gates.fixed = content["fixed"]
    except (KeyError, ValueError) as error:
        raise FileError(f"{path} is damaged: {error}") from error
    attach(model, gates)
