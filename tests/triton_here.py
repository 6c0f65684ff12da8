"""Whether Triton's kernels run here: on a GPU, or in its interpreter."""

from __future__ import annotations

import functools

import pytest
import torch

from l0prune.gating import products
from l0prune.gating.multiplying import GateValues
from l0prune.gating.products import GatedWeights
from l0prune.gating.weight_tables import Table, line_of

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


@functools.cache
def why_not() -> str:
    """Reason why Triton does not run here: no GPU, and an interpreter older than NumPy, or off."""
    pytest.importorskip("triton")
    assert products.kernels() is not None
    weight, z = (torch.ones(shape, device=DEVICE, requires_grad=True) for shape in ((2, 3), 2))
    line = line_of(weight, [(GateValues(), 0)], weight.dtype)
    assert line is not None
    try:
        GatedWeights.apply(Table([line], DEVICE), z, weight)[0].sum().backward()
    except Exception as error:
        known = ("0-dimensional arrays", "0 active drivers")  # of its interpreter, or without one
        if HAS_GPU or not any(each in str(error) for each in known):
            raise
        return f"Triton does not run here: {error}"
    return ""
