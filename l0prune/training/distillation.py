"""Distillation: learning from the network as it was before anything was pruned."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.gating.bank import Gates
from l0prune.gating.gate import ungate
from l0prune.running.device import device_of
from l0prune.running.feed import call
from l0prune.running.task import scores_of
from l0prune.training.checkpoint import put_back, snapshot
from l0prune.training.settings import Settings


class Teacher:
    """A frozen network in eval mode, whose answers the model is to give, too.

    The loss that is learned from is ``(1 − a)·task + a·(T²·KL(teacher ‖ model) + features)``: the
    scores of both softened by the temperature T (Hinton, Vinyals & Dean 2015), and for each
    matched module the mean squared difference of its outputs over the teacher's mean square.

    Args:
        network: the teacher; it is put into eval mode and does not learn.
        model: what learns.
        settings: ``distill`` is a, ``temperature`` T, ``match`` globs of module names.

    Raises:
        UsageError: ``match`` names no module, or one that the teacher has not.
    """

    def __init__(self, network: nn.Module, model: nn.Module, settings: Settings) -> None:
        self._network = network.eval().requires_grad_(False)
        self._share, self._temperature = settings.distill, settings.temperature
        self._own = settings.teacher is None
        names = list(_matching(model, settings.match))
        missing = set(names) - dict(network.named_modules()).keys()
        if missing:
            raise UsageError(f"the teacher has no module {', '.join(sorted(missing))} to match")
        self._features = _Outputs(model, names), _Outputs(network, names)

    @staticmethod
    def of(model: nn.Module, settings: Settings, origin: nn.Module | None = None) -> Teacher | None:
        """The teacher that the settings ask for: their own, or the model as it is now.

        ``origin`` is the model in one piece, where ``model`` itself is in shards.
        """
        if not settings.distill:
            return None
        network = settings.teacher or _as_it_is(origin or model).to(device_of(model))
        return Teacher(network, model, settings)

    def mixed(self, loss: Tensor, outputs: Any, inputs: Any) -> Tensor:
        """The loss to learn from, given the task's and what the model made of ``inputs``."""
        learned, taught = self._features
        with torch.no_grad():
            answers = call(self._network, inputs)
        extra = self._divergence(scores_of(outputs), scores_of(answers))
        for mine, theirs in zip(learned.take(), taught.take(), strict=True):
            extra = (
                extra + F.mse_loss(mine.float(), theirs.float()) / theirs.float().square().mean()
            )
        return (1 - self._share) * loss + self._share * extra

    def _divergence(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """T²·KL between softened class probabilities, the mean over all examples and places."""
        soft = [F.log_softmax(s.float() / self._temperature, 1) for s in (mine, theirs)]
        each = F.kl_div(soft[0], soft[1], reduction="none", log_target=True).sum(1)
        return self._temperature**2 * each.mean()

    def tensors(self) -> dict[str, Tensor]:
        """What a run needs to go on with the same teacher: nothing if the user has it."""
        return snapshot(self._network) if self._own else {}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Become the teacher that a run began with."""
        if self._own:
            put_back(self._network, tensors)

    def close(self) -> None:
        """Leave no hooks behind."""
        for outputs in self._features:
            outputs.close()


class _Outputs:
    """What some modules of a network gave in its last forward."""

    def __init__(self, network: nn.Module, names: list[str]) -> None:
        self._found: dict[str, Any] = {}
        self._names = names
        modules = dict(network.named_modules())
        self._hooks = [modules[name].register_forward_hook(self._keep(name)) for name in names]

    def _keep(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._found[name] = output

        return hook

    def take(self) -> list[Tensor]:
        """The outputs, which are then forgotten."""
        found, self._found = self._found, {}
        for name in self._names:
            if not isinstance(found.get(name), Tensor):
                raise UsageError(
                    f"match: {name} gives no tensor in the forward, so that there is nothing to "
                    "match; name other modules"
                )
        return [found[name] for name in self._names]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _matching(model: nn.Module, match: str | Sequence[str]) -> Iterator[str]:
    globs = (match,) if isinstance(match, str) else match
    names = [name for name, _ in model.named_modules() if name]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UsageError(f"match: no module of this model is called {glob!r}")
    return (name for name in names if any(fnmatchcase(name, glob) for glob in globs))


def _as_it_is(model: nn.Module) -> nn.Module:
    """A copy of a model; without gates, if those are all fully open."""
    twin = copy.deepcopy(model)
    banks = [module for module in twin.modules() if isinstance(module, Gates)]
    if banks and all(bool((gates.z() == 1).all()) for gates in banks):
        ungate(twin)
    return twin
