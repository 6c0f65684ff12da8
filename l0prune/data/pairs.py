"""A batch as inputs and targets: a pair, or a dict that holds its targets as labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from l0prune.errors import DataError

# What transformers' models take their targets as, and what data sets call them.
LABELS = ("labels", "label")


def pair(batch: Any) -> tuple[Any, Any]:
    """Inputs and targets of a batch. A mapping's targets are its labels, else all of it.

    The labels stay among the inputs: a model may compute its loss from them.

    Raises:
        DataError: it is neither a pair nor a mapping.
    """
    if isinstance(batch, Mapping):
        return batch, next((batch[name] for name in LABELS if name in batch), batch)
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    length = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    raise DataError(
        f"a batch must be (inputs, targets) or a dict, but the data gave a {type(batch).__name__}"
        f"{length}; several inputs go into a tuple or a dict"
    )


def without_labels(inputs: Any) -> Any:
    """The inputs that are not targets."""
    if not isinstance(inputs, Mapping):
        return inputs
    return {name: value for name, value in inputs.items() if name not in LABELS}
