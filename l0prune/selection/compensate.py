"""Compensation: remaining weights are fitted to the outputs of the dense network's layers.

No labels and no gradients: in the order of the forward, the weights of each layer become the
least-squares map from its inputs in the cut network to its outputs in the dense one. So each layer
also corrects errors of the layers before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.compat import pytree
from l0prune.capture.copying import copied
from l0prune.capture.model_checks import evaluating
from l0prune.data.dataset import map_tensors, without_labels
from l0prune.errors import DataError, warn
from l0prune.files.artifact import named_tensors
from l0prune.gating.attaching import bypass, detach, holder
from l0prune.gating.bank import Gates
from l0prune.gating.multiplying import along
from l0prune.plan.numbers import check_whole
from l0prune.running.batches import Batch, Feed, call
from l0prune.running.criteria import class_dim, is_classification
from l0prune.running.device import choose_device, on_device
from l0prune.running.evaluate import explain_mismatch
from l0prune.running.stages import stage
from l0prune.running.task import Task, batch_length, is_split
from l0prune.selection.division import PROBES, Division
from l0prune.selection.lockstep import real_places
from l0prune.selection.repair import Tandem
from l0prune.selection.score_input import output_tensor

_FEWEST, _ENOUGH = 3, 8  # batches: required, and wanted where their size can be chosen
_NARROW, _ERROR = 2.0, 0.02  # warn above: held-out over fitted error, and held-out error
_NOTHING = 1e-30  # instead of a variance of zero
_PART = 1 << 22  # elements of outputs that are compared at a time
_JUDGED = 5  # one batch in so many is held out to measure the gain
SAMPLES, BATCH_SIZE = 512, 64


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Nearness of a network's outputs to those of the network that it was cut from.

    Attributes:
        error: the mean square of the difference over the variance of the original's outputs.
        agreement: the part of the inputs (of their places, in a dense task) whose largest output is
            the same; None where outputs are single numbers.
    """

    error: float
    agreement: float | None

    def __str__(self) -> str:
        """Return both as text."""
        error = f"error of {self.error:.2%} of the outputs' variance"
        if self.agreement is None:
            return error
        return f"the largest output is the same for {self.agreement:.1%}, {error}"


@dataclass(frozen=True, slots=True)
class Compensation:
    """Gain of a compensation, on held-out inputs.

    Attributes:
        before: of the cut network.
        after: of the compensated one.
        layers: by the name of each weight that was changed, the part of its outputs' variance that
            is left as error.
    """

    before: Fidelity
    after: Fidelity
    layers: dict[str, float]


def compensate(
    model: nn.Module,
    inputs: Any,
    *,
    samples: int = SAMPLES,
    batch_size: int = BATCH_SIZE,
    device: str | torch.device = "auto",
    seed: int = 0,
) -> Compensation:
    """Refit the remaining weights, in place, so that the cut network computes as before the cut.

    Gates do not change. A layer keeps its weights if no others have a smaller error on held-out
    inputs, and so does the whole network.

    Args:
        model: a gated model whose open gates are chosen, for instance by ``fit``.
        inputs: a tensor or mapping of examples, or what ``finetune`` takes, without its labels.
        samples: how many examples are used, at most.
        batch_size: examples at a time, where the source lets us choose.
        device: see ``Settings``.
        seed: of the choice of examples.

    Returns:
        The gain, on held-out inputs.

    Raises:
        NotGated: the model carries no gates.
        DataError: there are too few inputs, or they do not fit the model.
    """
    with calibration(model, inputs, samples, batch_size, device, seed) as found:
        return found.compensate()


@dataclass(frozen=True, slots=True)
class Calibration:
    """A gated model on its device, in eval mode, and the batches that it is calibrated with.

    Attributes:
        root: the module that was gated.
        gates: its bank.
        used: batches of inputs that weights are fitted to.
        judged: held-out batches that measure the gain.
        has_classes: outputs are scores of classes.
    """

    root: nn.Module
    gates: Gates
    used: list[Any]
    judged: list[Any]
    has_classes: bool

    def compensate(self) -> Compensation:
        """Refit the remaining weights, in place; see ``compensate``."""
        root, gates = self.root, self.gates
        with bypass(root), stage("compensating"):
            cut = cut_copy(root, gates)
            before = fidelity(root, cut, self.judged)
            tandem = Tandem(root, cut, gates.plan, gates.plan.kept(gates.open()))
            layers = tandem.run(self.used)
            after = fidelity(root, cut, self.judged)
            seen = fidelity(root, cut, self.used[: len(self.judged)])
        self._warn(tandem, seen.error, after.error)
        if after.error < before.error:
            _write_back(root, cut, gates)
        else:
            after, layers = before, {}
        return Compensation(before, after, layers)

    def _warn(self, tandem: Tandem, seen: float, after: float) -> None:
        if tandem.few:
            name, (rows, features) = max(tandem.few.items(), key=lambda each: each[1][1])
            warn(
                f"layers had fewer samples than inputs ({len(tandem.few)} of them), {name} "
                f"{rows:,} for {features:,}: weights could be repaired in part only. About "
                f"{math.ceil(2 * features / rows)} times as many examples (samples) would do"
            )
        if after > _NARROW * seen and after > _ERROR:
            warn(
                f"outputs differ by {after:.1%} of their variance on inputs that were held out, "
                f"and by {seen:.1%} on those that weights were fitted to: the inputs are few, or "
                "too much alike. Give more of them (samples)"
            )

    def division(self) -> Division:
        """Measure how a cut of each axis alone changes the outputs; see ``division``."""
        with bypass(self.root), stage("looking at each layer cut alone"):
            judge = divergence if self.has_classes else relative_error
            return Division(self.root, self.gates.plan, self.used, self.judged_by(), judge)

    def judged_by(self) -> list[Any]:
        """Return batches, or a part of one, with about ``PROBES`` outputs."""
        first = self.used[0]
        length = batch_length(first, None)
        with torch.no_grad():
            found, dim = _answers(call(self.root, first), first)
        places = found.numel() / (1 if dim is None else found.shape[dim]) / length
        needed = max(1, math.ceil(PROBES / places)) if self.has_classes else PROBES
        if needed < length:
            return [Batch(first, None).head(needed).inputs]
        return self.used[: math.ceil(needed / length)]


@contextmanager
def calibration(
    model: nn.Module,
    inputs: Any,
    samples: int = SAMPLES,
    batch_size: int = BATCH_SIZE,
    device: str | torch.device = "auto",
    seed: int = 0,
) -> Iterator[Calibration]:
    """Yield a gated model on its device, in eval mode, with batches of inputs.

    Raises:
        NotGated: the model carries no gates.
        DataError: there are too few inputs, or they do not fit the model.
    """
    check_whole("samples", samples)
    check_whole("batch_size", batch_size)
    root, gates = holder(model)
    gates.make_whole()
    place = choose_device(device, root)
    with on_device(root, place), evaluating(root):
        pairs = list(inputs_of(inputs, samples, batch_size, place, seed))
        if len(pairs) < _FEWEST:
            raise DataError(
                f"compensation wants {_FEWEST} batches of inputs or more: some to fit the weights, "
                "some to choose how far, some to judge. Here there are "
                f"{len(pairs)}: give more inputs, or a smaller batch_size"
            )
        batches, targets = [inputs for inputs, _ in pairs], pairs[0][1]
        with (
            torch.no_grad(),
            bypass(root),
            explain_mismatch([Batch(*pairs[0])], "model and inputs"),
        ):
            has_classes = are_classes(call(root, batches[0]), targets)
        used = [batch for number, batch in enumerate(batches) if number % _JUDGED]
        yield Calibration(root, gates, used, batches[::_JUDGED], has_classes)


def inputs_of(
    given: Any, samples: int, batch_size: int, place: torch.device, seed: int
) -> Iterator[tuple[Any, Any]]:
    """Yield batches of a model's inputs, with their targets or None, on a device.

    They come in random order where there is a choice.

    Raises:
        DataError: there are none, or some are not finite.
    """
    found: Iterator[tuple[Any, Any]]
    if isinstance(given, Tensor) or _is_example(given):
        generator = torch.Generator().manual_seed(seed)
        count = len(given) if isinstance(given, Tensor) else len(next(iter(given.values())))
        size = _size(batch_size, min(count, samples))
        order = torch.randperm(count, generator=generator)[:samples].split(size)
        found = ((_rows(given, index, place), None) for index in order)
    else:
        task = Task.of(given)
        if is_split(task.train):
            batch_size = _size(batch_size, min(len(task.train), samples))
        feed = Feed(task, batch_size, seed, augment=False)
        found = ((batch.inputs, batch.targets) for batch in feed.train(0, place))
        if not is_split(task.train):
            found = _shuffled(found, samples, seed)
    left = samples
    for inputs, targets in found:
        if left <= 0:
            return
        left -= batch_length(inputs, targets)
        _check_finite(inputs)
        yield without_labels(inputs), targets


def _shuffled(
    batches: Iterator[tuple[Any, Any]], samples: int, seed: int
) -> Iterator[tuple[Any, Any]]:
    """Yield the first batches of so many examples in random order.

    Batches of a user are often sorted (files of one text after another), and the first ones would
    be used most.
    """
    held: list[tuple[Any, Any]] = []
    for batch in batches:
        held.append(batch)
        samples -= batch_length(*batch)
        if samples <= 0:
            break
    for number in torch.randperm(len(held), generator=torch.Generator().manual_seed(seed)):
        yield held[number]


def _rows(given: Any, index: Tensor, place: torch.device) -> Any:
    return map_tensors(given, lambda tensor: tensor[index].to(place))


def _size(batch_size: int, examples: int) -> int:
    """Return a batch size, reduced so that there are ``_ENOUGH`` batches."""
    return max(1, min(batch_size, examples // _ENOUGH))


def _is_example(given: Any) -> bool:
    is_mapping = isinstance(given, Mapping) and bool(given)
    return is_mapping and all(isinstance(value, Tensor) for value in given.values())


def _check_finite(batch: Any) -> None:
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.isfinite().all():
            raise DataError("the inputs hold numbers that are not finite (NaN or infinite)")


def fidelity(dense: nn.Module, other: nn.Module, batches: Iterable[Any]) -> Fidelity:
    """Return how close a network's outputs are to another's; both in eval mode."""
    apart, alike, count = _Apart(), 0.0, 0
    with torch.no_grad():
        for batch in batches:
            wanted, dim = _answers(call(dense, batch), batch)
            found, _ = _answers(call(other, batch), batch)
            for mine, theirs in _parts(dim, found, wanted):
                apart.add(mine, theirs, dim)
                if dim is not None:
                    same = theirs.argmax(dim) == mine.argmax(dim)
                    alike, count = alike + float(same.sum()), count + same.numel()
    return Fidelity(apart.share(), alike / count if count else None)


def are_classes(outputs: Any, targets: Any) -> bool:
    """Return whether outputs are scores of classes: by the targets, or since they are logits."""
    if class_dim(outputs) is None:
        return False
    return is_classification(outputs, targets) or not isinstance(outputs, Tensor)


def divergence(wanted: Any, batch: Any) -> Callable[[Any], float]:
    """Return a function from outputs to the mean KL(wanted‖found) of class scores, in nats.

    It is Σ p log p − Σ p·found + log Σ exp found, with p the softmax of the wanted scores.
    """
    scores, found_dim = _answers(wanted, batch)
    dim = found_dim or 1
    p = scores.float().softmax(dim)
    own = sum(_total(torch.special.xlogy(part, part)) for (part,) in _parts(dim, p))
    count = p.numel() / p.shape[dim]

    def judge(outputs: Any) -> float:
        error = own
        for found, part in _parts(dim, _answers(outputs, batch)[0], p):
            found = found.float()
            error += _total(found.logsumexp(dim)) - _total(part * found)
        return max(0.0, error / count)

    return judge


def _parts(dim: int | None, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield small parts of tensors of one shape, whole along ``dim``."""
    size, at = max((size, at) for at, size in enumerate(tensors[0].shape) if at != dim)
    step = max(1, _PART * size // max(1, tensors[0].numel()))
    return zip(*(tensor.split(step, at) for tensor in tensors), strict=True)


def _total(values: Tensor) -> float:
    return float(values.sum(dtype=torch.float64))


def relative_error(wanted: Any, batch: Any) -> Callable[[Any], float]:
    """Return a function from outputs to their squared error over the wanted ones' variance."""
    theirs, dim = _answers(wanted, batch)

    def judge(outputs: Any) -> float:
        apart = _Apart()
        apart.add(_answers(outputs, batch)[0], theirs, dim)
        return apart.share()

    return judge


class _Apart:
    """Squared error of outputs over the variance of the wanted outputs, streamed.

    The variance is about the mean of each class, or channel, over examples and places.
    """

    def __init__(self) -> None:
        self.count, self.error, self.squares = 0, 0.0, 0.0
        self.total = torch.zeros(())

    def add(self, found: Tensor, wanted: Tensor, dim: int | None) -> None:
        """Count a batch; ``dim`` is that of the classes, or None."""
        at = dim or min(1, wanted.dim() - 1)
        others = [other for other in range(wanted.dim()) if other != at or not at]
        self.count += wanted.numel() // (wanted.shape[at] if at else 1)
        self.total = self.total + wanted.sum(others, dtype=torch.float64)
        self.error += _square(found - wanted)
        self.squares += _square(wanted)

    def share(self) -> float:
        """Return the mean square of the error over the variance; of one example over its square."""
        mean = float(self.total.square().sum()) / max(self.count, 1)
        scale = self.squares - mean if self.count > 1 else self.squares
        return self.error / max(scale, _NOTHING)


def _square(values: Tensor) -> float:
    """Return the sum of squares."""
    return float(torch.linalg.vector_norm(values.flatten(), dtype=torch.float64)) ** 2


def _answers(outputs: Any, batch: Any) -> tuple[Tensor, int | None]:
    """Return outputs for a batch as one tensor, and its dim of classes.

    Of sequences with padding: the other places alone, all in one dim.
    """
    found, real = torch.atleast_1d(output_tensor(outputs)), real_places(batch)
    if real is None or found.shape[:2] != real.shape:
        return found, class_dim(outputs)
    return found[real], None if class_dim(outputs) is None else 1


def cut_copy(root: nn.Module, gates: Gates) -> nn.Module:
    """Return a copy without gates whose tensors are multiplied by them."""
    result = copied(root)
    detach(result)
    tensors = dict(named_tensors(result))
    for name, by in multipliers(gates, tensors).items():
        tensors[name].data.mul_(by.to(tensors[name]))
    return result


def multipliers(gates: Gates, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the multiplier of each gated tensor in eval mode, by name, to be broadcast."""
    found: dict[str, Tensor] = {}
    z = gates.z()
    for site in gates.plan.sites:
        spread = along(tensors[site.tensor], gates.plan.spread(site.layout, z), site.dim)
        found[site.tensor] = found.get(site.tensor, 1.0) * spread
    return found


def _write_back(root: nn.Module, cut: nn.Module, gates: Gates) -> None:
    """Copy changed tensors into the gated model, divided by the gates that multiply them."""
    mine, theirs = dict(named_tensors(root)), dict(named_tensors(cut))
    by = multipliers(gates, theirs)
    with torch.no_grad():
        for name, new in theirs.items():
            old = mine[name]
            if name in by:
                z = by[name].to(old)
                old.copy_(torch.where(z != 0, new / torch.where(z != 0, z, 1), old))
            elif not torch.equal(old, new):
                old.copy_(new)
