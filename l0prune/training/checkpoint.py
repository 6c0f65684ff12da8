"""The complete state of a run in one file, from which it resumes bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from l0prune.errors import FileError, UsageError
from l0prune.files.artifact import named_tensors
from l0prune.files.atomic import atomic_write
from l0prune.files.pickles import load_pickle
from l0prune.running.processes import distribute_like, full_tensor
from l0prune.running.task import Task
from l0prune.training.settings import Settings

NAME = "checkpoint.pt"
_FORMAT = 4

# Settings that a resumed run may change: how fast it learns and at which sizes steps are computed,
# not its objective.
CHANGEABLE = frozenset({"lr", "gate_lr", "clip", "autocast", "compact"})
# Settings that affect the run's numbers only by rounding.
IRRELEVANT = frozenset({
    "device", "out", "resume", "progress", "tensorboard", "compile", "channels_last",
    "checkpointing", "distributed",
})  # fmt: skip


@dataclass
class Checkpoint:
    """State of a run between two steps.

    Attributes:
        settings: those that decide the run's numbers (``fingerprint``).
        models: digests of the weights that the run started from, and of those it left the model
            with when it stopped: it can be resumed only with a model of such weights.
        pruner: state of the ``GateRun``, empty without gates.
        teacher: the tensors of the teacher network, empty without one.
        average: the moving average by name, empty without one.
        scaler: state of the loss scaler of fp16, else empty.
        epoch: number of the next or unfinished epoch, from 0.
        losses: (sum of task losses, sum of penalties, steps counted, seconds) of this epoch so far.
        rng_epoch: random generators of each process when the epoch began; None if it has not.
        records: those of the finished epochs.
        before: measurements before the first step.
        loss: the tensors of a loss that learns, by name, empty without one.
    """

    settings: dict[str, str]
    models: list[str]
    model: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    pruner: dict[str, Any]
    teacher: dict[str, Tensor]
    average: dict[str, Tensor]
    updates: int
    scaler: dict[str, Any]
    epoch: int
    step: int
    losses: tuple[float, float, int, float]
    rng_epoch: list[dict[str, Any]] | None
    rng: list[dict[str, Any]]
    records: list[dict[str, Any]]
    before: dict[str, float] = field(default_factory=dict)
    loss: dict[str, Tensor] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the checkpoint atomically into ``folder``."""
        path = folder / NAME
        atomic_write(path, lambda file: torch.save({"format": _FORMAT, **vars(self)}, file))
        return path

    def check(self, settings: Mapping[str, str], model: str, finished: bool) -> list[str]:
        """Raise UsageError if another run would resume from it; return allowed changes as text.

        ``settings`` are the fingerprint of the run to resume, ``model`` is its model's digest.
        """
        pairs = {name: (self.settings.get(name, "?"), now) for name, now in settings.items()}
        changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        texts = [f"{name} {was} → {now}" for name, (was, now) in changed.items()]
        may_change = set() if finished else CHANGEABLE
        way_on = "give another out (--run), or start it anew with resume=False (--no-resume)"
        if set(changed) - may_change:
            raise UsageError(
                f"the run in this folder had other settings: {', '.join(texts)}. Give those it "
                f"had, {way_on}"
                + (f". Only {', '.join(sorted(may_change))} may change" if may_change else "")
            )
        if model not in self.models:
            raise UsageError(
                "the run in this folder began with other weights than the model has now; load the "
                f"model that it began with, {way_on}"
            )
        return texts


def fingerprint(settings: Settings, task: Task) -> dict[str, str]:
    """Return the settings that decide a run's numbers, as text; they must be equal to resume."""
    chosen = dict(settings) | {"loss": task.loss, "metric": task.metric, "data": task.name}
    found = {name: _text(value) for name, value in chosen.items() if name not in IRRELEVANT}
    if (loss := task.loss_module) is not None:  # whose values are in the checkpoint
        shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(loss)}
        found["loss"] = f"{type(loss).__qualname__} {shapes}"
    return found


def _text(value: Any) -> str:
    """Return a text that is the same in all processes: networks by digest, functions by name."""
    if isinstance(value, nn.Module):
        return f"{type(value).__qualname__} {digest(snapshot(value))}"
    if isinstance(value, partial):
        return f"{_text(value.func)}{value.args}{value.keywords}"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return str(value)


def read(folder: Path) -> Checkpoint | None:
    """Read the checkpoint in ``folder``; None if there is none."""
    path = folder / NAME
    if not path.exists():
        return None
    content = load_pickle(path)
    version = content.pop("format", None) if isinstance(content, dict) else None
    if version != _FORMAT:
        raise FileError(
            f"{path} is not a checkpoint that this version can read; move it away, or start the "
            "run anew with resume=False (--no-resume)"
        )
    try:
        found = Checkpoint(**content)
    except TypeError as error:
        raise FileError(f"{path} is not a complete checkpoint: {error}") from error
    hints = get_type_hints(Checkpoint)
    wrong = [name for name, hint in hints.items() if not _is_of(getattr(found, name), hint)]
    if wrong:
        raise FileError(f"{path} is damaged: {', '.join(wrong)} of the wrong type")
    return found


def _is_of(value: Any, hint: Any) -> bool:
    """Return whether the value is of this type, whose type arguments are ignored."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return isinstance(value, tuple(get_origin(kind) or kind for kind in kinds))


def snapshot(model: nn.Module, *, shares_frozen: bool = False) -> dict[str, Tensor]:
    """Return a copy of ``named_tensors(model)`` on the CPU, unsharded.

    With ``shares_frozen``, frozen parameters are the model's tensors themselves, not copies.
    """
    return {
        name: value.detach()
        if shares_frozen and isinstance(value, nn.Parameter) and not value.requires_grad
        else full_tensor(value.detach()).to("cpu", copy=True)
        for name, value in named_tensors(model)
    }


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of these tensors and their names."""
    result = hashlib.blake2b(digest_size=16)
    for name, value in sorted(tensors.items()):
        result.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        result.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return result.hexdigest()


@torch.no_grad()
def put_back(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Restore a model's tensors in place from a ``snapshot``."""
    own = dict(named_tensors(model))
    shapes = {name: tuple(value.shape) for name, value in own.items()}
    if shapes != {name: tuple(value.shape) for name, value in tensors.items()}:
        differing = sorted(
            name
            for name in own.keys() | tensors.keys()
            if shapes.get(name) != (tuple(tensors[name].shape) if name in tensors else None)
        )
        raise FileError(
            f"the checkpoint is one of another model: {', '.join(differing[:5])} differ"
            f"{'s' if len(differing) == 1 else ''}. Give another out (--run), or resume=False "
            "(--no-resume)"
        )
    for name, value in own.items():
        value.copy_(distribute_like(tensors[name], value))
