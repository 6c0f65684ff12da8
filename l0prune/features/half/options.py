"""Options for 16 bits: ``l0prune export --dtype float16``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from l0prune.cli.more import More
from l0prune.errors import UsageError

Dtype = Annotated[
    Literal["float16", "bfloat16"] | None,
    typer.Option(help="Write MODEL.float16.onnx (or bfloat16) beside the ONNX file."),
]
HalfIo = Annotated[
    bool, typer.Option("--half-io", help="With --dtype: inputs and outputs are in it, too.")
]


def export(_: Callable[[str], Any], *, dtype: Dtype = None, half_io: HalfIo = False) -> More | None:
    """Return what ``save_onnx`` is asked for, if the file is."""
    if dtype is None:
        if half_io:
            raise UsageError("--half-io is about the file that --dtype float16 or bfloat16 writes.")
        return None
    return More(onnx={"dtype": dtype, "half_io": half_io})
