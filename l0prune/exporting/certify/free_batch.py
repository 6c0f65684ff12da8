"""A capture with a free batch size, and whether it is right for a batch of one."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from l0prune.capture.capture import Captured, capture
from l0prune.capture.free_sizes import ALL_FIXED, FreeSizes, Inputs
from l0prune.capture.recording import examples_in, first_rows
from l0prune.exporting.certify.answers import output_as_it_is
from l0prune.exporting.certify.certificate import LARGEST
from l0prune.exporting.certify.difference import difference


def with_free_batch(model: nn.Module, example: Inputs, free: FreeSizes = ALL_FIXED) -> Captured:
    """The capture of a model in eval mode with a free batch, where torch.export finds one.

    And with those of the ``free`` sizes that it finds to be free, too.

    torch.export goes by a batch of two or more, and believes that one example takes the same way.
    Where it does not (``if x.shape[0] == 1``, ``x.squeeze()``), the graph is for two or more; or,
    if the example is of one, for just that.

    Raises:
        CaptureError: torch.export cannot follow the model.
    """
    captured = capture(model, *example, dynamic_batch=True, free=free)
    if not captured.dynamic or _holds_for_one(model, captured, example):
        return captured
    if examples_in(example) == captured.batches.multiple:
        return capture(model, *example)
    return replace(captured, batches=captured.batches.several())


def _holds_for_one(model: nn.Module, captured: Captured, example: Inputs) -> bool:
    """Does the graph compute what the model does on the first example alone, or group of them?

    Whether it does so exactly is for the certificate to say.
    """
    single = first_rows(example, captured.batches.multiple)
    graph = captured.program.module(check_guards=False)
    try:
        expected, found = (output_as_it_is(module, single) for module in (model, graph))
    except Exception:  # one of them does not take it
        return False
    return difference(expected, found) <= LARGEST
