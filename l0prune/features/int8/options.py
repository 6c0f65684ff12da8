"""Options for eight bits: ``--int8`` of ``l0prune export`` and ``l0prune shrink``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from l0prune.cli.more import More
from l0prune.errors import UsageError

InInt8 = Annotated[
    bool,
    typer.Option(
        "--int8", help="Write MODEL.int8.onnx beside the ONNX file, calibrated with --data."
    ),
]
Compensated = Annotated[
    bool,
    typer.Option(
        "--compensate/--no-compensate",
        help="With --int8: adjust weights to make up for the rounding, where it helps.",
    ),
]
Fastest = Annotated[
    bool,
    typer.Option(
        "--fastest/--no-fastest",
        help="With --int8: compute layers in float32 where that is faster.",
    ),
]
Tolerated = Annotated[
    str | None,
    typer.Option(
        "--tolerance",
        help="With --int8: how much worse than the file in float32 it may be by the metric of "
        "--data's test part, such as 1%; what costs most stays in float32.",
    ),
]


def export(
    examples: Callable[..., Any],
    *,
    int8: InInt8 = False,
    compensate_rounding: Compensated = True,
    fastest: Fastest = True,
    int8_tolerance: Tolerated = None,
) -> More | None:
    """Return what ``save_onnx`` is asked for, if the file is."""
    if not int8:
        if int8_tolerance is not None:
            raise UsageError("--tolerance is of the file in eight bits: give --int8, too")
        return None
    found = examples("--int8", labelled=False)
    if not hasattr(found, "train"):  # inputs alone
        from l0prune.features.int8.calibration import drawn  # loads torch

        found = drawn(found)
    asked = {"compensate": compensate_rounding, "fastest": fastest, "tolerance": int8_tolerance}
    return More(onnx={"int8": found, **asked})


def shrink(examples: Callable[..., Any], *, int8: InInt8 = False) -> More | None:
    """Return what ``save_onnx`` is asked for beside a network that was cut without labels."""
    return export(examples, int8=int8)
