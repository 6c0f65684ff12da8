"""Recurrent layers as one operator each while torch.export runs, over any number of steps.

torch traces ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` step by step: their length becomes a number, and
the trace takes as long as they do. Here one operator stands for the call, which only says how large
its results are; in the exported program the call is torch's own again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

_ATEN = torch.ops.aten

# By kind: the function that modules call, and the operator of graphs.
_KINDS: dict[str, tuple[Callable[..., Any], Any]] = {
    "lstm": (torch.lstm, _ATEN.lstm.input),
    "gru": (torch.gru, _ATEN.gru.input),
    "rnn_tanh": (torch.rnn_tanh, _ATEN.rnn_tanh.input),
    "rnn_relu": (torch.rnn_relu, _ATEN.rnn_relu.input),
}
KIND_OF = {function: kind for kind, functions in _KINDS.items() for function in functions}
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


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
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[Tensor]:
    directions = 2 if bidirectional else 1
    output, cell = weights[1].shape[1], weights[1].shape[0] // GATES[kind]
    ends = (output, cell) if kind == "lstm" else (output,)
    batch = x.shape[0 if batch_first else 1]
    return [
        x.new_empty((*x.shape[:2], output * directions)),
        *(x.new_empty((layers * directions, batch, size)) for size in ends),
    ]


RECURRENT = torch.ops.l0prune.recurrent.default


def _as_torch(kind: str, states: Sequence[Any]) -> Any:
    """Return the states as torch's functions take them: a list for an LSTM, else a tensor."""
    return [*states] if kind == "lstm" else states[0]


def as_one(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a recurrent function as one operator; one of packed sequences as it is."""
    if kwargs or isinstance(args[2], Tensor):  # of packed ones the states are the third argument
        return function(*args, **kwargs)
    x, states, *rest = args
    given = [states] if isinstance(states, Tensor) else states
    return tuple(RECURRENT(KIND_OF[function], x, given, *rest))


INSTEAD = dict.fromkeys(KIND_OF, as_one)


def as_torchs_own(program: ExportedProgram) -> None:
    """Let a program call torch's own operators again, in place."""
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=RECURRENT):
                given: Any = node.args
                kind, x, states, *rest = given
                node.target = _KINDS[kind][1]
                node.args = (x, _as_torch(kind, states), *rest)
            module.recompile()
