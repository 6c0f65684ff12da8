"""Capture: from an nn.Module and example inputs to a graph of ATen operators, by torch.export.

Where torch.export cannot follow a model, or a size that is to be free is not, the error names the
line of the user's code.
"""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.nn.utils.rnn import PackedSequence

from l0prune.capture.compat import bound_sizes, pytree, size_hint
from l0prune.capture.copying import class_forwards
from l0prune.capture.example_inputs import plain
from l0prune.capture.inlining import LOST_GRADIENT, inline_modes
from l0prune.capture.kept_state import exported, tensor_outputs_only
from l0prune.capture.model_checks import check_owned, evaluating, same_draws
from l0prune.capture.provenance import module_of, source_of, within
from l0prune.capture.sizes import ALL_FIXED, ANY, Batches, FreeSizes, Inputs, batch_of, widened
from l0prune.capture.symbolic import Found, symbolic, with_symbols
from l0prune.capture.symbolic_patches import general_code_paths, sanitize_names
from l0prune.capture.threads import muted, one_at_a_time
from l0prune.capture.undisturbed import same_buffers, undisturbed
from l0prune.errors import CaptureError, in_a_line

_LIBRARY = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(os.path.dirname(__file__))
_USUAL = (
    "Usual causes: a shape or dtype that the model does not take, or data of another kind. Give "
    "inputs that it runs on (--input 2x3x224x224, --input 2x16:int64 for token ids, or --data)."
)


def explained(error: Exception, model: nn.Module) -> str:
    """Explain a torch.export failure: its cause and line of the user's source."""
    where = _at(error)
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    causes = _scripted(model), _packed(error), _unregistered(error), _differentiating(error)
    known = "".join(f"{cause} " for cause in causes if cause)
    if getattr(error, "__notes__", None):
        return (
            f"the file's graph cannot be followed{where}: {type(error).__name__}: {first.strip()}\n"
            "Usual cause: values of the input decide sizes or the way through the graph. Export "
            "the file anew without that node's dependence on values."
        )
    return (
        f"{known}torch.export could not follow the model{where}: {type(error).__name__}: "
        f"{first.strip()}\n"
        "Usual cause: forward() branches on tensor values. Such branches have to leave forward() "
        "or be written with torch.where; or gate the submodules before and after them."
    )


def _failure(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describe why the model itself fails on its example inputs; empty if it does not."""
    try:
        with torch.no_grad(), undisturbed(model), same_buffers(model), same_draws(model):
            model(*args, **kwargs)
    except Exception as error:
        own = getattr(model, "example_input_array", None)
        known = "" if own is None else f" It declares inputs of {_shapes(own)}."
        return (
            f"the model does not run on these inputs, {_shapes((args, kwargs))}: it fails"
            f"{_at(error)} with {in_a_line(error).removesuffix('.')}.{known} "
            + (_misplaced(model, args) or _USUAL)
        )
    return ""


def _misplaced(model: nn.Module, args: tuple[Any, ...]) -> str:
    """Return a hint if a positional input is a dict of arguments by name; else an empty text."""
    parameters = inspect.signature(model.forward).parameters.values()
    known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    given = args[-1] if args else None
    if not isinstance(given, Mapping) or not given or not known.issuperset(given):
        return ""
    names = ", ".join(given)
    return (
        f"The last positional input is a dict of {names}, which forward() takes by name: give the "
        "dict after the tuple, not in it: (model, (x,), {'name': value})."
    )


def _shapes(inputs: Any) -> str:
    """Describe the tensors among inputs by shape and dtype."""
    tensors = [each for each in pytree.tree_leaves(inputs) if isinstance(each, Tensor)]
    texts = [f"{tuple(each.shape)} of {str(each.dtype)[6:]}" for each in tensors]
    return ", ".join(texts) or "without any tensor"


def _at(error: Exception) -> str:
    """Return `` at`` a node of an ONNX file, or a line of the user's code; empty if unknown."""
    if notes := getattr(error, "__notes__", None):
        return f" at {notes[-1]}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith((_LIBRARY, _HERE, "<"))]
    return f' at {theirs[-1].filename}:{theirs[-1].lineno}, "{theirs[-1].line}"' if theirs else ""


def _scripted(model: nn.Module) -> str:
    """Name the module that torch.export cannot look into; empty if there is none."""
    scripted = (n for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule))
    name = next(scripted, "")
    return (
        f"{name} is compiled by TorchScript, into which torch.export cannot look: put the module "
        "in its place that it was made from."
        if name
        else ""
    )


def _packed(error: Exception) -> str:
    """Describe packed sequences at the failure; empty if there are none."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    if any(isinstance(v, PackedSequence) for frame in frames for v in frame.f_locals.values()):
        return (
            "The forward packs sequences (pack_padded_sequence), so that the values of their "
            "lengths decide the sizes inside, which no one graph can have: let it run the "
            "recurrent layers on the padded batch."
        )
    return ""


def _unregistered(error: Exception) -> str:
    """Describe how to register the class of an output with torch; empty for other failures."""
    found = re.match(r"Found <class '(?P<name>[^']+)'> in output, which is not", str(error))
    if not found:
        return ""
    name = found["name"].rpartition(".")[2]
    return (
        f"The forward returns a {name}, which torch cannot take apart: if it is a dataclass, call "
        f"torch.export.register_dataclass({name}) once, before; or return a tuple or a dict."
    )


def _differentiating(error: Exception) -> str:
    """Describe a gradient within the forward, at which torch 2.11 fails; empty for all else."""
    return LOST_GRADIENT if str(error).startswith("Expected FakeTensor, got") else ""


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
        own: names of all parameters of what was captured.
        batch: size of the batch that the graph was captured with.
        dynamic: whether dim 0 of the inputs stayed symbolic.
        path: of the submodule that was captured, empty for the whole model; all names are the
            whole model's.
        sanitized: tensor names in the program that differ, each with the submodule's name.
        batches: batch sizes for which the graph is valid, if the batch is symbolic.
        free: names of the free sizes that stayed symbolic.
        why_fixed: the line of the model's code at which a size was fixed, or torch's message.
        memory: those of ``inputs`` that are tensors of objects whose tensors the forward replaces,
            such as a cache.
    """

    program: ExportedProgram
    names: dict[str, str]
    inputs: tuple[str, ...]
    aliases: dict[str, str]
    parameters: frozenset[str]
    own: tuple[str, ...]
    batch: int
    dynamic: bool
    path: str = ""
    sanitized: Mapping[str, str] = field(default_factory=dict)
    batches: Batches = ANY
    free: frozenset[str] = frozenset()
    why_fixed: str = ""
    memory: frozenset[str] = frozenset()

    @property
    def graph(self) -> Graph:
        """The fx graph."""
        graph: Graph = self.program.graph
        return graph

    @property
    def unused(self) -> tuple[str, ...]:
        """The parameters that the eval graph never touches."""
        read = (node.name for node in self.graph.nodes if node.users)
        used = {self.names[name] for name in read if name in self.names}
        return tuple(name for name in self.own if self.aliases.get(name, name) not in used)

    def stored(self, target: str) -> str:
        """Return the name in ``names`` of the tensor ``target`` of the program's module."""
        name = within(self.path, self.sanitized.get(target, target))
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
    """Capture the eval-mode graph of the model, or of its submodule at ``path``.

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
    # Without gradients, parts of a forward that switch them off are no special case.
    # Without torch's log of failures: the error explains them in the user's terms.
    with (
        one_at_a_time(),
        evaluating(part),
        class_forwards(part),
        tensor_outputs_only(part, example) as opener,
        general_code_paths(),
        muted(),
    ):
        found = with_symbols(part, (args, kwargs), free) if dynamic_batch and batch else Found()
        program = found.program
        if program is None:
            try:
                program = exported(part, args, kwargs, strict=False)
            except CaptureError:
                raise
            except Exception as error:
                failure = _failure(part, args, kwargs)
                raise CaptureError(failure or explained(error, part)) from error
        if found.is_free:
            batch = batch_of(*widened(args, kwargs, found.batches))
    constants = program.graph_signature.inputs_to_lifted_tensor_constants.values()
    check_owned(part, [program.constants[name] for name in constants])
    _check_dtypes(program.graph)
    _check_shapes(program)
    captured = _index(model, program, batch or 1, found.is_free, path)
    return replace(
        captured,
        memory=frozenset(captured.inputs[number] for number in opener.written),
        batches=found.batches,
        free=symbolic(program, free) if free else frozenset(),
        why_fixed=found.why_fixed,
    )


def _check_dtypes(graph: Graph) -> None:
    """Refuse inputs whose dtype differs from the weights': torch.export does not check it."""
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


# Operators that return as many positions as a mask, or other values, have.
CHOOSING = {
    getattr(torch.ops.aten, name).default for name in ("nonzero", "nonzero_numpy", "masked_select")
} | {torch.ops.aten.index.Tensor, torch.ops.aten.where.default}


def _bound_chosen(node: Node) -> None:
    """Give a number to the count of positions that a node chooses: that of all positions."""
    values: Any = node.meta.get("val")
    masks: list[Any] = [each.meta.get("val") for each in node.all_input_nodes]
    if node.target == torch.ops.aten.index.Tensor:
        masks = [mask for mask in masks[1:] if mask.dtype in (torch.bool, torch.uint8)]
    numbers = [size_hint(size) for mask in masks[-1:] for size in mask.shape]
    known = [number for number in numbers if number is not None]
    for value in values if isinstance(values, tuple | list) else [values]:
        for size in value.shape if known and len(known) == len(numbers) else ():
            if not isinstance(size, int):
                bound_sizes(size, prod(known))


def _check_shapes(program: ExportedProgram) -> None:
    """Refuse tensors of data-dependent shape, some of which torch.export accepts.

    Positions may be chosen by the inputs alone. What weights have computed is rounded otherwise in
    another dtype or runtime, and would then choose others.
    """
    signature = program.graph_signature
    computed = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
    for node in program.graph.nodes:
        if not computed.isdisjoint(each.name for each in node.all_input_nodes):
            computed.add(node.name)
        choosers = node.all_input_nodes[1:] or node.all_input_nodes
        if node.target in CHOOSING and computed.isdisjoint(each.name for each in choosers):
            _bound_chosen(node)
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
    program.graph.eliminate_dead_code()  # unused results are no part of the graph
    _name_modules(program.graph, path)
    own = (within(path, name) for name, _ in model.get_submodule(path).named_parameters())
    return Captured(
        program=program,
        names=names,
        inputs=tuple(signature.user_inputs),  # type: ignore[arg-type]
        aliases=aliases,
        parameters=frozenset(parameters),
        own=tuple(own),
        batch=batch,
        dynamic=dynamic,
        path=path,
        sanitized=sanitize_names(program),
    )


def _name_modules(graph: Graph, path: str) -> None:
    """Prefix the module paths in a submodule's graph with the submodule's path in the model."""
    for node in graph.nodes if path else ():
        stack = node.meta.get("nn_module_stack") or {}
        moved = {key: (within(path, inner), kind) for key, (inner, kind) in stack.items()}
        node.meta["nn_module_stack"] = moved


def _canonical_names(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Return each tensor name with the first name of the same tensor, and those that differ."""
    first: dict[int, str] = {}
    canonical: dict[str, str] = {}
    every: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False)]
    every += model.named_buffers(remove_duplicate=False)
    for name, tensor in every:
        canonical[name] = first.setdefault(id(tensor), name)
    return canonical, {name: to for name, to in canonical.items() if name != to}


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
            size = free.sizes(example)[name]
            found[name] = (
                f"{name} cannot be free, but {size} alone{_because(captured.why_fixed)}. "
                f"{_equally_large(captured.inputs, example, free, size)}Leave it out of "
                "dynamic_shapes, or change the code there: a number that it has can be read off "
                "the tensor (x.shape); a loop in Python over as many steps can be one operator "
                "(nn.LSTM, cumsum)."
            )
    return found


def _equally_large(inputs: Sequence[str], example: Inputs, free: FreeSizes, size: int) -> str:
    """Return a sentence about inputs that have a dim of this size and no free one."""
    leaves = pytree.tree_leaves(example)
    others = [
        name
        for number, (name, leaf) in enumerate(zip(inputs, leaves, strict=False))
        if isinstance(leaf, Tensor) and size in leaf.shape[1:] and not free.of(number)
    ]
    if not others:
        return ""
    return f"The same size is fixed in {', '.join(others)}: give its dim this name, too. "


def fixed_batch(model: nn.Module, example: Inputs) -> dict[str, str]:
    """Return the reason why the batch is fixed or restricted; empty if it is free."""
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
