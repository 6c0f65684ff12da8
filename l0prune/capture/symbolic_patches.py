"""Replacements for functions of torch that stop torch.export or fix a symbolic size.

- ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` are traced step by step: their length becomes a number, and
  the trace takes as long as they do. During the trace one operator replaces the call, of which
  only the shapes are computed; in the exported program it is torch's operator again.
- ``torch.cat(x.split(4, 2), 0).split(x.size(0), 0)`` makes as many pieces as there were, but torch
  computes their number by an expression that its symbolic sizes cannot simplify to that.
- ``torch.cdist`` multiplies matrices for more than 25 points, which is faster and less exact.
- Layers branch on the values of a mask: it is compared with the causal one, so that a kernel for
  causal attention can be used; and an encoder whose padding comes last packs its tokens, which
  leaves zeros at the padding. The graph is captured with the mask itself, and with those zeros.
- ``nn.ModuleDict({"in": …})`` is valid, but the code that torch generates from its graph would
  contain ``self.in.weight``. In a captured program such a module is called ``in_``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from keyword import iskeyword
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from l0prune.capture.compat import CAUSAL_MASK, replaced, size_expression

_ATEN = torch.ops.aten

# By kind: the function that modules call, and the operator in graphs.
_KINDS: dict[str, tuple[Callable[..., Any], Any]] = {
    "lstm": (torch.lstm, _ATEN.lstm.input),
    "gru": (torch.gru, _ATEN.gru.input),
    "rnn_tanh": (torch.rnn_tanh, _ATEN.rnn_tanh.input),
    "rnn_relu": (torch.rnn_relu, _ATEN.rnn_relu.input),
}
KIND_OF = {function: kind for kind, functions in _KINDS.items() for function in functions}
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


class Settings(NamedTuple):
    """The last arguments of a recurrent call."""

    has_biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    @property
    def directions(self) -> int:
        """Number of directions."""
        return 2 if self.bidirectional else 1


@torch.library.custom_op(
    "l0prune::recurrent",
    mutates_args=(),
    schema="(str kind, Tensor x, Tensor[] states, Tensor[] weights, bool has_biases, int layers, "
    "float dropout, bool train, bool bidirectional, bool batch_first) -> Tensor[]",
)
def recurrent(
    kind: str, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], *settings: Any
) -> list[Tensor]:
    """Compute the outputs and final states of a recurrent call."""
    return [*_KINDS[kind][0](x, _as_torch(kind, states), weights, *settings)]


@recurrent.register_fake
def _(
    kind: str,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    *settings: Any,
) -> list[Tensor]:
    given = Settings(*settings)
    output, cell = weights[1].shape[1], weights[1].shape[0] // GATES[kind]
    ends = (output, cell) if kind == "lstm" else (output,)
    batch = x.shape[0 if given.batch_first else 1]
    return [
        x.new_empty((*x.shape[:2], output * given.directions)),
        *(x.new_empty((given.layers * given.directions, batch, size)) for size in ends),
    ]


RECURRENT = torch.ops.l0prune.recurrent.default


def _as_torch(kind: str, states: Sequence[Any]) -> Any:
    """Return the states as torch's functions take them: a list for an LSTM, else a tensor."""
    return [*states] if kind == "lstm" else states[0]


def call_as_one_operator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a recurrent function as one operator, or unchanged for packed sequences."""
    if kwargs or isinstance(args[2], Tensor):  # of packed ones the states are the third argument
        return function(*args, **kwargs)
    x, states, *rest = args
    given = [states] if isinstance(states, Tensor) else states
    return tuple(RECURRENT(KIND_OF[function], x, given, *rest))


RECURRENT_CALLS = dict.fromkeys(KIND_OF, call_as_one_operator)


def restore_recurrent_calls(program: ExportedProgram) -> None:
    """Replace the recurrent operator in a program by torch's operators again, in place."""
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=RECURRENT):
                given: Any = node.args
                kind, x, states, *rest = given
                node.target = _KINDS[kind][1]
                node.args = (x, _as_torch(kind, states), *rest)
            module.recompile()


_IF_MANY = "use_mm_for_euclid_dist_if_necessary"
_MANY = 25  # torch's own number


class SymbolicPatches(TorchFunctionMode):
    """Mode in which the functions of ``_INSTEAD`` keep symbolic sizes symbolic."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function, or its replacement."""
        instead = _INSTEAD.get(func)
        if instead is None:
            return func(*args, **(kwargs or {}))
        return instead(func, *args, **(kwargs or {}))


def _split(
    func: Callable[..., Any],
    tensor: Tensor,
    split_size_or_sections: Any = None,
    dim: int = 0,
    **by: Any,
) -> Any:
    """Split into pieces of one size."""
    size = by.get("split_size", split_size_or_sections)
    if isinstance(size, int | SymInt) and _is_symbolic(tensor.shape[dim], size):
        number = _number(tensor.shape[dim] // size)
        if number and _is_equal(number * size, tensor.shape[dim]):
            return tensor.split([size] * number, dim)
    return func(tensor, size, dim)


def _chunk(func: Callable[..., Any], tensor: Tensor, chunks: int, dim: int = 0) -> Any:
    """Split into a number of pieces."""
    size = tensor.shape[dim] // chunks if _is_symbolic(tensor.shape[dim]) else 0
    if _is_symbolic(size) and _is_equal(size * chunks, tensor.shape[dim]):
        return tensor.split([size] * chunks, dim)
    return func(tensor, chunks, dim)


def _cdist(
    func: Callable[..., Any],
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str = _IF_MANY,
) -> Any:
    """Compute distances in a mode that does not depend on a symbolic number of points."""
    points = (x1.shape[-2], x2.shape[-2])
    if compute_mode == _IF_MANY and _is_symbolic(*points):
        are_many = any(not _is_symbolic(size) and size > _MANY for size in points)
        compute_mode = f"{'use' if are_many else 'donot_use'}_mm_for_euclid_dist"
    return func(x1, x2, p=p, compute_mode=compute_mode)


_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.split: _split,
    Tensor.split: _split,
    torch.chunk: _chunk,
    Tensor.chunk: _chunk,
    torch.cdist: _cdist,
    **RECURRENT_CALLS,
}


def _is_symbolic(*sizes: Any) -> bool:
    return any(isinstance(size, SymInt) and _number(size) is None for size in sizes)


def _number(size: int | SymInt) -> int | None:
    """Return a size as an int; None if it is symbolic."""
    if not isinstance(size, SymInt):
        return size
    expression = size_expression(size)
    return int(expression) if expression.is_number else None


def _is_equal(size: int | SymInt, other: int | SymInt) -> bool:
    """Return whether both are the same for all values of their symbols."""
    return bool(size_expression(size) == size_expression(other))


def _is_declared_causal(
    mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """Return whether the caller says that the mask is causal, whatever its values."""
    return is_causal is True


def _zero_padding(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap the forward of ``nn.TransformerEncoder`` to compute as in eval mode without gradients.

    There it packs its tokens, if it may, where the padding of every row comes last, so that padding
    is zero before the last norm. A captured graph has the general layers, and sets these zeros.
    """

    @functools.wraps(forward)
    def padded(
        self: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        if src_key_padding_mask is None or mask is not None or not _may_pack(self, src):
            return forward(self, src, mask, src_key_padding_mask, is_causal)
        norm, self.norm = self.norm, None
        try:
            output = forward(self, src, mask, src_key_padding_mask, is_causal)
        finally:
            self.norm = norm
        padding = src_key_padding_mask != 0
        is_last = (padding[:, :-1] & ~padding[:, 1:]).any().logical_not()
        output = output.masked_fill((padding & is_last).unsqueeze(-1), 0)
        return output if norm is None else norm(output)

    return padded


def _may_pack(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Return whether torch would pack the tokens by the values of the mask."""
    return (
        torch.backends.mha.get_fastpath_enabled()
        and getattr(encoder, "use_nested_tensor", False)
        and getattr(encoder, "mask_check", True)
        and not encoder.layers[0].training
        and src.dim() == 3
        and not torch.is_autocast_enabled()
    )


# The module or class of torch, the name of the function in it, and its replacement.
_LAYERS: tuple[tuple[ModuleType | type, str, Any], ...] = (
    (*CAUSAL_MASK, _is_declared_causal),
    (nn.TransformerEncoder, "forward", _zero_padding(nn.TransformerEncoder.forward)),
)


@contextmanager
def general_code_paths() -> Iterator[None]:
    """Make torch's layers take their general code path, with the same results, in the context."""
    with ExitStack() as stack:
        for owner, name, instead in _LAYERS:
            stack.enter_context(replaced(owner, name, instead))
        yield


def sanitize_names(program: ExportedProgram) -> dict[str, str]:
    """Rename tensors whose names contain keywords, in place; return the old names by the new."""
    signature = program.graph_signature
    targets = {spec.target for spec in signature.input_specs if spec.target}
    tail = "_"
    while any(_sanitized(old, tail) in targets - {old} for old in targets):
        tail += "_"
    new = {old: _sanitized(old, tail) for old in targets if _sanitized(old, tail) != old}
    if not new:
        return {}
    for specs in (signature.input_specs, signature.output_specs):
        for number, spec in enumerate(specs):
            if spec.target in new:
                specs[number] = replace(spec, target=new[spec.target])  # type: ignore[call-overload]
    for tensors in (program._state_dict, program._constants):
        _rename(tensors, new)
    return {to: old for old, to in new.items()}


def _sanitized(name: str, tail: str) -> str:
    return ".".join(part + tail if iskeyword(part) else part for part in name.split("."))


def _rename(tensors: dict[str, Any], new: dict[str, str]) -> None:
    """Rename keys in place; their order stays."""
    items = [(new.get(name, name), value) for name, value in tensors.items()]
    tensors.clear()
    tensors.update(items)
