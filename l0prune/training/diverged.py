"""What to say when training has run into nan or inf."""

from __future__ import annotations

from l0prune.errors import TrainingError
from l0prune.training.settings import Settings


def diverged(
    what: str, where: str, settings: Settings, epochs_done: int, *, gated: bool
) -> TrainingError:
    """The error for a loss or weight that is no number, with its usual causes and the way on.

    Args:
        what: what was found.
        where: in which epoch and step.
        settings: of the run.
        epochs_done: epochs that are in the checkpoint.
        gated: the model has gates.
    """
    causes = [f"a learning rate too high (lr={settings.lr:g})"]
    ways = ["a smaller lr", "clip=1.0"]
    if gated:
        rate = "by the steps" if settings.gate_lr is None else f"{settings.gate_lr:g}"
        causes.append(f"or one of the gates (gate_lr={rate})")
    causes.append("a nan in the data")
    if settings.autocast == "fp16":
        causes.append("the range of fp16")
        ways.append("autocast='bf16'")
    return TrainingError(
        f"training stopped in {where}: {what}. Usual causes: {', '.join(causes)}. "
        f"Try {' or '.join(ways)}. {_kept(settings, epochs_done)}"
    )


def _kept(settings: Settings, epochs_done: int) -> str:
    if settings.out is None:
        return "There is no checkpoint, since out was not given."
    if not epochs_done:
        return "No epoch was done, so there is no checkpoint."
    return (
        f"The checkpoint of epoch {epochs_done} is in {settings.out}; "
        "with resume=True these changes apply from there."
    )
