"""An optimizer of the gates' own, for loops whose optimizer holds every parameter alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, distributed, nn
from torch.optim import Adam

_taken: dict[int, ref[OwnOptimizer]] = {}  # by the parameter's id


class OwnOptimizer:
    """Adam for ``log_alpha``, whose gradient nobody else sees.

    Backward puts the gradient aside and leaves zeros, which change no norm that the weights are
    clipped by. ``hand_over`` brings it back when the step is due; after ``step`` there is none, so
    that an optimizer that holds ``log_alpha``, too, neither moves nor decays it. The newest one of
    a parameter counts, and none that its run has let go of.

    Args:
        log_alpha: the gates.
        lr: their learning rate.
        **options: of Adam.
    """

    def __init__(self, log_alpha: nn.Parameter, lr: float, **options: Any) -> None:
        self._log_alpha = log_alpha
        fused = log_alpha.device.type in ("cpu", "cuda")
        self._adam = Adam([log_alpha], lr=lr, fused=fused, **options)
        self._aside: Tensor | None = None
        self._is_due = False  # what comes now is the penalty's
        free(log_alpha)
        self._hook = log_alpha.register_hook(_asking(ref(self)))
        _taken[id(log_alpha)] = ref(self)

    def put_aside(self, gradient: Tensor) -> Tensor:
        """Keep a gradient for the step, and leave zeros."""
        if self._is_due:
            return gradient
        self._aside = gradient.clone() if self._aside is None else self._aside + gradient
        return torch.zeros_like(gradient)

    def is_of(self, log_alpha: nn.Parameter) -> bool:
        """Return whether these are the gates that it moves."""
        return self._log_alpha is log_alpha

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


def free(log_alpha: nn.Parameter) -> None:
    """Let backward leave the gradient of these gates where it is, whoever put it aside before."""
    known = _taken.pop(id(log_alpha), None)
    found = None if known is None else known()
    if found is not None and found.is_of(log_alpha):
        found.release()


def _asking(owner: ref[OwnOptimizer]) -> Callable[[Tensor], Tensor]:
    """A hook that does nothing once its optimizer is gone."""

    def hook(gradient: Tensor) -> Tensor:
        found = owner()
        return gradient if found is None else found.put_aside(gradient)

    return hook
