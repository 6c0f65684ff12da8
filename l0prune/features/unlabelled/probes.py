"""Outputs of the dense network with some weights changed, beside its own outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from l0prune.features.unlabelled.lockstep import View, Weights, forwards
from l0prune.features.unlabelled.tape import OtherWay, Tape

Judge = Callable[[Any, Any], Callable[[Any], float]]
"""Function from wanted outputs and their batch to a function: the error of other outputs."""
Change = Callable[[], tuple[Tensor, Tensor | None]]
"""Function that returns the arguments of ``Read.run_with``."""
_ALIKE = 1e-3  # relative difference of outputs that is rounding


class Probe:
    """A batch on which outputs of the dense network with some weights changed are compared.

    Operators before the first changed weight are run once.

    Args:
        model: the dense network, in eval mode.
        weights: of the model.
        batch: of inputs.
        judge: of outputs.
    """

    def __init__(self, model: nn.Module, weights: Weights, batch: Any, judge: Judge) -> None:
        self._model, self._weights, self._batch = model, weights, batch
        self._tape, self._first = Tape(), dict[View, int]()
        with self._running(self._tape) as (forward,):
            while (read := forward.advance()) is not None:
                self._first.setdefault(read.view, read.number)
            self._judge = judge(forward.output, batch)
        self._tape.recorded()

    def _running(self, tape: Tape | None) -> Any:
        return forwards(self._model, [self._batch], self._weights, tape=tape)

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
