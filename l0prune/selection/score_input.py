"""Input of a score: a gated network, and its outputs, losses and gradients on some batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.undisturbed import trying
from l0prune.errors import UsageError
from l0prune.gating.bank import Gates
from l0prune.plan.plan import Plan
from l0prune.progress.stages import steps
from l0prune.running import rng
from l0prune.running.batches import Batch, Feed, call
from l0prune.running.criteria import joined, measured
from l0prune.running.device import choose_device, on_device, precision
from l0prune.running.evaluate import batch_statistics, check_first_batch
from l0prune.running.output_parts import in_units, numbered, units_of
from l0prune.running.task import Task, batch_length


@dataclass(frozen=True, slots=True)
class ScoreInput:
    """A gated network with the data that a score is computed from.

    Methods that use data raise a UsageError if there is none, or if the model has no such output,
    and a DataError if the data is empty or does not fit the model.

    Attributes:
        root: the module that was gated.
        gates: its bank.
        task: the data and the loss, or None.
        batches: see ``score``; as are ``batch_size``, ``device`` and ``seed``.
        autocast: of the forwards whose gradients are taken; see ``Settings``.
    """

    root: nn.Module
    gates: Gates
    task: Task | None
    batches: int | None
    batch_size: int
    device: str | torch.device
    seed: int
    autocast: str | None = None

    @property
    def plan(self) -> Plan:
        """Plan of the gates."""
        return self.gates.plan

    def tensors(self) -> dict[str, Tensor]:
        """Return the plain parameters, without gates, by the names that the plan has for them."""
        named = self.root.named_parameters()
        return {self.plan.aliases.get(name, name): value.detach() for name, value in named}

    def gradients(self, at: float = 1.0) -> Iterator[tuple[Tensor, int]]:
        """Yield dL/dz of each batch's mean loss, in eval mode, and the batch's length.

        Args:
            at: z of all gates.

        Shape: ``(plan.size,)``, float64 on the CPU.
        """
        with self._evaluating() as (task, batches):
            z = torch.full_like(self.gates.log_alpha, at, requires_grad=True)
            with self.gates.using(z), torch.enable_grad():
                for inputs, targets in batches:
                    with precision(z.device, self.autocast):
                        loss = task.loss_in(call(self.root, inputs), targets)
                    if loss is None:
                        raise UsageError(
                            "in eval mode the model gives no loss, and this score is of its "
                            "gradients: give loss=a function of (outputs, targets), or another "
                            "score"
                        )
                    if not loss.requires_grad:
                        raise UsageError(
                            "the loss does not depend on the gates in a way that torch can "
                            "differentiate; the model or the loss works under no_grad"
                        )
                    (slope,) = torch.autograd.grad(loss, z)
                    yield slope.to("cpu", torch.float64), batch_length(inputs, targets)

    def forwards(self) -> Iterator[tuple[Callable[[Tensor], Tensor], int]]:
        """Yield for each batch a function from gate values to outputs, and the batch's length.

        A batch that the source made is cut to ``batch_size`` examples. Of several outputs each is
        in its unit of the function's first call.
        """
        with self._evaluating() as (_, batches), torch.no_grad():
            for inputs, targets, _ in (Batch(*each).head(self.batch_size) for each in batches):
                units = list[float]()

                def under(z: Tensor, inputs: Any = inputs, units: list[float] = units) -> Tensor:
                    with self.gates.using(z):
                        outputs = call(self.root, inputs)
                        return even(outputs, self.gates.outputs, units).double()

                yield under, batch_length(inputs, targets)

    def losses(self, choices: Sequence[Tensor]) -> Tensor | None:
        """Return the mean loss with each choice of open gates; None without a loss in eval mode.

        Norms use the statistics of each batch, as after some steps of training: the stored ones
        belong to the network before the cut.

        Shape: each choice bool, flat; result ``(choices,)``, float64 on the CPU.
        """
        found: list[Tensor] = []
        with self._evaluating() as (task, batches), batch_statistics(self.root), torch.no_grad():
            for inputs, targets in batches:
                if batch_length(inputs, targets) < 2:  # too few for statistics
                    continue
                row = []
                for open_ in steps(choices):
                    with self.gates.using(open_.to(self.gates.log_alpha)):
                        loss = task.loss_in(call(self.root, inputs), targets)
                    if loss is None:
                        return None
                    row.append(loss)
                found.append(torch.stack(row).to("cpu", torch.float64))  # one wait for all
        return torch.stack(found).mean(0) if found else None

    @contextmanager
    def _evaluating(self) -> Iterator[tuple[Task, Iterator[tuple[Any, Any]]]]:
        """Yield the task and the batches, with the model on its device and in eval mode."""
        if self.task is None:
            raise UsageError(
                "this score looks at data: give it (data=…, --data mnist), as for finetune"
            )
        feed = Feed(self.task, self.batch_size, self.seed, augment=False)
        place = choose_device(self.device, self.root)
        with (
            rng.preserved(place, feed.generators()),
            on_device(self.root, place),
            self.task.on_device(place),
            trying(self.root),
        ):
            with rng.preserved(place, feed.generators()):
                check_first_batch(self.root, feed, place, None)
            count = feed.steps if self.batches is None else min(feed.steps, self.batches)
            batches = steps(islice(feed.train(0, place), self.batches), count)
            yield self.task, ((inputs, targets) for inputs, targets, _ in batches)


def output_tensor(outputs: Any, names: Sequence[str] = ()) -> Tensor:
    """Return a model's scores, or all outputs for each example in one row.

    Only outputs that matter count: those of these names, else see ``measured``. Of several tensors
    those that hold whole numbers are left out.

    Shape: of several tensors ``(examples, numbers)``.
    """
    found = joined(measured(outputs, names))
    if found is None:
        raise UsageError(
            f"a score of what the model gives wants a tensor, or some with a row for each example; "
            f"this model gives a {type(outputs).__name__}. Take a score of the loss, such as "
            "fisher; those of branches are of the outputs, too: gate without them (branches=False, "
            "--no-branches)"
        )
    return found


def even(outputs: Any, names: Sequence[str], units: list[float]) -> Tensor:
    """Return ``output_tensor``, of several outputs each in its unit, so that they count alike.

    ``units`` are those of these outputs where they are empty, and hold them then.
    """
    rows, of = output_tensor(outputs, names), numbered(measured(outputs, names))
    if of is None:
        return rows
    if not units:
        units += units_of(rows, of)
    return in_units(rows, of, units)


def mean_over_examples(batches: Iterable[tuple[Tensor, int]]) -> Tensor:
    """Return the mean over batches, each weighted by its number of examples."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for values, examples in batches:
        total, count = total + values * examples, count + examples
    if not count:
        raise UsageError("there is no batch to look at; batches must be at least 1")
    return total / count
