"""The program of a dense model that is of its own class."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from l0prune.capture.batches import ANY
from l0prune.capture.free_sizes import ALL_FIXED, FreeSizes, Inputs
from l0prune.exporting.certify.free_batch import with_free_batch
from l0prune.exporting.slicing.dtypes import Dtypes, cast, casts_to_less, converted, marked
from l0prune.exporting.slicing.program import Exported, reexport
from l0prune.infer.decomposition import take_apart


def class_programs(
    module: nn.Module, dtypes: Dtypes, example: Inputs, free: FreeSizes = ALL_FIXED
) -> tuple[Exported, ExportedProgram]:
    """What torch.export makes of it, with a free batch size where that is right; and for ONNX.

    The latter is in float32 throughout: its graph can be, where the code names other dtypes.

    Raises:
        CaptureError: torch.export cannot follow it.
    """
    single = torch.float32
    made = _program_of(module, cast(example, dtypes.main), free)
    if dtypes == Dtypes(single) and not casts_to_less(made.program.graph_module, single):
        return made, made.program
    graph = converted(marked(made.program.module(check_guards=False), dtypes), single)
    for_onnx = reexport(
        graph, cast(example, single), made.dynamic, made.batches, free.only(made.free)
    )
    is_free, others = made.dynamic and for_onnx.dynamic, made.free & for_onnx.free
    return made._replace(dynamic=is_free, free=others), for_onnx.program


def _program_of(module: nn.Module, example: Inputs, free: FreeSizes) -> Exported:
    captured = with_free_batch(module, example, free)
    if captured.dynamic and captured.batches != ANY:
        return reexport(module, example, True, captured.batches, free.only(captured.free))
    take_apart(captured.program)
    _drop_unread(captured.program)
    free_ones, why_fixed = captured.free, captured.why_fixed
    return Exported(captured.program, captured.dynamic, free=free_ones, why_fixed=why_fixed)


def _drop_unread(program: ExportedProgram) -> None:
    """Leave out the parameters that no operator reads, as of a head for training only."""
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    specs = program.graph_signature.input_specs
    for spec in list(specs):
        node = nodes[spec.arg.name]
        if spec.kind == InputKind.PARAMETER and not node.users:
            specs.remove(spec)
            program.graph.erase_node(node)
            program._state_dict.pop(str(spec.target), None)
    program.graph_module.recompile()
