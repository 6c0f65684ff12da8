"""A module without its weights: the pickled structure that an artifact carries beside the state."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from l0prune.errors import FileError
from l0prune.files.atomic import PathLike
from l0prune.files.loading import load_bytes
from l0prune.gating.attaching import detach
from l0prune.gating.gated_class import is_gated


class Packed(NamedTuple):
    """A module's structure.

    Attributes:
        pickle: the bytes of its pickle; uint8, 1-D.
        is_ordinary: its classes are those of ordinary models.
        hollow: names of the tensors whose values are only in the model's state_dict.
    """

    pickle: Tensor
    is_ordinary: bool
    hollow: list[str]


def pack(model: nn.Module, path: PathLike, *, can_be_built: bool) -> Packed | None:
    """The ungated structure of ``model`` for the artifact at ``path``.

    None if it cannot be pickled but ``can_be_built`` by other means.

    Raises:
        FileError: the model cannot be pickled, and not be built either.
    """
    stored = _stored(model)
    try:
        plain = copy.deepcopy(model, {id(t): _hollow(t) for t in stored.values()})
        if is_gated(plain):
            detach(plain)
        buffer = io.BytesIO()
        torch.save(plain, buffer)
    except Exception as error:  # the user's classes run here, so anything can come out
        if can_be_built:
            return None
        raise FileError(
            f"{path} was not written: the model cannot be pickled ({error}). Build it by a "
            "function in a file instead: --model path.py:factory."
        ) from error
    hollow = [name for name, _ in tensors_of(plain) if name in stored]
    bytes_ = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    return Packed(bytes_, _is_ordinary(buffer.getvalue(), _bytes_of(stored.values())), hollow)


def unpack(
    pickle: Tensor,
    hollow: Iterable[str],
    state: Mapping[str, Any],
    path: PathLike,
    *,
    trust: bool = False,
) -> nn.Module:
    """The module that ``pack`` made these bytes of, with the state in it.

    Raises:
        FileError: it is damaged, or of classes that must not be unpickled.
        KeyError, RuntimeError, ValueError: the state does not fit.
    """
    # What is hollow looks as large as the state, and takes no room.
    room = _bytes_of(value for value in state.values() if isinstance(value, Tensor))
    module = load_bytes(pickle.numpy().tobytes(), str(path), trust=trust, room=room)
    if not isinstance(module, nn.Module):
        raise FileError(f"{path} holds a {type(module).__name__} where a module should be.")
    tensors = dict(tensors_of(module))
    for name in hollow:
        if tensors[name].shape != state[name].shape:
            raise ValueError(f"{name} has the wrong shape")
        tensors[name].data = state[name]
    return module


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer by its first name, each once, whether saved or not."""
    return chain(module.named_parameters(), module.named_buffers())


def check_fits(state: Mapping[str, Any], model: nn.Module, path: PathLike) -> None:
    """Refuse a state that is not one of this very model.

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
    """Shape, and what kind of numbers: a model may be filled with more precise ones, no others."""
    if tensor.is_floating_point():
        return str(tuple(tensor.shape))
    kind = "complex" if tensor.is_complex() else str(tensor.dtype).removeprefix("torch.")
    return f"{tuple(tensor.shape)} of {kind}"


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def fill(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state that fits, and take over its dtypes."""
    for name, tensor in tensors_of(model):
        if name in state and tensor.dtype != state[name].dtype:
            tensor.data = tensor.data.to(state[name].dtype)
    model.load_state_dict(state)


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers whose values the state_dict holds as they are."""
    state = model.state_dict(keep_vars=True)
    return {name: t for name, t in tensors_of(model) if state.get(name) is t}


def _hollow(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and kind that takes no room: one zero, seen many times."""
    value = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    if not isinstance(tensor, nn.Parameter):
        return value
    parameter = nn.Parameter(value, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


def _is_ordinary(content: bytes, room: int) -> bool:
    """Can anybody load it without running foreign code?"""
    try:
        load_bytes(content, "", room=room)
    except FileError:
        return False
    return True
