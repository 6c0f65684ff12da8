"""Dense modules as programs of ``torch.export``, in the model's dtype and in float32."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from l0prune.capture.capture import batch_shapes, symbolic, widened
from l0prune.capture.free_sizes import ALL_FIXED, FreeSizes
from l0prune.capture.hints import without_hints
from l0prune.capture.kept_state import without_state
from l0prune.capture.left_behind import exported
from l0prune.capture.recording import Inputs
from l0prune.capture.spelling import respell
from l0prune.exporting.slicing.dtypes import (
    Dtypes,
    asks_for_less,
    cast,
    converted,
    restored,
)


class Exported(NamedTuple):
    """A program, whether its batch is free, the smallest that it then takes, other free sizes."""

    program: ExportedProgram
    dynamic: bool
    least: int = 1
    free: frozenset[str] = frozenset()


Exporter = Callable[[nn.Module, Inputs], Exported]


def reexport(
    module: nn.Module,
    example: Inputs,
    dynamic: bool,
    least: int = 1,
    free: FreeSizes = ALL_FIXED,
) -> Exported:
    """The dense module as a program of its own, of a free batch where that is possible.

    It refuses batches of less than ``least``. Of the ``free`` sizes it keeps those that it can.
    """
    wide = widened(*example)
    for wanted in (free, ALL_FIXED) if free and dynamic else (ALL_FIXED,) if dynamic else ():
        shapes = partial(batch_shapes, module, *wide, least, wanted)
        with _at_least(module, least):
            made = _exported(module, wide, shapes)
        if made.dynamic:
            return made._replace(least=least, free=symbolic(made.program, wanted))
    return _exported(module, example, None)


@contextmanager
def _at_least(module: nn.Module, least: int) -> Iterator[None]:
    """Let the module assert the size of its batch: of 2, torch.export takes it for granted."""

    def check(_: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        batch = next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)
        why = f"this program is for batches of {least} or more"
        torch.ops.aten._assert_scalar.default(batch >= least, why)

    handles = [module.register_forward_pre_hook(check, with_kwargs=True)] if least > 1 else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def programs(
    module: nn.Module, dtypes: Dtypes, example: Inputs, export: Exporter
) -> tuple[Exported, ExportedProgram]:
    """The module, which becomes one of ``dtypes``, as a program; and one of float32, for ONNX.

    The first says which batches both of them take.
    """
    single = torch.float32
    if dtypes == Dtypes(single) and not asks_for_less(module, single):
        made = export(restored(module, dtypes), cast(example, single))
        return made, made.program
    for_onnx = export(converted(module, single), cast(example, single))
    own = None if dtypes.others else dtypes.main
    made = export(restored(module, dtypes), cast(example, own))
    is_free, least = made.dynamic and for_onnx.dynamic, max(made.least, for_onnx.least)
    return Exported(made.program, is_free, least, made.free & for_onnx.free), for_onnx.program


def reexport_part(module: nn.Module, example: Inputs, least: int = 1) -> Exported:
    """A part as a program of its own, with every dim free that its forward leaves free.

    What a part receives has a size of the data's making: an image's, the number of proposals.
    The program refuses batches of less than ``least``.
    """

    def free(leaf: Any) -> Any:
        return dict.fromkeys(range(leaf.ndim), Dim.AUTO) if isinstance(leaf, Tensor) else None

    def shapes(wide: Inputs) -> Any:
        arguments = inspect.signature(module.forward).bind(*wide[0], **wide[1]).arguments
        return {name: pytree.tree_map(free, value) for name, value in arguments.items()}

    wide = widened(*example)
    with _at_least(module, least):
        with suppress(Exception):  # one row may be all that it takes
            return _exported(module, wide, partial(shapes, wide))
        return _exported(module, example, partial(shapes, example))


def _exported(module: nn.Module, example: Inputs, shapes: Callable[[], Any] | None) -> Exported:
    """The program with these dynamic shapes, or static where the module does not allow them."""
    args, kwargs = example
    with warnings.catch_warnings(), torch.no_grad(), without_hints(), without_state(module):
        warnings.simplefilter("ignore")
        if shapes is not None:
            with suppress(Exception):  # the static shapes come next, and the result says so
                free = exported(module, args, kwargs, dynamic_shapes=shapes())
                respell(free)
                return Exported(free, True)
        program = exported(module, args, kwargs)
    respell(program)
    return Exported(program, False)
