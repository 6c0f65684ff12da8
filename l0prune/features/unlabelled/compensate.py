"""Compensation: remaining weights are fitted to the outputs of the dense network's layers.

No labels and no gradients: in the order of the forward, the weights of each layer become the
least-squares map from its inputs in the cut network to its outputs in the dense one. So each layer
also corrects errors of the layers before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.copying import copied
from l0prune.capture.model_checks import evaluating
from l0prune.errors import DataError, warn
from l0prune.features.unlabelled.division import PROBES, Division
from l0prune.features.unlabelled.fidelity import (
    Classes,
    Fidelity,
    answers_of,
    classes_of,
    divergence,
    fidelities,
    relative_error,
)
from l0prune.features.unlabelled.probes import beginning
from l0prune.features.unlabelled.repair import LARGEST, Tandem
from l0prune.files.artifact import named_tensors
from l0prune.gating.attaching import bypass, detach, holder
from l0prune.gating.bank import Gates
from l0prune.gating.multiplying import along
from l0prune.plan.cost import cost_of
from l0prune.plan.numbers import check_whole
from l0prune.plan.plan import Plan
from l0prune.progress.display import displayed
from l0prune.progress.stages import stage
from l0prune.running.batches import Batch, call
from l0prune.running.criteria import measured
from l0prune.running.device import choose_device, on_device
from l0prune.running.evaluate import explain_mismatch
from l0prune.running.inputs import inputs_for, inputs_of
from l0prune.running.output_parts import Parts, in_parts
from l0prune.running.task import batch_length

_FEWEST = 3  # batches
_NARROW, _ERROR = 2.0, 0.02  # warn above: held-out over fitted error, and held-out error
_WORK, _FEWEST_PROBES = 1e12, 16  # multiply-adds for all axes, but with so many outputs at least
JUDGED = 5  # one batch in so many is held out to measure the gain
SAMPLES, BATCH_SIZE = 512, 64


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

    def warn_if_useless(self) -> None:
        """Warn of a network whose outputs are no nearer than their mean."""
        if self.after.is_useless:
            warn(f"{self.after.uselessness}. Give a larger budget, or more inputs (samples)")


@displayed
def compensate(
    model: nn.Module,
    inputs: Any,
    *,
    samples: int = SAMPLES,
    batch_size: int = BATCH_SIZE,
    device: str | torch.device = "auto",
    seed: int = 0,
    class_dim: int | None = None,
    progress: bool = True,
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
        class_dim: see ``shrink``.
        progress: show progress on stderr.

    Returns:
        The gain, on held-out inputs.

    Raises:
        NotGated: the model carries no gates.
        DataError: there are too few inputs, or they do not fit the model.
    """
    with calibration(model, inputs, samples, batch_size, device, seed, class_dim) as found:
        result = found.compensate()
        result.warn_if_useless()
        return result


@dataclass(frozen=True, slots=True)
class Calibration:
    """A gated model on its device, in eval mode, and the batches that it is calibrated with.

    Attributes:
        root: the module that was gated.
        gates: its bank.
        used: batches of inputs that weights are fitted to.
        judged: held-out batches that measure the gain.
        classes: which dim of the outputs holds classes.
        parts: of the outputs, which count alike.
        is_shared: the weights are another model's, too: they are replaced, not written to.
    """

    root: nn.Module
    gates: Gates
    used: list[Any]
    judged: list[Any]
    classes: Classes
    parts: Parts
    is_shared: bool

    def compensate(self) -> Compensation:
        """Refit the remaining weights, in place; see ``compensate``."""
        root, gates = self.root, self.gates
        with bypass(root), stage("compensating"):
            cut = cut_copy(root, gates)
            tandem = Tandem(root, cut, gates.plan, gates.plan.kept(gates.open()))
            layers = tandem.run(self.used)
            after, before = self._fidelities(self.judged, partial(call, cut), self._gated)
            few = self.used[: max(1, len(self.judged) // 2)]
            (seen,) = self._fidelities(few, partial(call, cut))
        self._warn(tandem, seen.error, after.error)
        if after.error < before.error:
            _write_back(root, cut, gates, is_shared=self.is_shared)
        else:
            after, layers = before, {}
        return Compensation(before, after, layers)

    def _fidelities(self, batches: list[Any], *others: Callable[[Any], Any]) -> list[Fidelity]:
        asked = self.classes.dim_of, self.gates.outputs, self.parts
        return fidelities(self.root, others, batches, *asked)

    def _gated(self, batch: Any) -> Any:
        """Return the outputs with gates, where they are bypassed."""
        self.gates.bypassed = False
        try:
            return call(self.root, batch)
        finally:
            self.gates.bypassed = True

    def _warn(self, tandem: Tandem, seen: float, after: float) -> None:
        if tandem.few:
            name, (rows, features) = max(tandem.few.items(), key=lambda each: each[1][1])
            warn(
                f"layers had fewer samples than inputs, or hardly more ({len(tandem.few)} of "
                f"them), {name} {rows:,} for {features:,}: weights could be repaired in part or "
                "not at all. About "
                f"{math.ceil(2 * features / rows)} times as many examples (samples) would do"
            )
        if tandem.large:
            name, features = max(tandem.large.items(), key=lambda each: each[1])
            warn(
                f"layers of more than {LARGEST:,} inputs keep their weights ({len(tandem.large)} "
                f"of them), {name} of {features:,}: repairing them would take too much memory"
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
            of_parts = partial(relative_error, parts=self.parts)
            judge = divergence if self.classes.are_scores else of_parts
            by = partial(judge, classes=self.classes.dim_of, names=self.gates.outputs)
            return Division(self.root, self.gates.plan, *self.divided(), by)

    def divided(self) -> tuple[list[Any], list[Any]]:
        """Return batches to fit weights to, and others, or a part of one, to compare outputs on.

        The latter have about ``PROBES`` outputs, fewer of slow networks, but are a third of all at
        most. Of long sequences it is as many places of two examples each.
        """
        first, plan = self.used[0], self.gates.plan
        length = batch_length(first, None)
        with torch.no_grad():
            outputs = call(self.root, first)
            found = answers_of(outputs, first, self.classes.dim_of, self.gates.outputs)
        places = found.places / length
        if self.classes.are_scores and places > PROBES:
            count = min(1 if length > 1 else 2, len(self.used) - 1)
            given = [Batch(each, None).head(2).inputs for each in self.used[:count]]
            parts = [beginning(self.root, each, PROBES, self.gates.outputs) for each in given]
            if all(part is not None for part in parts):
                return self.used[count:], parts
        needed = examples_compared(plan)
        if self.classes.are_scores:
            needed = math.ceil(needed / places)
        if needed < length:
            return self.used[1:], [Batch(first, None).head(needed).inputs]
        count = min(math.ceil(needed / length), max(1, len(self.used) // 3))
        return self.used[count:], self.used[:count]


def examples_compared(plan: Plan) -> int:
    """Return the number of examples whose outputs a division compares, each of one answer."""
    work = len(plan.axes) * cost_of(plan).dense_amount("macs")
    return min(PROBES, max(_FEWEST_PROBES, int(_WORK / max(work, 1))))


@contextmanager
def calibration(
    model: nn.Module,
    inputs: Any,
    samples: int = SAMPLES,
    batch_size: int = BATCH_SIZE,
    device: str | torch.device = "auto",
    seed: int = 0,
    class_dim: int | None = None,
    *,
    is_shared: bool = False,
) -> Iterator[Calibration]:
    """Yield a gated model on its device, in eval mode, with batches of inputs.

    Args:
        is_shared: see ``Calibration``.

    Raises:
        NotGated: the model carries no gates.
        DataError: there are too few inputs, or they do not fit the model.
    """
    check_whole("samples", samples)
    check_whole("batch_size", batch_size)
    root, gates = holder(model)
    gates.make_whole()
    place = choose_device(device, root)
    with on_device(root, place), evaluating(root), _without_caches(root):
        given = inputs_for(root, inputs)
        batch_size = getattr(root, "fixed_batch", 0) or batch_size  # of an ONNX file's graph
        pairs = list(inputs_of(given, samples, batch_size, place, seed))
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
            outputs, parts = in_parts(root, batches[0], gates.outputs)
            classes = classes_of(measured(outputs, gates.outputs), targets, class_dim)
        used = [batch for number, batch in enumerate(batches) if number % JUDGED]
        yield Calibration(root, gates, used, batches[::JUDGED], classes, parts, is_shared)


@contextmanager
def _without_caches(model: nn.Module) -> Iterator[None]:
    """Let decoders return no keys and values, which would be held for all inputs and layers."""
    configs = {
        id(config): config for m in model.modules() if (config := getattr(m, "config", None))
    }
    caching = [each for each in configs.values() if getattr(each, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


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


@torch.no_grad()
def _write_back(root: nn.Module, cut: nn.Module, gates: Gates, *, is_shared: bool) -> None:
    """Move changed tensors into the gated model, divided by the gates that multiply them."""
    mine, theirs = dict(named_tensors(root)), dict(named_tensors(cut))
    by = multipliers(gates, theirs)
    for name, new in theirs.items():
        old = mine[name]
        if name in by:
            z = by.pop(name).to(old)
            new.data = torch.where(z != 0, new / torch.where(z != 0, z, 1), old)
        if torch.equal(old, new):
            new.data = old.data  # one tensor at a time is held twice
        elif is_shared:
            old.data = new.data
        else:
            old.copy_(new)
