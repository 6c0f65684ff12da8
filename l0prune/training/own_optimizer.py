"""An optimizer of the gates' own, for loops whose optimizer holds every parameter alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Adam


class OwnOptimizer:
    """Adam for ``log_alpha``, whose gradient nobody else sees.

    Backward puts the gradient aside and leaves zeros, which change no norm that the weights are
    clipped by. ``hand_over`` brings it back when the step is due; after ``step`` there is none, so
    that an optimizer that holds ``log_alpha``, too, neither moves nor decays it.

    Args:
        log_alpha: the gates.
        lr: their learning rate.
        **options: of Adam.
    """

    def __init__(self, log_alpha: nn.Parameter, lr: float, **options: Any) -> None:
        self._log_alpha = log_alpha
        self._adam = Adam([log_alpha], lr=lr, **options)
        self._aside: Tensor | None = None
        self._is_due = False  # what comes now is the penalty's
        self._hook = log_alpha.register_hook(self._put_aside)

    def _put_aside(self, gradient: Tensor) -> Tensor:
        if self._is_due:
            return gradient
        self._aside = gradient.clone() if self._aside is None else self._aside + gradient
        return torch.zeros_like(gradient)

    def hand_over(self) -> None:
        """Let ``log_alpha`` have its gradient, the mean over all processes."""
        if self._aside is None:
            self._aside = torch.zeros_like(self._log_alpha)
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(self._aside)
            self._aside /= distributed.get_world_size()
        self._log_alpha.grad, self._aside, self._is_due = self._aside, None, True

    def step(self, scale: float | Tensor = 1.0) -> None:
        """Move the gates by their gradient without its scale, unless that made it overflow."""
        gradient = self._log_alpha.grad
        if gradient is not None and bool(gradient.isfinite().all()):
            self._log_alpha.grad = gradient / scale
            self._adam.step()
        self._log_alpha.grad, self._is_due = None, False

    def release(self) -> None:
        """Let backward leave the gradient where it was."""
        self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Adam's."""
        return self._adam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave."""
        self._adam.load_state_dict(state)
