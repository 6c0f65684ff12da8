"""Gates in Lightning's ``Trainer``.

l0prune.gate(module.network, x)
pruner = l0prune.Pruner(module.network, budget="macs=0.5", steps=1000)  # as many as the run has
trainer = lightning.Trainer(max_steps=1000, callbacks=[L0Callback(pruner)])
trainer.fit(module, batches)
small = l0prune.export(module.network)
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from l0prune.integrations import check_belongs
from l0prune.training.pruner import Pruner


class L0Callback(Callback):
    """Callback that prunes in a Trainer: its optimizers never move gates, its loss has no penalty.

    The gates learn by a separate optimizer, once per optimizer step. The pruner's metrics are
    logged under ``l0/``; its state is in the checkpoints.

    Args:
        pruner: of the module in training or a part of it, for as many steps as the run has.
    """

    def __init__(self, pruner: Pruner) -> None:
        self.pruner = pruner
        self._is_due = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that model and number of steps are the pruner's.

        Raises:
            UsageError: the Trainer has another model, or does another number of steps.
        """
        check_belongs(self.pruner, pl_module, trainer.estimated_stepping_batches)
        self.pruner.take_gates()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Update the gates after accumulation, before the first optimizer of a step."""
        if not self._is_due:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scale = 1.0 if scaler is None else scaler.get_scale()
            self.pruner.before_step(*trainer.optimizers, scale=scale)
            self._is_due = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **given: Any
    ) -> None:
        """Advance the pruner by one step, and log its metrics."""
        if not self._is_due:
            return
        self._is_due = False
        self.pruner.after_step()
        if self.pruner.step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            found = self.pruner.metrics()
            pl_module.log_dict({f"l0/{name}": value for name, value in found.items()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fix the gates, such that the budget is met."""
        self.pruner.finish()
        self.pruner.release_gates()

    def state_dict(self) -> dict[str, Any]:
        """Return the pruner's part of a checkpoint."""
        return self.pruner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the pruner's part of a checkpoint.

        Raises:
            UsageError: the part is of another model or run.
        """
        self.pruner.load_state_dict(state_dict)
