"""Distillation: learning from the network as it was before anything was pruned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from l0prune.capture.copying import copied
from l0prune.capture.model_checks import evaluating, modes_kept
from l0prune.errors import UsageError
from l0prune.gating.attaching import bypass, detach, gates_or_none
from l0prune.gating.bank import Gates
from l0prune.plan.globs import named
from l0prune.running.batches import Feed, call
from l0prune.running.criteria import class_dim, distance, needed_tensor
from l0prune.running.device import device_of, on_device
from l0prune.running.evaluate import check_first_batch
from l0prune.training.checkpoint import put_back, snapshot
from l0prune.training.gate_settings import GATES
from l0prune.training.settings import Settings

# Part of the model's loss by which the teacher's may be larger.
_WORSE = 0.1


class Teacher:
    """A frozen network in eval mode, whose outputs the model learns to reproduce.

    The loss that is learned from is ``(1 − a)·task + a·(T²·KL(teacher ‖ model) + features)``: the
    scores of both softened by the temperature T (Hinton, Vinyals & Dean 2015), where the outputs
    have one column only their mean squared difference instead of the divergence, and for each
    matched module the mean squared difference of its outputs over the teacher's mean square.
    """

    def __init__(self, network: nn.Module, model: nn.Module, settings: Settings) -> None:
        self._share, self._temperature = settings.distill, settings.temperature
        self._own, self._is_itself = settings.teacher is None, network is model
        self._match = names = _matching(model, settings.match)
        missing = set(names) - dict(network.named_modules()).keys()
        if missing:
            raise UsageError(f"the teacher has no module {', '.join(sorted(missing))} to match")
        self._network, self._model = network, model
        self._before = ExitStack()
        if not self._is_itself:
            self._before.enter_context(_frozen(network, device_of(model)))
        self._features = _Outputs(model, names), _Outputs(network, names)

    @staticmethod
    def of(model: nn.Module, settings: Settings, origin: nn.Module | None = None) -> Teacher:
        """Return the teacher by the settings: a given network, or the model without its gates.

        ``origin`` is the unsharded model, if ``model`` is sharded.
        """
        network = settings.teacher
        if network is not None and (network is model or network is origin):
            raise UsageError(
                "the teacher is the model itself, which is to learn from it: leave teacher out, "
                "and it is the model without its gates, or give a copy (copy.deepcopy)"
            )
        if network is None:
            whole = model if origin is None else origin
            is_itself = settings.learn == GATES and not settings.match and whole is model
            network = model if is_itself else _dense(whole)
        return Teacher(network, model, settings)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Let the network answer as the teacher within the context, without gradients."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self._is_itself:
                stack.enter_context(evaluating(self._network))
                stack.enter_context(bypass(self._network))
            yield

    def before(self, feed: Feed, device: torch.device, autocast: str | None) -> dict[str, str]:
        """Return the complaint of a teacher that is worse than the model before the first step."""
        mine = check_first_batch(self._model, feed, device, autocast)
        with self._asked():
            theirs = check_first_batch(self._network, feed, device, autocast)
        for outputs in self._features:
            outputs.forget()
        if mine is None or theirs is None or theirs - mine <= _WORSE * abs(mine):
            return {}
        advice = (
            "Once weights have learned together with gates, the model without its gates is no "
            "trained network: give teacher=, the network as it was before it was gated"
            if self._own
            else "Is it the network that you meant?"
        )
        return {
            "teacher": "the teacher is worse than the model: on one batch its loss is "
            f"{theirs:.3g}, the model's {mine:.3g}. {advice}"
        }

    @property
    def needs_whole(self) -> str:
        """Reason why the model cannot be cut while it learns from this teacher; else empty."""
        if self._is_itself:
            return "without its gates it is its own teacher. l0prune.with_pseudo_labels needs none"
        return "match compares what its modules give with what the teacher's do" * bool(self._match)

    def mixed(self, loss: Tensor, outputs: Any, inputs: Any) -> Tensor:
        """Return the task's loss mixed with distillation, by the model's outputs for ``inputs``."""
        learned, taught = self._features
        with self._asked():
            answers = call(self._network, inputs)
        extra = self._distance(_answer(outputs), _answer(answers), class_dim(outputs))
        for mine, theirs in zip(learned.take(), taught.take(), strict=True):
            extra = (
                extra + F.mse_loss(mine.float(), theirs.float()) / theirs.float().square().mean()
            )
        return (1 - self._share) * loss + self._share * extra

    def _distance(self, mine: Tensor, theirs: Tensor, dim: int | None) -> Tensor:
        """Return ``distance`` of outputs, which must have one shape."""
        if mine.shape != theirs.shape:
            raise UsageError(
                f"the teacher gives {tuple(theirs.shape)}, the model {tuple(mine.shape)}: distill "
                "compares their outputs, which must have one shape"
            )
        return distance(mine, theirs, self._temperature, dim)

    def tensors(self) -> dict[str, Tensor]:
        """Return the teacher's tensors for the checkpoint, unless it is the model or the user's."""
        return snapshot(self._network) if self._own and not self._is_itself else {}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the tensors of the teacher that the run began with."""
        if self._own and not self._is_itself:
            put_back(self._network, tensors)

    def close(self) -> None:
        """Remove all hooks, and restore the teacher's device, modes and ``requires_grad``."""
        for outputs in self._features:
            outputs.close()
        self._before.close()


def _answer(outputs: Any) -> Tensor:
    """Return the tensor in a network's outputs that is compared."""
    otherwise = "; distill needs one that returns a tensor, or has one as .logits"
    return needed_tensor(outputs, otherwise)


@contextmanager
def taught(
    model: nn.Module, settings: Settings, origin: nn.Module | None = None
) -> Iterator[Teacher]:
    """Provide the teacher by the settings within the context; see ``Teacher.of``."""
    teacher = Teacher.of(model, settings, origin)
    try:
        yield teacher
    finally:
        teacher.close()


class _Outputs:
    """Outputs of some modules of a network in its last forward."""

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
        """Return the outputs and drop them."""
        found = self._found
        self.forget()
        for name in self._names:
            if not isinstance(found.get(name), Tensor):
                raise UsageError(
                    f"match: {name} gives no tensor in the forward, so that there is nothing to "
                    "match; name other modules"
                )
        return [found[name] for name in self._names]

    def forget(self) -> None:
        """Drop the stored outputs."""
        self._found = {}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _matching(model: nn.Module, match: str | Sequence[str]) -> list[str]:
    banks = {id(m) for bank in model.modules() if isinstance(bank, Gates) for m in bank.modules()}
    names = [name for name, module in model.named_modules() if name and id(module) not in banks]
    return named(names, match, "match", "module")


def _dense(model: nn.Module) -> nn.Module:
    """Return a copy of the model with its present weights, without gates."""
    try:
        twin = copied(model)
    except UsageError as error:
        raise UsageError(
            "distill copies the model, so that it learns from what it was, and this model cannot "
            f"be copied (copy.deepcopy): {error.__cause__}. Give teacher=, the network before it "
            "was gated"
        ) from error
    if gates_or_none(twin) is not None:
        detach(twin)
    return twin


@contextmanager
def _frozen(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Keep the network on ``device``, in eval mode and frozen, within the context."""
    learned = [parameter for parameter in network.parameters() if parameter.requires_grad]
    try:
        with modes_kept(network), on_device(network, device):
            network.eval().requires_grad_(False)
            yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)
