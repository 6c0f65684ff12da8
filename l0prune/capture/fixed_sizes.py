"""Sizes that are to be free and are not: where the model's code fixes them."""

from __future__ import annotations

from torch import nn

from l0prune.capture.capture import capture
from l0prune.capture.free_sizes import ALL_FIXED, FreeSizes, Inputs

BATCH = "batch"


def fixed_sizes(model: nn.Module, example: Inputs, free: FreeSizes) -> dict[str, str]:
    """Return the reason for each of the ``free`` sizes that is fixed, by name.

    Raises:
        CaptureError: torch.export cannot follow the model at all.
    """
    found = {}
    for name in free.names:
        captured = capture(model, *example, dynamic_batch=True, free=free.only([name]))
        if name not in captured.free:
            found[name] = (
                f"{name} cannot be free, but {free.sizes(example)[name]} alone"
                f"{_because(captured.why_fixed)}. Leave it out of dynamic_shapes, or change the "
                "code there: a number that it has can be read off the tensor (x.shape); a loop in "
                "Python over as many steps can be one operator (nn.LSTM, cumsum)."
            )
    return found


def fixed_batch(model: nn.Module, example: Inputs) -> dict[str, str]:
    """Return the reason why the batch is fixed; it is free wherever it can be.

    Raises:
        CaptureError: torch.export cannot follow the model at all.
    """
    captured = capture(model, *example, dynamic_batch=True, free=ALL_FIXED)
    if captured.dynamic and captured.batches.multiple == 1:
        return {}
    rows = f"{captured.batches} rows" if captured.dynamic else f"{captured.batch} rows alone"
    return {
        BATCH: f"batch cannot be free, but {rows}{_because(captured.why_fixed)}. "
        "Programs and ONNX files will be, too, unless the code reads the size off the tensor there "
        "(x.shape) instead of having a number."
    }


def _because(why: str) -> str:
    return f": {why}" if why else ""
