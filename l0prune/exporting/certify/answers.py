"""Answers of the gated model to the inputs of a certificate: run once, compared often.

Outputs are named by their keys or fields, else by their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn

from l0prune.capture.compat import pytree
from l0prune.capture.example_inputs import call
from l0prune.capture.last_place import RUNS, MovedResults, moved
from l0prune.capture.model_checks import same_draws
from l0prune.capture.outputs import tensor_names
from l0prune.capture.sizes import Inputs
from l0prune.errors import CertificateError, in_a_line
from l0prune.exporting.certify.counting import MacsSeen
from l0prune.exporting.certify.difference import common_scales, comparable, differences, largest
from l0prune.exporting.certify.dtypes import InOneDtype, cast, lent, name_of
from l0prune.exporting.certify.lending import Borrowing, move_values, read_of
from l0prune.progress.stages import stage, steps
from l0prune.running.device import device_of


class Rounding:
    """Float32 rounding of a model, or of its submodule at ``path``; measured when it is asked for.

    Args:
        model: by its own exact answer, so that a fault of the model does not count as rounding.
        inputs: of the model, or of the submodule.
        exact: dtype of the exact answer.
        path: of the submodule.
        scales: largest values of the outputs (``common_scales``).
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        exact: torch.dtype = torch.float64,
        path: str = "",
        scales: Sequence[float] = (),
    ) -> None:
        self._model, self._inputs, self._exact = model, inputs, exact
        self._path, self._scales = path, scales
        self._found: list[list[float]] = []

    def runs(self) -> Iterator[list[float]]:
        """Yield the error of each output tensor in float32, of one run after another, with weights,
        inputs and results moved at random by one unit in the last place. The first caller that
        needs a run makes it. Ends where the model does not run so.
        """
        for number in range(RUNS):
            if number == len(self._found):
                try:
                    self._found.append(self._errors(_SEEDS * (number + 1)))
                except CertificateError:
                    return
            yield self._found[number]

    @stage("measuring how much float32 rounds")
    def _errors(self, seed: int) -> list[float]:
        return differences(self._answer, self._run(torch.float32, seed), self._scales)

    @cached_property
    def _answer(self) -> list[Any]:
        return self._run(self._exact)

    def _run(self, dtype: torch.dtype, seed: int | None = None) -> list[Any]:
        again, given = lent(self._model, dtype), self._inputs
        if seed is not None:
            move_values(again, seed)
            seeds = count(-seed, -1)

            def near(leaf: Any) -> Any:
                is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
                return moved(leaf, next(seeds)) if is_float else leaf

            given = pytree.tree_map(near, given)
        with MovedResults(seed) if seed is not None else nullcontext():
            output = output_of(again.get_submodule(self._path), given, dtype)
        return [x.clone() if isinstance(x, Tensor) else x for x in comparable(output)]


_SEEDS = 1_000_003  # more than a model has parameters

BOTH = (torch.float64, torch.float32)
Verify = Literal["float64", "float32"]


@dataclass(frozen=True)
class Answer:
    """Outputs of a model for one input.

    Attributes:
        inputs: the input.
        exact: the tensors and numbers of its output in the first of ``dtypes``.
        single: the same in float32; None if not requested.
        read: names of the parameters that its forward has read, over all inputs run together.
        names: names of the output tensors.
        scales: the largest value of each tensor over all inputs run together.
        whose: of the ``gated`` model, or of the ``module`` that the user gets.
        dtypes: in which the model was run.
        measured: returns the rounding of its output tensors in float32, in one run after another;
            empty if it cannot be measured.
        macs: multiply-accumulates for one example, as torch counts them; None if not counted.
    """

    inputs: Inputs
    exact: Sequence[Any]
    single: Sequence[Any] | None
    read: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    scales: tuple[float, ...] = ()
    whose: Literal["gated", "module"] = "gated"
    dtypes: Sequence[torch.dtype] = BOTH
    measured: Callable[[], Iterable[Sequence[float]]] = tuple
    macs: float | None = None

    def at(self, dtype: torch.dtype) -> Sequence[Any]:
        """Return the output in one of the ``dtypes``."""
        if dtype == self.dtypes[0]:
            return self.exact
        assert self.single is not None
        return self.single

    @cached_property
    def roundings(self) -> list[float]:
        """Error of each output tensor in float32 by rounding alone, in one run."""
        return differences(self.exact, self.at(torch.float32), self.scales)

    @property
    def rounding(self) -> float:
        """The largest of ``roundings``."""
        return largest(self.roundings)

    def measured_on(self, model: nn.Module, path: str = "") -> Answer:
        """Return the answer with a model, or its submodule, on which rounding is measured."""
        rounding = Rounding(model, self.inputs, self.dtypes[0], path, self.scales)
        return replace(self, measured=rounding.runs)

    def of_tensors(self) -> Answer:
        """Return the answer with tensors only, without numbers."""
        exact, single = (
            [leaf for leaf in values or () if isinstance(leaf, Tensor)]
            for values in (self.exact, self.single)
        )
        return replace(self, exact=exact, single=single)


@stage("running the gated model")
def answers_of(
    model: nn.Module,
    inputs: Sequence[Inputs],
    path: str = "",
    dtypes: Sequence[torch.dtype] = BOTH,
    whose: Literal["gated", "module"] = "gated",
) -> tuple[Answer, ...]:
    """Run the model, or its submodule at ``path``, on each of these inputs, on its device.

    In both dtypes it runs on the first input alone, on the others in the last dtype: another size
    that is wrong shows in float32, which takes a fraction of the time.

    Raises:
        CertificateError: it cannot be run.
    """
    counter = MacsSeen()
    last, names, read = _outputs(model, inputs, dtypes[-1], path, counter)
    exact = last[0] if len(dtypes) == 1 else _outputs(model, inputs[:1], dtypes[0], path)[0][0]
    scales = common_scales([exact, *last[1:]])
    answers = [
        Answer(given, values, values, read, tuple(called), scales, whose, dtypes[-1:])
        for given, values, called in zip(inputs, last, names, strict=True)
    ]
    single = last[0] if dtypes[-1] == torch.float32 else None
    macs = counter.for_one(inputs[0])
    answers[0] = replace(answers[0], exact=exact, single=single, dtypes=dtypes, macs=macs)
    return tuple(each.measured_on(model, path) for each in answers)


def _outputs(
    model: nn.Module,
    inputs: Sequence[Inputs],
    dtype: torch.dtype,
    path: str = "",
    counter: MacsSeen | None = None,
) -> tuple[list[list[Any]], list[list[str]], frozenset[str]]:
    """Return the comparable values of each output, names of its tensors, and parameters read.

    ``counter`` counts the run on the first input.
    """
    # lend the whole model: of a submodule alone the gates would be copied unconverted
    whole = lent(model, dtype)
    again = whole.get_submodule(path)
    found, names = [], []
    for number, given in enumerate(steps(inputs)):
        with nullcontext() if number or counter is None else counter:
            output = output_of(again, given, dtype)
        # copies, since the next forward may write into a returned tensor
        found.append(pytree.tree_map_only(Tensor, torch.clone, comparable(output)))
        names.append(tensor_names(output))
    return found, names, read_of(whole)


def is_valid(model: nn.Module, given: Inputs) -> bool:
    """Return whether the model runs in float64 on these inputs and its output has no NaN."""
    try:
        (output,), _, _ = _outputs(model, [given], torch.float64)
    except CertificateError:
        return False
    return not holds_nan(output)


def holds_nan(output: Any) -> bool:
    """Return whether any tensor of the output holds a NaN."""
    leaves = pytree.tree_leaves(output)
    return any(bool(leaf.isnan().any()) for leaf in leaves if isinstance(leaf, Tensor))


def is_finite(model: nn.Module, given: Inputs) -> bool:
    """Return whether the model's output in its own dtypes is finite; its errors are raised."""
    leaves = comparable(output_as_it_is(model, given))
    return all(bool(leaf.isfinite().all()) for leaf in leaves if isinstance(leaf, Tensor))


def output_as_it_is(model: nn.Module, given: Inputs) -> Any:
    """Return the output of a copy in the model's dtypes; a forward may change the module.

    Successive calls draw the same random numbers, if any.
    """
    with Borrowing(), torch.no_grad(), same_draws(model), _exact_products():
        return call(lent(model), cast(given, None, device_of(model)))


def output_of(model: nn.Module, given: Inputs, dtype: torch.dtype) -> Any:
    """Return the output of a model that is in ``dtype``, computed in that dtype throughout.

    Every call draws the same random numbers, if any.
    """
    with torch.no_grad(), same_draws(model, seed=0), running_in(dtype):
        return call(model, cast(given, dtype, device_of(model)))


@contextmanager
def _exact_products() -> Iterator[None]:
    """Context in which float32 products are computed in float32, not in TF32 or bfloat16."""
    backends = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    operators = [
        getattr(b, n) for b in backends for n in ("matmul", "conv", "rnn") if hasattr(b, n)
    ]
    before = [each.fp32_precision for each in operators]
    try:
        for each in operators:
            each.fp32_precision = "ieee"
        yield
    finally:
        for each, precision in zip(operators, before, strict=True):
            each.fp32_precision = precision


@contextmanager
def running_in(dtype: torch.dtype) -> Iterator[None]:
    """Turn errors of a model that runs in ``dtype`` into a CertificateError."""
    try:
        with InOneDtype(dtype), _exact_products():
            yield
    except torch.OutOfMemoryError:  # not a fault of the model
        raise
    except Exception as error:
        raise CertificateError(
            f"The exported model could not be compared with the gated one, because running in "
            f"{name_of(dtype)} failed with {in_a_line(error)}. "
            "Nothing was written. The usual cause is a tensor that model.double() does not "
            "convert: a plain attribute that should be a buffer (register_buffer), or a dtype "
            "fixed in code the model calls."
        ) from error
