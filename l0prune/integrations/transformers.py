"""Gates in ``transformers.Trainer``::

    model = l0prune.gate(model, kwargs=tokens)
    pruner = l0prune.Pruner(model, budget="macs=0.5", steps=1000)  # as many as the run has
    trainer = Trainer(model, TrainingArguments(..., max_steps=1000), callbacks=[L0Callback(pruner)])
    trainer.train()
    small = l0prune.export(model)

The pruner's state is a file in each checkpoint folder of the Trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from l0prune.errors import FileError
from l0prune.files.atomic import atomic_write
from l0prune.files.pickles import load_pickle
from l0prune.integrations import check_belongs
from l0prune.training.pruner import Pruner

NAME = "l0prune.pt"


def read(pruner: Pruner, folder: Path) -> None:
    """Restore the pruner's state from a checkpoint's folder.

    Raises:
        FileError: there is no state, or it cannot be read.
        UsageError: the state is of another model or run.
    """
    path = folder / NAME
    if not path.exists():
        raise FileError(
            f"{folder} has no {NAME}, in which the gates' part of a checkpoint is kept: it was "
            "written without l0prune's callback, or the Trainer goes on from a checkpoint of "
            "another output_dir: then name it in TrainingArguments(resume_from_checkpoint=…), too"
        )
    pruner.load_state_dict(load_pickle(path))


class L0Callback(TrainerCallback):  # type: ignore[misc]
    """Callback that prunes in a Trainer: its optimizer never moves gates, its loss has no penalty.

    The gates learn by a separate optimizer, after accumulation and clipping. The pruner's metrics
    are in the Trainer's log under ``l0/``, its state in the checkpoints.

    Args:
        pruner: of the model that the Trainer has, for as many steps as it does.
    """

    def __init__(self, pruner: Pruner) -> None:
        self.pruner = pruner
        # A Trainer changes this setting, and so the model's outputs; it is restored at the end.
        self._use_cache = getattr(_config(pruner), "use_cache", None)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Check that model and steps are the pruner's, and restore its state when resuming.

        Raises:
            UsageError: the Trainer has another model, or does another number of steps.
            FileError: the checkpoint has no state of gates.
        """
        check_belongs(self.pruner, given["model"], state.max_steps)
        self.pruner.take_gates()
        if state.global_step:
            read(self.pruner, _resumed_from(args, state.global_step))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Update the gates after accumulation and clipping."""
        optimizer = given["optimizer"]
        scaler = getattr(optimizer, "scaler", None)
        self.pruner.before_step(optimizer, scale=1.0 if scaler is None else scaler.get_scale())

    def on_step_end(self, *_: Any, **given: Any) -> None:
        """Advance the pruner by one step."""
        self.pruner.after_step()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **given: Any,
    ) -> None:
        """Add the pruner's metrics to the log."""
        found = {f"l0/{name}": round(value, 6) for name, value in self.pruner.metrics().items()}
        for each in (logs, state.log_history[-1] if state.log_history else None):
            if each is not None:
                each.update(found)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Write the pruner's state into the checkpoint's folder."""
        if state.is_world_process_zero:
            path = _folder(args, state.global_step) / NAME
            atomic_write(path, lambda file: torch.save(self.pruner.state_dict(), file))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Fix the gates, those of the best checkpoint if loaded, such that the budget is met."""
        if args.load_best_model_at_end and state.best_model_checkpoint:
            read(self.pruner, Path(state.best_model_checkpoint))
        self.pruner.finish()
        self.pruner.release_gates()
        if self._use_cache is not None:
            _config(self.pruner).use_cache = self._use_cache


def _config(pruner: Pruner) -> Any:
    return getattr(pruner.model, "config", None)


def _resumed_from(args: TrainingArguments, step: int) -> Path:
    """Return the checkpoint that the Trainer resumes from, of which callbacks get only the step."""
    named = args.resume_from_checkpoint
    return Path(named) if named and Path(named).is_dir() else _folder(args, step)


def _folder(args: TrainingArguments, step: int) -> Path:
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
