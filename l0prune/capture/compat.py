"""Private names of torch, each behind a public name of this module with its reason.

No other file uses one. ``tests/capture/test_compat.py`` has a test for each name, which fails if
another torch has changed it.
"""

from __future__ import annotations

import copy
import importlib
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._decomp import core_aten_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node, proxy
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY as PRESERVED
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvolutionBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# BatchNormBase: class of all batch norms, also of those of other packages.
# ConvolutionBase: class of all convolution layers, transposed ones among them.
# NormBase: class of all batch and instance norms, also of those of other packages.
# OpOverload: class of the operators in a captured graph. FakeTensor: class of its tensors, which
# have no memory. TorchDispatchMode: intercepts each operator. core_aten_decompositions: for an
# operator, a function that computes it by others; enable_python_dispatcher lets fake tensors run
# it. pytree: flattening of nested inputs and outputs, as torch.export does it.
# PRESERVED: key in a graph's meta for attributes that copies and transforms keep.
__all__ = [
    "PRESERVED",
    "BatchNormBase",
    "ConvolutionBase",
    "FakeTensor",
    "NormBase",
    "OpOverload",
    "TorchDispatchMode",
    "core_aten_decompositions",
    "enable_python_dispatcher",
    "pytree",
]

functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Return whether a transform of torch.func (``vmap``, ``grad``) is running."""

below_autograd: Callable[[], AbstractContextManager[None]]
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView
"""Context that runs operators below autograd, as within a ``TorchDispatchMode``."""

without_compiler: Callable[[Callable[..., Any]], Callable[..., Any]] = _disable_dynamo
"""Decorator: torch.compile breaks the graph here. ``torch.compiler.disable`` loads the compiler."""


def constant_for_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function to be called while torch.compile traces, and its result as a constant.

    ``torch.compiler.assume_constant_result`` does so too, but loads the compiler for a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


no_torch_function = torch._C._disabled_torch_function_impl
"""``__torch_function__`` of a tensor subclass that defers to ``__torch_dispatch__``."""


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which compiled code runs eagerly."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to load it takes seconds
        return nullcontext()
    result: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return result


def without_torch_function() -> AbstractContextManager[Any]:
    """Return a context in which tensor subclasses are treated as plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


def shell(cls: type[Tensor], like: Tensor, dtype: torch.dtype) -> Any:
    """Return a subclass tensor without memory, with the shape, strides and device of ``like``."""
    return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device
    )


def has_saved_tensor_hooks() -> bool:
    """Return whether hooks pack the tensors saved for backward, or recompute them (checkpoints)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_recorded() -> bool:
    """Return whether FX, fake tensors, functionalization or TorchScript trace the operators."""
    keys = torch._C._TorchDispatchModeKey
    modes = (keys.PROXY, keys.FAKE, keys.FUNCTIONAL)
    is_traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined]
    return is_traced or any(torch._C._get_dispatch_mode(m) for m in modes)


def schema_of(target: Any) -> Any:
    """Return an operator's signature (arguments, aliases, what it writes); None for others."""
    return getattr(target, "_schema", None)


def version_of(tensor: Tensor) -> int | None:
    """Return the number of writes that autograd has seen; None for an inference tensor."""
    return None if tensor.is_inference() else tensor._version


def size_hint(size: Any) -> int | None:
    """Return a size as a number; a symbolic one as in the example, None where it has no value.

    A size that depends on data has the number given to ``bound_sizes``.
    """
    value = size if isinstance(size, int) else size.node.hint
    if value is None:
        found = size.node.expr.subs(_BOUNDS.get(size.node.shape_env, {}))
        value = found if found.is_number else None
    return None if value is None else int(value)


_BOUNDS: MutableMapping[Any, dict[Any, int]] = WeakKeyDictionary()


def bound_sizes(size: Any, largest: int) -> None:
    """Give a number to the symbol of a size that depends on data."""
    expression = size.node.expr
    if expression.is_Symbol and size.node.hint is None:
        _BOUNDS.setdefault(size.node.shape_env, {})[expression] = largest


def size_expression(size: Any) -> Any:
    """Return the sympy expression of a symbolic size; a number as it is."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def standard_convolution(cls: type[nn.Module], kind: Any) -> bool:
    """Return whether a class computes its forward as torch's convolution ``kind`` does."""
    own = getattr(cls, "_conv_forward", None)
    return cls.forward is kind.forward and own is kind._conv_forward


def convolve(layer: Any, input: Any, weight: Any, bias: Any) -> Tensor:
    """Return the output of a torch convolution layer with other weights, and with its padding."""
    result: Tensor = layer._conv_forward(input, weight, bias)
    return result


def average_(averages: list[Tensor], values: list[Tensor], share: float) -> None:
    """Move each average by ``share`` of its distance to the value, all in one kernel."""
    torch._foreach_lerp_(averages, values, share)


def copy_all_(targets: list[Tensor], values: list[Tensor]) -> None:
    """Copy each value into its target, all in one kernel."""
    torch._foreach_copy_(targets, values)


def filled(values: Sequence[int], device: torch.device) -> Tensor:
    """Return integers on a device, passed as kernel arguments, which a CUDA graph can record."""
    result = torch.zeros(len(values), dtype=torch.int64, device=device)
    torch._foreach_add_(result.unbind(), values)
    return result


CAUSAL_MASK = (transformer, "_detect_is_causal_mask")
"""Function in which a layer of torch compares a mask's values with the causal mask's."""

SIZE_FIXED = (ShapeEnv, "_set_replacement")
"""Method ``(symbol, expression, …)`` that torch.export calls where it replaces a size's symbol."""

SIZE_ASKED = (ShapeEnv, "_log_guard")
"""Method ``(prefix, expression, …)`` that torch.export calls where code asks about a size."""

EXPORTER_LOG = (torch._C, "_jit_onnx_log")
"""Function that prints a whole graph to the process's stdout when the legacy exporter fails."""


TRACE_LOG = "torch.__trace"
"""Logger of torch's trace files; at its first record it turns off unless they are requested."""


class CallStack:
    """Stack frames of the caller, as in ``CapturedTraceback``, with source lines read lazily.

    For each node of a graph torch.export reads the source lines of all frames of the stack, and
    then keeps those of forwards: an eighth of the time of a capture.
    """

    @classmethod
    def extract(cls) -> CallStack:
        """Return an object with the stack of the caller."""
        return cls()

    def summary(self) -> traceback.StackSummary:
        """Return the frames, the outermost first."""
        frames = traceback.StackSummary()
        for frame, line in traceback.walk_stack(sys._getframe(1)):
            place = frame.f_code.co_filename, line, frame.f_code.co_name
            frames.append(traceback.FrameSummary(*place, lookup_line=False))
        frames.reverse()
        return frames


STACK_OF_A_NODE = (proxy, "CapturedTraceback")
"""Class that gives a new node of a graph its stack trace."""


@contextmanager
def replaced(owner: Any, name: str, instead: Any) -> Iterator[None]:
    """Replace an attribute of a module or class of torch within the context.

    An attribute that this torch lacks is not added: it was private.
    """
    if not hasattr(owner, name):
        yield
        return
    before = getattr(owner, name)
    setattr(owner, name, instead)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def one_onnx_registry() -> Iterator[None]:
    """Cache the operator registry of torch's ONNX exporter within the context.

    Without it each export parses the source of all functions of onnxscript: half of the time for
    a file of few nodes. Operators of torchvision are in it only once torchvision is loaded.
    """
    registry = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    made = staticmethod(_once(registry.from_torchlib, "torchvision" in sys.modules))
    with replaced(registry, "from_torchlib", made):
        yield


@contextmanager
def quick_promotion() -> Iterator[None]:
    """Spare the ONNX exporter's pass of type promotion nodes that it leaves as they are.

    The pass runs each operator again on fake tensors: a tenth of the time of a file. Without a rule
    for the operator, or with tensors of one dtype of floats alone, its value is known.
    """
    try:
        passes = importlib.import_module("torch.onnx._internal.fx.passes.type_promotion")
        interpreter, rule_of = passes._TypePromotionInterpreter, passes.get_type_promotion_rule
    except (AttributeError, ImportError):  # another torch
        yield
        return
    whole = interpreter.run_node

    def run_node(self: Any, node: Node) -> Any:
        value = node.meta.get("val")
        if node.op == "call_function" and value is not None:
            numbers = (int, float, complex)
            leaves = pytree.tree_leaves((node.args, node.kwargs))
            dtypes = {getattr(self.env.get(each), "dtype", None) for each in node.all_input_nodes}
            are_alike = len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64}
            if are_alike and not any(isinstance(leaf, numbers) for leaf in leaves):
                return value
            if not rule_of(node, self.type_promotion_table):
                return value
        return whole(self, node)

    with replaced(interpreter, "run_node", run_node):
        yield


Table = dict[Any, Callable[..., Any]]


@contextmanager
def replacing_operators(
    replace: Callable[[ExportedProgram, set[Any], Table], ExportedProgram | None],
) -> Iterator[None]:
    """Let a function replace what torch's ONNX exporter does not translate, within the context.

    It gets the program, the operators that are translated and the decompositions of the others. If
    it returns None the exporter traces the program again, as it does without this context.
    """
    try:
        passes = importlib.import_module("torch.onnx._internal.exporter._fx_passes")
        tables = importlib.import_module("torch.onnx._internal.exporter._decomp")
        whole = passes.decompose_with_registry
        translated_in = tables.get_onnx_implemented_overloads
        table_of = tables.create_onnx_friendly_decomposition_table
    except (AttributeError, ImportError):  # another torch
        yield
        return

    def decompose(program: ExportedProgram, registry: Any) -> ExportedProgram:
        translated = set(translated_in(registry))
        found = replace(program, translated, table_of(translated))
        return whole(program, registry) if found is None else found

    with replaced(passes, "decompose_with_registry", decompose):
        yield


def is_composite(operator: OpOverload) -> bool:
    """Return whether an operator is made of others, which a trace sees in its place."""
    return bool(operator._can_decompose())


def memory_of(tensor: Tensor) -> int:
    """Return a number that tensors in the same memory share, those on the meta device among them.

    Raises:
        NotImplementedError: a sparse tensor, or one inside of torch.func, has none.
    """
    found: int = tensor.untyped_storage()._cdata
    return found


def _has_partner(first: Any, second: Any, node: Any) -> bool:
    """Return whether another node than the first of a pattern may be its second."""
    shared = (n for n, value in enumerate(first.inputs) if any(value is v for v in second.inputs))
    number = next(shared, len(node.inputs))
    if number >= len(node.inputs) or node.inputs[number] is None:
        return True
    kind, users = second.op_identifier(), node.inputs[number].consumers()
    return any(user is not node and kind in (None, user.op_identifier()) for user in users)


def _pattern_matcher(*names: str) -> Any:
    """Return onnxscript's class that matches patterns; None if it lacks one of these names."""
    try:
        found = importlib.import_module("onnxscript.rewriter._matcher").SimplePatternMatcher
    except (AttributeError, ImportError):  # another onnxscript
        return None
    return found if all(hasattr(found, name) for name in names) else None


@contextmanager
def quick_rewrites() -> Iterator[None]:
    """Spare onnxscript's rewriter the search for patterns of several outputs that cannot match.

    For each node and pattern it collects all nodes of the graph, and tries all combinations of
    those of a kind, before it looks whether the node fits the pattern's first output, and whether
    another one reads what that reads: the square of the number of nodes.
    """
    matcher = _pattern_matcher("match", "_init_match", "_match_node")
    if matcher is None:
        yield
        return
    onnx_ir, whole = importlib.import_module("onnx_ir"), matcher.match

    def match(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        if not self.pattern.has_single_output_node:
            outputs, verbose = self.pattern.output_nodes, options.get("verbose", 0)
            self._tracer = options.get("tracer")
            self._graph = graph if isinstance(graph, onnx_ir.Graph) else graph.graph
            self._init_match(verbose)
            if not self._match_node(outputs[0], node):
                return self._match
            if len(outputs) == 2 and not _has_partner(outputs[0], outputs[1], node):
                self._init_match(verbose)
                return self._multi_match((node, node), options.get("remove_nodes", True))
        return whole(self, model, graph, node, **options)

    with replaced(matcher, "match", match):
        yield


@contextmanager
def exact_numbers() -> Iterator[None]:
    """Keep onnxscript's rewriter from taking numbers near 0 and 1 for these in the context.

    It would leave out ``x + 1e-9`` and ``x * 0.999999``, by which zeros are no divisors and angles
    have a cosine. Other numbers of its patterns, such as a root, are compared as it does.
    """
    matcher = _pattern_matcher("_match_constant")
    if matcher is None:
        yield
        return
    near = matcher._match_constant

    def match(self: Any, pattern: Any, value: Any) -> bool:
        if not near(self, pattern, value):
            return False
        wanted, found = pattern.value, value.const_value.numpy()
        if wanted not in (0, 1) or found.item() == wanted:
            return True
        return bool(self.fail(f"{value.name} is {found}, not {wanted}."))

    with replaced(matcher, "_match_constant", match):
        yield


@cache
def _once(function: Callable[..., Any], has_torchvision: bool) -> Callable[..., Any]:
    return cache(function)


@contextmanager
def quiet_copies() -> Iterator[None]:
    """Suppress torch 2.11's FutureWarning about LeafSpec for copies of graphs in the context."""
    if not _copies_warn():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        yield


@cache
def _copies_warn() -> bool:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        copy.deepcopy(pytree.treespec_leaf())
    return bool(found)


def on_copy(graph: GraphModule, hook: Callable[[GraphModule], None]) -> None:
    """Call ``hook`` on each copy that is made of a graph."""
    graph._register_deepcopy_hook(hook)


def leave_to_ddp(module: nn.Module, names: Sequence[str]) -> None:
    """Make DistributedDataParallel ignore these parameters and buffers of ``module``."""
    module.__dict__["_ddp_params_and_buffers_to_ignore"] = list(names)


def unshard_modules(model: nn.Module) -> None:
    """Undo ``fully_shard`` on a model and all its modules, except for their parameters.

    These remain shards, registered as the modules' parameters.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for module in model.modules():
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            module.__dict__.pop(mark, None)
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            if group is not None:
                handles += group._module_to_pre_save_state_dict_hook_handle.values()
                handles += group._module_to_pre_load_state_dict_hook_handle.values()
                handles += (each._post_load_hook_handle for each in group.fsdp_params)
        for handle in handles:
            handle.remove()
        for key in (STATE_KEY, REGISTRY_KEY):
            module.__dict__.pop(key, None)
        _module_state_mapping.pop(module, None)
        module.__class__ = type(module).__mro__[type(module).__mro__.index(FSDPModule) + 1]


def first_to_set(key: str, value: str) -> str:
    """Set a key of the processes' common store if it is not set; return its value.

    Raises:
        RuntimeError: the process that kept the store has ended.
    """
    found: str = common_store().compare_set(key, "", value).decode()
    return found


def common_store() -> Any:
    """Return the store that the processes of the default group share."""
    return torch.distributed.distributed_c10d._get_default_store()


def has_pre_hooks(module: nn.Module) -> bool:
    """Return whether hooks run before the module's forward."""
    return bool(module._forward_pre_hooks)


def drop_from_state(program: ExportedProgram, name: str) -> None:
    """Remove a parameter from a program's state that its signature no longer names."""
    program._state_dict.pop(name, None)


def attention_of(module: nn.Module) -> str | None:
    """Return the kind of attention that a model of transformers runs; None for other models."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def auto_classes(module: nn.Module) -> list[str]:
    """Return transformers' AutoModel classes that map the model's config to its class."""
    known = vars(importlib.import_module("transformers.models.auto.modeling_auto"))
    names = [name for name in known if name.startswith("AutoModel")]
    mappings = {name: getattr(known[name], "_model_mapping", {}) for name in names}
    config: Any = type(module.config)
    return [
        name for name, each in mappings.items() if config in each and each[config] is type(module)
    ]


def keep_guards(program: ExportedProgram, known: dict[str, Any]) -> None:
    """Keep the guards of a program that hold for the given inputs, and drop the others.

    ``known`` has the names that guard code uses: ``L``, the inputs by name, and ``torch``.
    """
    program._guards_code = [code for code in program._guards_code if eval(code, known)]
