"""A Pruner's state as a file beside a framework's checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from l0prune.errors import FileError
from l0prune.files.atomic import atomic_write
from l0prune.files.loading import load_pickle
from l0prune.training.pruner import Pruner

NAME = "l0prune.pt"


def write(pruner: Pruner, folder: Path) -> None:
    """Write the state into a checkpoint's folder, whole or not at all.

    Raises:
        FileError: the folder cannot be written.
    """
    atomic_write(folder / NAME, lambda file: torch.save(pruner.state_dict(), file))


def read(pruner: Pruner, folder: Path) -> None:
    """Take up the state in a checkpoint's folder.

    Raises:
        FileError: there is none, or it cannot be read.
        UsageError: it is of another model or run.
    """
    path = folder / NAME
    if not path.exists():
        raise FileError(
            f"{folder} has no {NAME}, in which the gates' part of a checkpoint is kept: it was "
            "written without l0prune's callback, or the Trainer goes on from a checkpoint of "
            "another output_dir: then name it in TrainingArguments(resume_from_checkpoint=…), too"
        )
    pruner.load_state_dict(load_pickle(path))
