"""Export of small modules as ``torch.export`` programs, in the model's dtype and in float32."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from l0prune.capture.compat import keep_guards, pytree
from l0prune.capture.example_inputs import examples_in, first_rows, plain
from l0prune.capture.kept_state import exported, tensor_outputs_only
from l0prune.capture.sizes import (
    ALL_FIXED,
    ANY,
    Batches,
    FreeSizes,
    Inputs,
    batch_shapes,
    shapes_in,
    widened,
)
from l0prune.capture.symbolic import inputs_of, symbolic
from l0prune.capture.symbolic_patches import general_code_paths, sanitize_names
from l0prune.capture.threads import muted, one_at_a_time
from l0prune.exporting.certify.dtypes import Dtypes, asks_for_less, cast, converted, restored
from l0prune.infer.dataflow import drop_unneeded


class Exported(NamedTuple):
    """Program with its free sizes: free batch or not, allowed batches, names of other free sizes.

    ``why_fixed`` is the reason why a size requested as free is fixed.
    """

    program: ExportedProgram
    dynamic: bool
    batches: Batches = ANY
    free: frozenset[str] = frozenset()
    why_fixed: str = ""


Exporter = Callable[[nn.Module, Inputs], Exported]


def reexport(
    module: nn.Module,
    example: Inputs,
    dynamic: bool,
    batches: Batches = ANY,
    free: FreeSizes = ALL_FIXED,
) -> Exported:
    """Export the small module, with a free batch if ``dynamic`` and possible.

    The program refuses all but these ``batches``. Of the ``free`` sizes those stay free that can.
    """
    wide = widened(*example, batches) if dynamic else example
    args, kwargs = plain(wide)
    for wanted in (free, ALL_FIXED) if free else (ALL_FIXED,) if dynamic else ():
        shapes = partial(batch_shapes, module, args, kwargs, batches if dynamic else None, wanted)
        with _at_least(module, 1 if batches.multiple > 1 else batches.least):
            made = _exported(module, wide, shapes)
        if made.dynamic:
            if batches.least == batches.multiple > 1:
                _let_pass(made.program, module, first_rows(example, batches.multiple))
            return Exported(made.program, dynamic, batches, symbolic(made.program, wanted))
    return _exported(module, example, None)


def _let_pass(program: ExportedProgram, module: nn.Module, example: Inputs) -> None:
    """Drop the program's guards that this example does not fulfil.

    torch.export traces several groups of rows and guards for several; the program has been shown to
    be right for one.
    """
    args, kwargs = plain(example)
    arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    known = {"L": arguments, "torch": torch}
    keep_guards(program, known)


@contextmanager
def _at_least(module: nn.Module, least: int) -> Iterator[None]:
    """Context in which the module asserts its least batch; torch.export assumes 2 unchecked."""

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
    """Export the module, which is converted to ``dtypes``, and a float32 copy for ONNX.

    The first result has the free sizes and batches that both programs take.
    """
    single = torch.float32
    if dtypes == Dtypes(single) and not asks_for_less(module, single):
        made = export(restored(module, dtypes), cast(example, single))
        return made, made.program
    for_onnx = export(converted(module, single), cast(example, single))
    own = None if dtypes.others else dtypes.main
    made = export(restored(module, dtypes), cast(example, own))
    is_free, free = made.dynamic and for_onnx.dynamic, made.free & for_onnx.free
    fewest = max(made.batches, for_onnx.batches, key=lambda each: (each.multiple, each.least))
    return Exported(made.program, is_free, fewest, free), for_onnx.program


def reexport_part(module: nn.Module, example: Inputs, batches: Batches = ANY) -> Exported:
    """Export a part as a separate program, with every input dim free that its forward allows.

    Input sizes of a part depend on the data: an image's size, the number of proposals. A number
    input that equals the batch size is free, too.
    The program refuses all but these ``batches``.
    """

    wide = widened(*example)
    numbers = {examples_in(example)} - {1}  # torch.export makes 1 a constant

    def free(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return dict.fromkeys(range(leaf.ndim), Dim.AUTO)
        return Dim.AUTO if type(leaf) is int and leaf in numbers else None

    with _at_least(module, batches.least):
        with suppress(Exception):  # the part may take one row only
            return _with_batch(_exported(module, wide, partial(shapes_in, wide, module, free)))
        return _with_batch(_exported(module, example, partial(shapes_in, example, module, free)))


def _with_batch(made: Exported) -> Exported:
    """Set ``dynamic`` by whether dim 0 of the first tensor input is free."""
    values = inputs_of(made.program)
    first = next((value for value in values if isinstance(value, Tensor) and value.ndim), None)
    is_free = made.dynamic and first is not None and not isinstance(first.shape[0], int)
    return made._replace(dynamic=is_free)


def _exported(module: nn.Module, example: Inputs, shapes: Callable[[], Any] | None) -> Exported:
    """Export with these dynamic shapes, or statically if the module does not allow them."""
    args, kwargs = plain(example)
    with (
        one_at_a_time(),
        muted(),
        torch.no_grad(),
        general_code_paths(),
        tensor_outputs_only(module, example),
    ):
        if shapes is not None:
            # on failure: static shapes below, ``dynamic`` False
            with suppress(Exception):
                free = exported(module, args, kwargs, dynamic_shapes=shapes())
                return Exported(_tidied(free), True)
        program = exported(module, args, kwargs)
    return Exported(_tidied(program), False)


def _tidied(program: ExportedProgram) -> ExportedProgram:
    """Give the program names that all can read, and leave out what no output needs."""
    sanitize_names(program)
    drop_unneeded(program.graph)
    program.graph_module.recompile()
    return program
