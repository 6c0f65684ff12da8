"""Capture: from an nn.Module and example inputs to a graph of ATen operators, by torch.export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph

from l0prune.capture.batches import ANY, Batches, batch_of, widened
from l0prune.capture.compat import size_hint
from l0prune.capture.failures import explained
from l0prune.capture.free_sizes import ALL_FIXED, FreeSizes
from l0prune.capture.held_inputs import plain
from l0prune.capture.hints import without_hints
from l0prune.capture.inlining import inline_modes
from l0prune.capture.kept_state import without_state
from l0prune.capture.left_behind import exported
from l0prune.capture.model_checks import check_owned
from l0prune.capture.modes import evaluating
from l0prune.capture.own_forward import own_forward
from l0prune.capture.provenance import module_of, source_of, within
from l0prune.capture.quiet import alone, quietly
from l0prune.capture.spelling import respell
from l0prune.capture.symbolic import Found, symbolic, with_symbols
from l0prune.errors import CaptureError

_CONTRACTIONS = {
    getattr(torch.ops.aten, name).default
    for name in ("linear", "conv1d", "conv2d", "conv3d", "matmul", "mm", "bmm")
}


@dataclass(frozen=True)
class Captured:
    """The eval-mode graph of a model.

    Attributes:
        program: the exported program, before decomposition; its parameters are placeholders.
        names: for each placeholder node that is a parameter, buffer or constant, the tensor's
            name in the model (tied tensors share the first of their names).
        inputs: names of the placeholder nodes that are the user's inputs.
        aliases: further names of tied tensors, each with the name used in ``names``.
        parameters: the names in ``names`` that are parameters, not buffers or constants.
        unused: parameters of the model that the eval graph never touches.
        batch: size of the batch that the graph was captured with.
        dynamic: whether dim 0 of the inputs stayed symbolic.
        path: of the submodule that was captured, empty for the whole model; all names are the
            whole model's.
        respelled: tensors that the program's own module calls otherwise than the submodule does.
        batches: those that the graph is right for, where their size is symbolic.
        free: names of the free sizes that stayed symbolic.
        why_fixed: the line of the model's code at which a size was fixed, or what torch said of it.
        memory: those of ``inputs`` that are tensors of objects into which the forward puts others,
            such as a cache.
    """

    program: ExportedProgram
    names: dict[str, str]
    inputs: tuple[str, ...]
    aliases: dict[str, str]
    parameters: frozenset[str]
    unused: tuple[str, ...]
    batch: int
    dynamic: bool
    path: str = ""
    respelled: Mapping[str, str] = field(default_factory=dict)
    batches: Batches = ANY
    free: frozenset[str] = frozenset()
    why_fixed: str = ""
    memory: frozenset[str] = frozenset()

    @property
    def graph(self) -> Graph:
        """The fx graph."""
        graph: Graph = self.program.graph
        return graph

    def stored(self, target: str) -> str:
        """The name in ``names`` of a tensor that the program's own module calls ``target``."""
        name = within(self.path, self.respelled.get(target, target))
        return self.aliases.get(name, name)


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_batch: bool = False,
    free: FreeSizes = ALL_FIXED,
    path: str = "",
) -> Captured:
    """The eval-mode graph of the model, or of its submodule at ``path``; both stay as they were.

    With ``dynamic_batch`` dim 0 of every tensor input that shares the first one's size becomes
    symbolic where the model allows it; where it does not, the shapes are static. So do the ``free``
    sizes, each by itself.

    Raises:
        CaptureError: torch.export cannot follow the model's forward on these inputs.
        UsageError: its forward uses parameters that it does not own.
    """
    example = (args, kwargs or {})
    args, kwargs = plain(example)
    batch = batch_of(args, kwargs)
    part = model.get_submodule(path)
    # Without gradients: a part of a forward that switches them off itself is then no special case.
    # And without torch's log of what went wrong: the error says it, in the user's terms.
    with (
        alone(),
        evaluating(part),
        own_forward(part),
        without_state(part, example) as opener,
        without_hints(),
        quietly(),
    ):
        found = with_symbols(part, (args, kwargs), free) if dynamic_batch and batch else Found()
        program = found.program
        if program is None:
            try:
                program = exported(part, args, kwargs, strict=False)
            except CaptureError:
                raise
            except Exception as error:
                raise CaptureError(explained(error, part)) from error
        if found.is_free:
            batch = batch_of(*widened(args, kwargs, found.batches))
    constants = program.graph_signature.inputs_to_lifted_tensor_constants.values()
    check_owned(part, [program.constants[name] for name in constants])
    _check_dtypes(program.graph)
    _check_shapes(program.graph)
    captured = _index(model, program, batch or 1, found.is_free, path)
    return replace(
        captured,
        memory=frozenset(captured.inputs[number] for number in opener.written),
        batches=found.batches,
        free=symbolic(program, free) if free else frozenset(),
        why_fixed=found.why_fixed,
    )


def _check_dtypes(graph: Graph) -> None:
    """torch.export lets inputs pass whose dtype the weights cannot be multiplied with.

    Raises:
        CaptureError: the example has such a dtype.
    """
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _CONTRACTIONS:
            continue
        values = [operand.meta.get("val") for operand in node.all_input_nodes[:2]]
        dtypes = [value.dtype for value in values if isinstance(value, Tensor)]
        if len(set(dtypes)) > 1:
            what, weight = (str(dtype).removeprefix("torch.") for dtype in dtypes)
            where = module_of(node) or "the model"
            raise CaptureError(
                f"{where} gets {what} to multiply with its {weight} weights. The example input "
                f"probably has the wrong dtype: give it as {weight}, or as the model takes it "
                "(--input 2x16:int64 is for token ids)."
            )


def _check_shapes(graph: Graph) -> None:
    """torch.export follows some models into tensors whose shape the data decide.

    Raises:
        CaptureError: this is one.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        shape = value.shape if isinstance(value, Tensor) else ()
        if any(size_hint(size) is None for size in shape):
            place = " at ".join(filter(None, (module_of(node) or "the model", source_of(node))))
            raise CaptureError(
                f"the values of the input decide how large a tensor is in {place}, so that there "
                "is no one graph of the model to cut"
            )


def _index(
    model: nn.Module, program: ExportedProgram, batch: int, dynamic: bool, path: str
) -> Captured:
    canonical, aliases = _canonical_names(model)
    signature = program.graph_signature
    stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    stored |= signature.inputs_to_lifted_tensor_constants
    whole = {placeholder: within(path, name) for placeholder, name in stored.items()}
    names = {placeholder: canonical.get(name, name) for placeholder, name in whole.items()}
    parameters = {names[placeholder] for placeholder in signature.inputs_to_parameters}
    inline_modes(program)
    program.graph.eliminate_dead_code()  # what is computed and thrown away is no part of it
    _name_modules(program.graph, path)
    used = {names[n.name] for n in program.graph.nodes if n.name in names and n.users}
    own = (within(path, name) for name, _ in model.get_submodule(path).named_parameters())
    unused = tuple(name for name in own if canonical[name] not in used)
    return Captured(
        program=program,
        names=names,
        inputs=tuple(signature.user_inputs),  # type: ignore[arg-type]
        aliases=aliases,
        parameters=frozenset(parameters),
        unused=unused,
        batch=batch,
        dynamic=dynamic,
        path=path,
        respelled=respell(program),
    )


def _name_modules(graph: Graph, path: str) -> None:
    """Let the nodes of a submodule's graph say where in the whole model they are."""
    for node in graph.nodes if path else ():
        stack = node.meta.get("nn_module_stack") or {}
        moved = {key: (within(path, inner), kind) for key, (inner, kind) in stack.items()}
        node.meta["nn_module_stack"] = moved


def _canonical_names(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Every tensor name with the first name of the same tensor; and those that differ."""
    first: dict[int, str] = {}
    canonical: dict[str, str] = {}
    every: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False)]
    every += model.named_buffers(remove_duplicate=False)
    for name, tensor in every:
        canonical[name] = first.setdefault(id(tensor), name)
    return canonical, {name: to for name, to in canonical.items() if name != to}
