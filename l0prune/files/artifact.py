"""Gated models in one safetensors file: tensors, and JSON with the plan, gates and metadata.

The file holds the state_dict under its own names, the example inputs, and one JSON text with the
rest. The module's structure is stored as a pickle without weights, which is only read if its
classes can be trusted; otherwise ``info`` may name the code that builds the module.
"""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from l0prune.capture.example_inputs import opened
from l0prune.capture.sizes import FreeSizes
from l0prune.doors import no_such, provided
from l0prune.errors import FileError, UsageError
from l0prune.files.around import AROUND, Around
from l0prune.files.atomic import PathLike
from l0prune.files.checked_json import Strict, checked
from l0prune.files.consent import check_consent
from l0prune.files.model_sources import load_model
from l0prune.files.pickles import check_exists, check_whole, load_bytes
from l0prune.files.plan_check import check_plan
from l0prune.files.smaller_model import from_pretrained, is_smaller_model, resize
from l0prune.files.source_file import source_file_of
from l0prune.files.tensor_file import (
    GATED,
    Stored,
    decode,
    encode,
    is_tensor_file,
    read_tensors,
    read_texts,
    storable,
    write_tensors,
)
from l0prune.files.user_code import is_rebuildable
from l0prune.gating.attaching import attach, check_ungated, detach, gates_or_none
from l0prune.gating.bank import Gates
from l0prune.gating.gated_class import is_gated
from l0prune.gating.kinds.base import gate_from_dict, gate_to_dict
from l0prune.plan.plan import Plan

FORMAT = 4  # raised when older versions cannot read what this one writes


_OF_GATES = (_LOG_ALPHA, _TEMPERATURE, _) = (
    "l0prune_gates.log_alpha",
    "l0prune_gates.temperature",
    "l0prune_gates.clips",
)


_INNER = "network."  # prefix of the network's tensor names within what is around it


_OWN = "l0prune:"  # prefix of the names of tensors that are not in the state_dict


_EXAMPLE, _EXTRA, _STRUCTURE = f"{_OWN}example", f"{_OWN}extra", f"{_OWN}structure"


class GatesContent(Strict):
    """Serialized bank of gates: the plan, the kind of gate and the example inputs as JSON data.

    ``int8`` holds the ranges of training with fake quantization; None without it. ``asked`` are
    the budgets that the gates met, as text.
    """

    plan: dict[str, Any]
    gate: dict[str, Any]
    fixed: bool
    example: Any
    free: list[dict[str, str]] = Field(default_factory=list)
    int8: dict[str, Any] | None = None
    asked: list[str] = Field(default_factory=list)
    outputs: list[str] = Field(default_factory=list)


class StructureContent(Strict):
    """Pickled module: whether it loads without trust, and the names of its hollow tensors."""

    is_ordinary: bool
    hollow: list[str]


class AroundContent(Strict):
    """Network around a network: its registered name, and its facts if it has them."""

    name: str
    facts: dict[str, Any] | None


class Content(Strict):
    """Content of a gated model's file except the tensors.

    Attributes:
        version: of the file format.
        info: JSON data from the user, and facts about the gates and wrappers.
        training: names of the modules in training mode.
        frozen: names of the parameters without a gradient.
        extra: entries of the state_dict that are not tensors.
        ties: further names of tensors that are stored under another one.
        notes: how to restore tensors that are stored in another dtype or order of dims.
        around: the networks around the user's network, the outermost first.
        gates, structure: None for an ungated model, and for a module that is not pickled.
    """

    version: int
    info: dict[str, Any]
    training: list[str]
    frozen: list[str]
    extra: dict[str, Any]
    ties: dict[str, str]
    notes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    around: list[AroundContent] = Field(default_factory=list)
    gates: GatesContent | None = None
    structure: StructureContent | None = None


def save(model: nn.Module, path: PathLike, info: Mapping[str, Any] | None = None) -> None:
    """Write the model with its gates to one file, atomically. The model is left as it is.

    The file is one of safetensors, the state_dict in it under its own names, with digests by which
    ``load`` refuses one whose bytes have changed. ``info`` is free JSON
    data that ``read_info`` gives back. Where ``info["model"]`` names code (``timm:NAME``,
    ``file.py:factory``), ``load`` builds by it a module whose classes it would not unpickle.

    Raises:
        FileError: the file cannot be written, or the model cannot be stored in one.
        UsageError: ``info`` is no JSON data, or the gated model is only a part of ``model``.
    """
    try:
        facts: dict[str, Any] = json.loads(json.dumps(dict(info or {})))
    except (TypeError, ValueError) as error:
        raise UsageError(f"info must be data that JSON can hold: {error}") from error
    gates = _gates_or_none(model)
    if gates is not None:
        facts = {**gates.facts, **facts}
    if (source := source_file_of(model)) is not None:
        facts.setdefault("model", source.file)
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        with _storing(f"the state_dict, under {name}, holds", path):
            if isinstance(value, Tensor):
                tensors[name] = storable(value)
            else:
                extra[name] = encode(value, tensors, f"{_EXTRA}.{name}")
    section = None
    if gates is not None:
        with _storing("the example inputs hold", path):
            example = encode(opened(gates.example), tensors, _EXAMPLE)
        plan, kind = json.loads(gates.plan.to_json()), gate_to_dict(gates.gate)
        section = GatesContent(
            plan=plan,
            gate=kind,
            fixed=gates.fixed,
            example=example,
            free=gates.free.to_json(),
            int8=None if gates.quantizer is None else gates.quantizer.to_dict(),
            asked=list(gates.asked),
            outputs=list(gates.outputs),
        )
    packed = pack(model, path, can_be_built=is_rebuildable(_spec(facts)))
    if packed is not None:
        tensors[_STRUCTURE] = packed.pickle
    stored = Stored.of(tensors)
    content = Content(
        version=FORMAT,
        info=facts,
        training=[name for name, module in model.named_modules() if module.training],
        frozen=[name for name, p in model.named_parameters() if not p.requires_grad],
        extra=extra,
        ties=stored.ties,
        notes=stored.notes,
        around=[
            AroundContent(name=each.name, facts=json.loads(json.dumps(each.facts)))
            for each in _around(model)
        ],
        gates=section,
        structure=packed and StructureContent(is_ordinary=packed.is_ordinary, hollow=packed.hollow),
    )
    write_tensors(path, stored.tensors, {GATED: json.dumps(content.model_dump())})


def load(
    path: PathLike, model: nn.Module | None = None, *, trust_pickle: bool = False
) -> nn.Module:
    """Return the model that ``save`` wrote, on the CPU, with its gates on; or a smaller one.

    Args:
        path: the file; or what ``Export`` wrote, a folder or a state: see ``from_pretrained``, and
            ``resize`` for a ``model`` that is given.
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
    if is_smaller_model(path):
        if model is not None:
            return resize(model, path)
        return from_pretrained(path, trust_pickle=trust_pickle)
    content = _read(path)
    if model is not None:
        check_ungated(model)
    try:
        tensors = Stored(read_tensors(path), content.ties, content.notes).opened()
        state = {name: t for name, t in tensors.items() if not name.startswith(_OWN)}
        state |= {name: decode(value, tensors) for name, value in content.extra.items()}
        if model is None:
            model = _built(content, tensors, state, path, trust_pickle)
        ungated = {n: v for n, v in state.items() if content.gates is None or n not in _OF_GATES}
        check_fits(ungated, model, path)
        if content.gates is not None:
            gates = _gates(content.gates, tensors, model)
            attach(model, gates)
            if content.gates.int8 is not None:
                provided("rounded_again")(model, gates, content.gates.int8)
    except FileError:
        raise
    # A damaged file can contradict itself or the model in any of these ways.
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise FileError(f"{path} is damaged: {error!r}") from error
    except UsageError as error:
        raise FileError(f"{path} does not fit this model: {error}") from error
    try:
        fill(model, state)
    except BaseException:
        if content.gates is not None:
            detach(model)
        raise
    training, frozen = set(content.training), set(content.frozen)
    for name, module in model.named_modules():
        module.training = name in training
    for name, parameter in model.named_parameters():
        is_continuous = parameter.is_floating_point() or parameter.is_complex()
        parameter.requires_grad_(is_continuous and name not in frozen)
    return model


def read_info(path: PathLike) -> dict[str, Any]:
    """Return the information that was given to ``save``; no model is built and no weights are read.

    Raises:
        FileError: the file is missing, damaged, or none of ours.
    """
    return _read(path).info


@contextmanager
def _storing(what: str, path: PathLike) -> Iterator[None]:
    """Turn the TypeError for a value that no file can hold into a FileError that says ``what``."""
    try:
        yield
    except TypeError as error:
        raise FileError(
            f"{path} was not written: {what} {error}, and a file can only hold tensors, numbers "
            "and text in tuples, lists and dicts."
        ) from error


def _read(path: PathLike) -> Content:
    check_exists(Path(path))
    if not is_tensor_file(path):
        check_whole(Path(path))
        raise FileError(
            f"{path} holds no gated model. `l0prune gate {path}` makes one of a pickled module."
        )
    text = read_texts(path).get(GATED)
    if text is None:
        raise FileError(
            f"{path} holds tensors, but no gated model. `l0prune gate --model path.py:factory "
            f"--weights {path}` makes one."
        )
    return checked(text, Content, FORMAT, path)


def _built(
    content: Content,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    path: PathLike,
    trust: bool,
) -> nn.Module:
    """Build the ungated module in the safest way that the file allows."""
    for each in content.around:
        if each.name not in AROUND:
            raise FileError(f"{path} cannot be loaded: {no_such(AROUND.what, each.name, AROUND)}")
    structure, spec = content.structure, _spec(content.info)
    by_code = is_rebuildable(spec)
    if structure is None or (by_code and not structure.is_ordinary):
        if not by_code:
            raise ValueError("neither a module nor what builds it")
        if not trust:
            check_consent(spec, path)
        return _put_around(load_model(spec), content.around)
    inner = _INNER * sum(AROUND[each.name].has_hooks for each in content.around)
    state = {name.removeprefix(inner): value for name, value in state.items()}
    trusted = trust and not structure.is_ordinary
    model = unpack(tensors[_STRUCTURE], structure.hollow, state, path, trust=trusted)
    return _put_around(model, content.around)


def _around(model: nn.Module) -> list[Around]:
    """Return the model and the networks in it that are around another one, outermost first."""
    return [model, *_around(model.network)] if isinstance(model, Around) else []


def _put_around(model: nn.Module, around: Sequence[AroundContent]) -> nn.Module:
    """Return the network with all that is to be around it and is not, and has facts."""
    if not around:
        return model
    first, *rest = around
    if isinstance(model, Around) and model.name == first.name:
        model.network = _put_around(model.network, rest)
        return model
    model = _put_around(model, rest)
    return model if first.facts is None else AROUND[first.name].of_facts(model, first.facts)


def _spec(info: Mapping[str, Any]) -> str:
    return str(info.get("model") or "")


def _gates(saved: GatesContent, tensors: Mapping[str, Tensor], model: nn.Module) -> Gates:
    log_alpha = tensors[_LOG_ALPHA]
    plan = Plan.from_json(json.dumps(saved.plan))
    if log_alpha.shape != (plan.size,):
        raise ValueError(f"{tuple(log_alpha.shape)} gates where the plan has {plan.size}")
    if log_alpha.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"gates of {log_alpha.dtype}")
    check_plan(plan, model)
    args, kwargs = decode(saved.example, tensors)
    if type(args) is not tuple or type(kwargs) is not dict:
        raise ValueError("an example that is no arguments")
    free = FreeSizes.from_json(saved.free)
    gates = Gates(plan, gate_from_dict(saved.gate), log_alpha, (args, kwargs), free)
    own, found = gates.temperature, tensors.get(_TEMPERATURE)
    if (None if own is None else own.shape) != (None if found is None else found.shape):
        raise ValueError("a temperature that is not of this kind of gates")
    gates.fixed, gates.asked = saved.fixed, tuple(saved.asked)
    gates.outputs = tuple(saved.outputs)
    return gates


def _gates_or_none(model: nn.Module) -> Gates | None:
    gates = gates_or_none(model)
    if gates is None:
        return None
    if _LOG_ALPHA not in model.state_dict():
        raise UsageError(
            "this module only wraps the gated model; save the gated model itself (the .module of "
            "a DataParallel or DistributedDataParallel)"
        )
    gates.make_whole()
    return gates


class Packed(NamedTuple):
    """Pickled structure of a module.

    Attributes:
        pickle: the bytes of its pickle; uint8, 1-D.
        is_ordinary: whether it can be loaded without running foreign code.
        hollow: names of the tensors whose values are only in the model's state_dict.
    """

    pickle: Tensor
    is_ordinary: bool
    hollow: list[str]


def pack(model: nn.Module, path: PathLike, *, can_be_built: bool) -> Packed | None:
    """Return the pickled, ungated structure of ``model`` for the artifact at ``path``.

    None if it cannot be pickled but ``can_be_built`` by other means.

    Raises:
        FileError: the model can be neither pickled nor built.
    """
    stored = _stored(model)
    try:
        plain = copy.deepcopy(model, {id(t): _hollow(t) for t in stored.values()})
        if is_gated(plain):
            detach(plain)
        inner = _INNER * sum(each.has_hooks for each in _around(plain))
        plain = _without_hooks(plain)
        buffer = io.BytesIO()
        with warnings.catch_warnings():  # l0prune reads it
            warnings.filterwarnings("ignore", "l0prune: this pickle holds layers")
            torch.save(plain, buffer)
    except Exception as error:  # the user's classes run here, and may raise anything
        if can_be_built:
            return None
        raise FileError(
            f"{path} was not written: the model cannot be pickled ({error}). Build it by a "
            "function in a file instead: --model path.py:factory."
        ) from error
    own = (name for name, _ in named_tensors(plain))
    hollow = [name for name in own if {name, inner + name} & stored.keys()]
    bytes_ = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    return Packed(bytes_, _is_ordinary(buffer.getvalue(), _bytes_of(stored.values())), hollow)


def _without_hooks(model: nn.Module) -> nn.Module:
    """Take off all that works by hooks, which are not pickled."""
    if not isinstance(model, Around):
        return model
    if model.has_hooks:
        return _without_hooks(model.take_off())
    model.network = _without_hooks(model.network)
    return model


def unpack(
    pickle: Tensor,
    hollow: Iterable[str],
    state: Mapping[str, Any],
    path: PathLike,
    *,
    trust: bool = False,
) -> nn.Module:
    """Load the module that ``pack`` pickled, and put the state into its hollow tensors.

    Raises:
        FileError: it is damaged, or of classes that must not be unpickled.
        KeyError, RuntimeError, ValueError: the state does not fit.
    """
    # Hollow tensors look as large as the state, but take no memory.
    room = _bytes_of(value for value in state.values() if isinstance(value, Tensor))
    module = load_bytes(pickle.numpy().tobytes(), str(path), trust=trust, room=room)
    if not isinstance(module, nn.Module):
        raise FileError(f"{path} holds a {type(module).__name__} where a module should be.")
    tensors = dict(named_tensors(module))
    for name in hollow:
        if tensors[name].shape != state[name].shape:
            raise ValueError(f"{name} has the wrong shape")
        tensors[name].data = state[name]
    return module


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that the state_dict holds as the same objects."""
    state = model.state_dict(keep_vars=True)
    return {name: t for name, t in named_tensors(model) if state.get(name) is t}


def _hollow(tensor: Tensor) -> Tensor:
    """Return a tensor or parameter of the same shape and dtype: one zero, expanded."""
    value = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    if not isinstance(tensor, nn.Parameter):
        return value
    parameter = nn.Parameter(value, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


def _is_ordinary(content: bytes, room: int) -> bool:
    """Return whether the pickle can be loaded without running foreign code."""
    try:
        load_bytes(content, "", room=room)
    except FileError:
        return False
    return True


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over all parameters and buffers once, by first name, also non-persistent ones."""
    return chain(module.named_parameters(), module.named_buffers())


def check_fits(state: Mapping[str, Any], model: nn.Module, path: PathLike) -> None:
    """Refuse a state whose names or shapes differ from the model's.

    Raises:
        FileError: names or shapes differ.
    """
    wanted, found = _shapes(model.state_dict()), _shapes(state)
    differing = [n for n in {**wanted, **found} if wanted.get(n, "none") != found.get(n, "none")]
    if differing:
        lines = [
            f"  {n}: {found.get(n, 'none')} in the file, {wanted.get(n, 'none')} in the model"
            for n in differing[:5]
        ]
        more = [f"  and {len(differing) - 5} more"] if len(differing) > 5 else []
        raise FileError(
            f"the weights in {path} do not fit this model:\n" + "\n".join([*lines, *more])
        )


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {n: _shape(v) if isinstance(v, Tensor) else "data" for n, v in state.items()}


def _shape(tensor: Tensor) -> str:
    """Return the shape, and the dtype unless it is floating: float precision may differ."""
    if tensor.is_floating_point():
        return str(tuple(tensor.shape))
    kind = "complex" if tensor.is_complex() else str(tensor.dtype).removeprefix("torch.")
    return f"{tuple(tensor.shape)} of {kind}"


def fill(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a fitting state into the model, after converting the model to the state's dtypes."""
    for name, tensor in named_tensors(model):
        if name in state and tensor.dtype != state[name].dtype:
            tensor.data = tensor.data.to(state[name].dtype)
    model.load_state_dict(state)
