"""Outputs of the dense network with some weights changed, beside its own outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.compat import pytree
from l0prune.data.dataset import map_tensors
from l0prune.features.unlabelled.lockstep import View, Weights, forwards, real_places
from l0prune.features.unlabelled.tape import OtherWay, Tape
from l0prune.running.batches import call
from l0prune.selection.score_input import output_tensor

Judge = Callable[[Any, Any], Callable[[Any], float]]
"""Function from wanted outputs and their batch to a function: the error of other outputs."""
Change = Callable[[], tuple[Tensor, Tensor | None]]
"""Function that returns the arguments of ``Read.run_with``."""
_ALIKE = 1e-3  # relative difference of outputs that is rounding


def beginning(model: nn.Module, batch: Any, count: int, names: Sequence[str] = ()) -> Any | None:
    """Return the first places of each example, if their outputs depend on no later place.

    It is so in a causal language model; None for another network, or if examples are padded.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    lengths = {leaf.shape[1] for leaf in leaves if leaf.dim() > 1}
    real = real_places(batch)
    if len(lengths) != 1 or max(lengths) <= count or (real is not None and not bool(real.all())):
        return None
    first = map_tensors(batch, lambda leaf: leaf[:, :count] if leaf.dim() > 1 else leaf)
    with torch.no_grad():
        whole = output_tensor(call(model, batch), names)
        try:
            found = output_tensor(call(model, first), names)
        except Exception:  # of whatever kind: it takes this length alone
            return None
    if whole.dim() < 2 or whole.shape[1] != max(lengths):
        return None
    wanted = whole[:, :count]
    is_same = found.shape == wanted.shape and bool(
        (found - wanted).abs().max() <= _ALIKE * wanted.abs().max()
    )
    return first if is_same else None


class Probe:
    """A batch on which outputs of the dense network with some weights changed are compared.

    Operators before the first changed weight are run once.

    Attributes:
        batch: its inputs.

    Args:
        model: the dense network, in eval mode.
        weights: of the model.
        batch: of inputs.
        judge: of outputs.
    """

    def __init__(self, model: nn.Module, weights: Weights, batch: Any, judge: Judge) -> None:
        self._model, self._weights, self.batch = model, weights, batch
        self._tape, self._first = Tape(), dict[View, int]()
        with self._running(self._tape) as (forward,):
            while (read := forward.advance()) is not None:
                self._first.setdefault(read.view, read.number)
            self._judge = judge(forward.output, batch)
        self._tape.recorded(forward.output)

    def _running(self, tape: Tape | None) -> Any:
        return forwards(self._model, [self.batch], self._weights, tape=tape)

    def error(self, changed: Mapping[View, Change]) -> float:
        """Return the error of the outputs with other weights."""
        first = min((self._first[view] for view in changed if view in self._first), default=0)
        tape = self._tape
        try:
            if tape.is_repeatable and first > tape.start:
                self._move(first)
            if tape.is_repeatable and first >= tape.start:
                tape.begin()
                found = self._compared(changed, tape)
                if tape.is_repeatable:
                    return found
        except OtherWay:
            pass
        return self._compared(changed, None)

    def _move(self, first: int) -> None:
        """Run the forward up to an operator, from which it starts then."""
        self._tape.begin(first)
        with self._running(self._tape) as (forward,):
            while (read := forward.advance()) is not None and read.number < first:
                pass
        self._tape.move()

    def _compared(self, changed: Mapping[View, Change], tape: Tape | None) -> float:
        with self._running(tape) as (forward,):
            while (read := forward.advance()) is not None:
                if read.view in changed:
                    read.run_with(*changed[read.view]())
            return self._judge(forward.output)
