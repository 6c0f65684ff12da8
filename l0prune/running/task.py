"""Task of training: data, loss and metric, and the keys of its records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from typing_extensions import TypeIs

from l0prune.capture.compat import pytree
from l0prune.data import Data, Loaded
from l0prune.data.dataset import Split, inputs_and_targets, map_tensors, without_labels
from l0prune.data.preprocessing import Preprocessing
from l0prune.errors import DataError, UsageError
from l0prune.plan import measures
from l0prune.running import criteria
from l0prune.running.criteria import (
    AUTO,
    Loss,
    Metric,
    TokenMean,
    cross_entropy,
    error_rate,
    is_classification,
    tensor_output,
)
from l0prune.running.device import on_device

_EXPECTED, _DENSE = "expected_", "dense_"


@dataclass(frozen=True)
class Amount:
    """Amounts of one measure of a network.

    Attributes:
        expected: over the gates' noise.
        actual: of an export with the gates as they are.
        dense: with all gates open.
    """

    expected: float
    actual: float
    dense: float

    def share(self, amount: float) -> float:
        """Return an amount as a share of the dense one."""
        return amount / self.dense if self.dense else 0.0

    def entries(self, name: str) -> dict[str, float]:
        """Return the amounts as in a record, for the measure of this name."""
        values = (self.expected, self.actual, self.dense)
        return dict(zip(amount_keys(name), values, strict=True))


def amount_keys(name: str) -> tuple[str, str, str]:
    """Return the names of a measure's amounts in records."""
    return f"{_EXPECTED}{name}", name, f"{_DENSE}{name}"


def amounts(record: Mapping[str, Any]) -> dict[str, Amount]:
    """Return the amounts in a record, by name of the measure."""
    names = [key.removeprefix(_DENSE) for key in record if key.startswith(_DENSE)]
    return {
        name: Amount(record.get(f"{_EXPECTED}{name}", record[name]), record[name], record[dense])
        for name in names
        if (dense := f"{_DENSE}{name}") and name in record
    }


def model_loss(outputs: Any) -> Tensor | None:
    """Return the loss in a model's outputs, or None.

    It is ``outputs.loss`` (transformers), ``outputs["loss"]``, or the sum of a dict of losses, as
    torchvision's detectors give in train mode.
    """
    found = getattr(outputs, "loss", None)
    if isinstance(outputs, Mapping):
        found = outputs.get("loss", found)
        if found is None and outputs and all(map(_is_loss, outputs.values())):
            found = sum(outputs.values())
    return found if _is_loss(found) else None


def are_detections(outputs: Any) -> bool:
    """Return whether outputs are a list of mappings, as detectors return in eval mode."""
    is_list = isinstance(outputs, list | tuple) and len(outputs) > 0
    return is_list and all(isinstance(each, Mapping) for each in outputs)


def _is_loss(found: Any) -> bool:
    return isinstance(found, Tensor) and not found.dim() and found.is_floating_point()


Source = Split | Iterable[Any]
Judge = Callable[[Any, Any], Tensor | None]

LOSS, ERROR = "test_loss", "error"
# Keys of records beside the metric and the amounts of measures.
RECORD_KEYS = frozenset({
    "epoch", "step", "phase", "seconds", "train_loss", "penalty", "lr", LOSS, "open", "dead",
    "budget", "doctor", "gates", "before", "fitted", "training_macs",
    "nonzero",
})  # fmt: skip


@dataclass(frozen=True, repr=False)
class Task:
    """Task of a model: data, loss and metric.

    Attributes:
        train: training examples: a split of a ``Data``, a dataset, or any iterable of batches
            that can be gone through again and again, such as a DataLoader. A batch is (inputs,
            targets), the inputs a tensor, a tuple of positional or a mapping of keyword arguments
            of the model; or a mapping of all of these, with the targets under ``labels``; or for
            detectors a list of images and a list of mappings.
        test: the same for the test; None to report the training loss only.
        loss: what is learned from, the mean over a batch. ``"auto"``: the loss that the model
            computes itself from the labels in its inputs, else cross-entropy, which is for class
            numbers and probabilities of classes only. Or ``"cross-entropy"``, ``"mse"``,
            ``"l1"``, ``"smooth-l1"``, ``"bce"`` (of labels that are 0 or 1, from scores before a
            sigmoid), ``"file.py:function"``, or a function of (outputs, targets) that returns a
            scalar tensor; in eval mode None where the model's outputs have no loss.
            ``"next-token"``: of a language model, where the targets are the tokens themselves.
        metric: what is reported beside the loss on the test data: ``"error"`` (the rate of wrong
            classes), ``"accuracy"``, ``"label-error"`` (of labels that are 0 or 1), ``"mae"``,
            ``"perplexity"`` (exp of the mean of ``"next-token"`` over all tokens), the name of a
            loss, ``"file.py:function"``, or a function of (outputs, targets) that
            returns one number per example or their mean. None for the rate of wrong classes where
            the loss is ``"auto"`` or cross-entropy and the targets are classes, else for nothing.
        metric_name: key of the metric in the records; where it is left out, the metric's own
            name, and ``metric`` for a lambda. Without a metric ``test_loss``.
        size: N, the number of training examples; None to ask the data.
        steps: batches in one pass over ``train``; None to ask the data.
        name: of the data, for the checkpoint to tell one run from another.
        larger_is_better: of the metric; None for what is known of a named one, else False.
        preprocessing: of the images, for the report and the files; None where unknown.

    Raises:
        UsageError: there is no such loss or metric, or its name is that of something else in
            the records.
    """

    train: Source = field(repr=False)
    test: Source | None = field(default=None, repr=False)
    loss: Loss | str = AUTO
    metric: Metric | str | None = None
    metric_name: str = ""
    size: int | None = None
    steps: int | None = None
    name: str = ""
    larger_is_better: bool | None = None
    preprocessing: Preprocessing | None = None
    _loss: Loss = field(init=False, repr=False, compare=False)
    _metric: Metric | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        def fill(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in ("train", "test"):
            fill(name, _batched(getattr(self, name)))
        fill("_loss", self._automatic if self.loss == AUTO else criteria.loss_of(self.loss))
        fill("_metric", None if self.metric is None else criteria.metric_of(self.metric))
        if not self.metric_name:
            own = "" if self.metric is None else criteria.metric_name(self.metric) or "metric"
            fill("metric_name", own or (ERROR if self._tells_classes else LOSS))
        taken = RECORD_KEYS.union(*map(amount_keys, measures.names()))
        if self.metric is not None and self.metric_name in taken:
            raise UsageError(
                f"the metric cannot be called {self.metric_name}, since the records have something "
                "else of that name: give Task(…, metric_name=…)"
            )
        if self.larger_is_better is None:
            is_known = isinstance(self.metric, str) and self.metric in criteria.LARGER_IS_BETTER
            fill("larger_is_better", is_known)

    def __repr__(self) -> str:
        """Return the settings that differ from their defaults; for data the type alone."""
        sources = ((name, getattr(self, name)) for name in ("train", "test"))
        shown = [f"{name}={_brief(source)}" for name, source in sources if source is not None]
        for each in fields(Task):
            value = getattr(self, each.name)
            if each.repr and each.init and value != each.default:
                shown.append(
                    f"{each.name}={criteria.metric_name(value) if callable(value) else value!r}"
                )
        return f"Task({', '.join(shown)})"

    @staticmethod
    def of(given: Any, loss: Any = None, metric: Any = None) -> Task:
        """Return a task from a Task, a Data, (train, test), or training batches.

        Args:
            given: one of these.
            loss: replaces the task's loss; None to keep it.
            metric: the same for the metric.

        Raises:
            DataError: there is nothing to learn from in it.
            UsageError: there is no such loss or metric.
        """
        asked = {k: v for k, v in (("loss", loss), ("metric", metric)) if v is not None}
        if isinstance(given, Task):
            if "metric" in asked:
                asked |= {"metric_name": "", "larger_is_better": None}
            elif given.metric is None:
                asked["metric_name"] = ""
            return replace(given, **asked) if loss is not None or metric is not None else given
        if isinstance(given, Data):
            asked |= {"name": given.name, "preprocessing": given.preprocessing}
            return _DataTask(given.train, given.test, data=given, **asked)
        if isinstance(given, tuple) and len(given) == 2:
            return Task(*given, **asked)
        is_batches = isinstance(given, Iterable) and not isinstance(given, str | Mapping)
        if is_split(given) or is_batches or _batched(given) is not given:
            return Task(given, **asked)
        raise DataError(
            f"a {type(given).__name__} is nothing to train on; give a data source "
            "(l0prune.load_data('mnist')), a DataLoader, (training, test) loaders, or a Task"
        )

    def pair(self, batch: Any) -> tuple[Any, Any]:
        """Return inputs and targets of a batch; labels stay among the inputs for loss ``"auto"``.

        Raises:
            DataError: the batch is neither a pair nor a mapping.
        """
        inputs, targets = inputs_and_targets(batch)
        if is_detection_batch(inputs, targets):
            return ((inputs, targets) if self.loss == AUTO else (inputs,)), targets
        return (inputs if self.loss == AUTO else without_labels(inputs)), targets

    def loss_in(self, outputs: Any, targets: Any) -> Tensor | None:
        """Return the mean loss of a batch, a scalar; None if outputs in eval mode have none.

        Raises:
            UsageError: the loss is no scalar, or does not fit the outputs and targets.
        """
        loss = self._loss(outputs, targets)
        return None if loss is None else criteria.scalar_loss(loss, self.loss)

    def loss_and_metric(self, outputs: Any, targets: Any) -> dict[str, Tensor | TokenMean]:
        """Return loss and metric of a batch by name; the metric may be one number per example.

        Raises:
            UsageError: one of them is no number, or does not fit the outputs and targets.
        """
        loss = self.loss_in(outputs, targets)
        found: dict[str, Tensor | TokenMean] = {} if loss is None else {LOSS: loss}
        if self._metric is not None:
            value = self._metric(outputs, targets)
            found[self.metric_name] = criteria.metric_values(value, self.metric)
        elif self._tells_classes and is_classification(outputs, targets):
            found[self.metric_name] = error_rate(outputs, targets)
        if not found:
            raise UsageError(
                "in eval mode the model gives no loss, so that nothing can be said of the test "
                "data: give a metric"
            )
        return found

    def of_mean(self, name: str, mean: float) -> float:
        """Return the reported value of a loss or metric, given its mean over all of the data."""
        is_perplexity = self.metric == criteria.PERPLEXITY and name == self.metric_name
        return float(torch.tensor(mean, dtype=torch.float64).exp()) if is_perplexity else mean

    @property
    def loss_module(self) -> nn.Module | None:
        """The loss, if it is a module with trainable parameters; else None."""
        loss = self._loss
        if not isinstance(loss, nn.Module):
            return None
        return loss if any(p.requires_grad for p in loss.parameters()) else None

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        """Move modules among loss and metric to ``device`` within the context."""
        with ExitStack() as stack:
            for each in (self._loss, self._metric):
                if isinstance(each, nn.Module):
                    stack.enter_context(on_device(each, device))
            yield

    @property
    def _tells_classes(self) -> bool:
        return self.loss == AUTO or self._loss is cross_entropy

    def _automatic(self, outputs: Any, targets: Any) -> Tensor | None:
        """Return the loss that the model computes, else cross-entropy; None for detections."""
        own = model_loss(outputs)
        if own is not None:
            return own
        if are_detections(outputs):
            return None
        if isinstance(targets, Mapping):
            raise UsageError(
                f"the batches hold no labels, only {', '.join(map(str, targets))}, and the model "
                "gives no loss for them: put the targets under 'labels', or give a loss"
            )
        return cross_entropy(outputs, targets)


@dataclass(frozen=True, repr=False)
class _DataTask(Task):
    """Task of a ``Data``; the loss refuses a model with fewer outputs than classes."""

    data: Data | None = field(default=None, repr=False)

    def _automatic(self, outputs: Any, targets: Any) -> Tensor | None:
        scores = tensor_output(outputs) if model_loss(outputs) is None else None
        if self.data is not None and scores is not None and scores.dim() > 1:
            self.data.check_fits(scores.shape[1])
        return super()._automatic(outputs, targets)


def is_detection_batch(inputs: Any, targets: Any) -> bool:
    """Return whether each example is a tensor with a mapping as target, as for detectors."""
    if not are_detections(targets) or not isinstance(inputs, list | tuple):
        return False
    return len(inputs) == len(targets) and all(isinstance(each, Tensor) for each in inputs)


def _brief(source: Any) -> str:
    if isinstance(source, list | tuple):
        return f"{len(source)} batches"
    return repr(source) if is_split(source) else f"a {type(source).__name__}"


def is_split(source: Any) -> TypeIs[Split]:
    """Return whether the source has ``batches``, which makes batches in a given order."""
    return hasattr(source, "batches")


def _batched(source: Any) -> Any:
    """Return a source of batches; a dataset, of torch or of ``datasets``, is wrapped."""
    is_torchs = isinstance(source, Dataset) and not isinstance(source, IterableDataset)
    is_table = hasattr(source, "column_names") and hasattr(source, "__getitem__")
    return Loaded(source) if (is_torchs or is_table) and not is_split(source) else source


def batch_length(inputs: Any, targets: Any) -> int:
    """Return the number of examples in a batch.

    It is the length of the first tensor, of the targets if there is one in them; or the number of
    targets where they are one mapping for each example, as for detectors.
    """
    found = map_tensors((targets, inputs))
    if are_detections(found[0]):
        return len(found[0])
    for leaf in pytree.tree_leaves(found):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    return 1
