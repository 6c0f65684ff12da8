"""Differences of two ONNX files' outputs, and how often they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from l0prune.data.dataset import WHOLE
from l0prune.exporting.opened import OnnxFile
from l0prune.running.batches import call, test_batches
from l0prune.running.task import Task

Outputs = list[np.ndarray[Any, Any]]
Differences = tuple[dict[str, float | None], dict[str, float]]


def differences(
    names: Sequence[str], expected: Sequence[Outputs], found: Sequence[Outputs]
) -> Differences:
    """Return the error of each output and the agreement, by output: see ``relative_error``."""
    errors: dict[str, float | None] = {}
    agreement: dict[str, float] = {}
    for number, name in enumerate(names):
        pairs = [(a[number], b[number]) for a, b in zip(expected, found, strict=False)]
        is_whole = pairs[0][0].dtype.kind != "f"
        errors[name] = None if is_whole else relative_error(pairs)
        share = _equal(pairs) if is_whole else _same_largest(pairs)
        if share is not None:
            agreement[name] = share
    return errors, agreement


def as_texts(errors: Mapping[str, float | None], agreement: Mapping[str, float]) -> list[str]:
    """Return the result of ``differences``, as a text for each output."""
    found = []
    for name, error in errors.items():
        said = [] if error is None else [f"{error:.2%} from float32"]
        if name in agreement:
            same = "equal values" if error is None else "the same largest score"
            said.append(f"{same} in {agreement[name]:.1%}")
        found.append(f"{name} {', '.join(said)}")
    return found


Pairs = Sequence[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]


def relative_error(pairs: Pairs) -> float:
    """Return the root mean square of the differences over that of the first of each pair.

    Where the first is not finite, such as a mask of −∞, it is left out.
    """
    difference = size = 0.0
    for expected, found in pairs:
        counts = np.isfinite(expected)
        a, b = expected[counts].astype(np.float64), found[counts].astype(np.float64)
        difference += float(((a - b) ** 2).sum())
        size += float((a**2).sum())
    if not np.isfinite(difference):
        return float("inf")
    return float(np.sqrt(difference / size)) if size else float(difference > 0)


def _equal(pairs: Pairs) -> float:
    equal = sum(int((a == b).sum()) for a, b in pairs)
    return equal / max(1, sum(a.size for a, _ in pairs))


def _same_largest(pairs: Pairs) -> float | None:
    """Return the share of equal argmax along the classes: dim 1, or the last of three dims.

    None where there is one score only.
    """
    first = pairs[0][0]
    dim = 2 if first.ndim == 3 else 1
    if first.ndim < 2 or first.shape[dim] < 2:
        return None
    return _equal([(a.argmax(dim), b.argmax(dim)) for a, b in pairs])


def compared_on(task: Task, first: OnnxFile, second: OnnxFile, batch_size: int) -> Differences:
    """Return the ``differences`` of two files on the test data."""
    answers: tuple[list[Outputs], list[Outputs]] = ([], [])
    names: list[str] = []
    for batch in test_batches(task, batch_size, torch.device("cpu"), WHOLE):
        for file, kept in zip((first, second), answers, strict=True):
            found = call(file, batch.inputs)
            named = found if isinstance(found, Mapping) else {"output": found}
            names = names or list(named)
            kept.append([value.numpy() for value in named.values()])
    return differences(names, *answers)
