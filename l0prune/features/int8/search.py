"""Search for an int8 file's calibration and its nodes in float32, by measured error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from onnx import ModelProto

from l0prune.errors import UsageError
from l0prune.exporting.onnx import collect
from l0prune.exporting.onnx.differences import Differences, Outputs, Pairs, differences
from l0prune.exporting.onnx.times import Given
from l0prune.features.int8.compensation import compensated
from l0prune.features.int8.fastest import Fastest, Speed, with_small_weights
from l0prune.features.int8.quantizer import LAYERS, METHODS, RECURRENT, Feed, Quantizer

SMALL = 0.05  # an error up to which nothing is searched
_WORTH = 0.8  # nodes stay in float32 if at most this share of the error is left
_TRIED = 2  # calls for trying layers one by one
_MOST = 4  # one layer in so many may stay in float32
_NAMED = 3


class Comparison:
    """Comparison of files with the outputs of one in float32.

    Attributes:
        is_joined: whether outputs hold values of unlike sizes, such as boxes and scores, so that
            each slice of them counts relative to its own size, too.

    Args:
        network: the file in float32.
        feeds: inputs of all files.

    Raises:
        UsageError: the file does not take the feeds.
    """

    def __init__(self, network: collect.Network, feeds: Sequence[Feed]) -> None:
        self._feeds, self.is_joined = feeds, False
        self._names = [each.name for each in network.session.get_outputs()]
        self._expected = self.outputs(network)

    def outputs(self, network: collect.Network, calls: int | None = None) -> list[Outputs]:
        """Return the outputs of a file for the first ``calls`` feeds, or for all."""
        try:
            return [network.session.run(None, feed) for feed in self._feeds[:calls]]
        except Exception as error:  # of ONNX Runtime's classes
            raise UsageError(f"the file does not take the calibration inputs: {error}") from error

    def with_outputs(self, found: Sequence[Outputs]) -> Differences:
        """Return the error of each output, and the agreement."""
        errors, agreement = differences(self._names, self._expected, found)
        if self.is_joined:
            for number, (name, error) in enumerate(errors.items()):
                pairs = [
                    (a[number], b[number]) for a, b in zip(self._expected, found, strict=False)
                ]
                errors[name] = None if error is None else max(error, error_of_slices(pairs))
        return errors, agreement

    def worst(self, network: collect.Network, calls: int | None = None) -> float:
        """Return the largest error of a file; for whole numbers, the share that differs."""
        errors, agreement = self.with_outputs(self.outputs(network, calls))
        known = [1 - agreement[n] if error is None else error for n, error in errors.items()]
        return max(known, default=0.0)


def error_of_slices(pairs: Pairs) -> float:
    """Return the largest error over the dims: the root mean of those of all slices along a dim.

    The error of a slice is its squared differences over its squares, at most 1. Examples, along
    the first dim, are no slices, and a dim of several sizes has none.
    """
    wide = [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs]
    squares = [(a**2, (a - b) ** 2) for a, b in wide]
    dims, worst = range(squares[0][0].ndim), 0.0
    for dim in dims[1:]:
        if len({own.shape[dim] for own, _ in squares}) > 1:
            continue
        others = tuple(each for each in dims if each != dim)
        size, gap = (sum(each.sum(others) for each in of) for of in zip(*squares, strict=True))
        if size.any():
            shares = np.minimum(gap, size)[size > 0] / size[size > 0]
            worst = max(worst, float(np.sqrt(shares.mean())))
    return worst


class Search:
    """Search for the calibration method and the nodes in float32 with the least error.

    First kinds of operators that do not multiply are tried, such as the sums of a residual stream,
    and LSTMs, whose state adds up errors; then layers one by one. ``compensate`` then tries weights
    that make up for the rounding.

    Attributes:
        method: of calibration.
        kept: names of the operators and layers that stay in float32.
        speed: the times that layers stay in float32 for; None where none were taken.
        costly: the layers that cost most, with the error of each alone.
        compensated: the error without and with weights that make up for the rounding; None where
            they were not tried.
    """

    method = METHODS[0]

    def __init__(self, quantizer: Quantizer, comparison: Comparison, path: Path) -> None:
        self._quantizer, self._comparison, self._path = quantizer, comparison, path
        comparison.is_joined = quantizer.is_joined
        self._nodes: list[str] = []
        self.kept: list[str] = []
        self.costly: list[tuple[str, float]] = []
        self.compensated: tuple[float, float] | None = None
        self.speed: Speed | None = None
        self._slow: list[str] = []
        self._better: ModelProto | None = None

    def error(self) -> float:
        """Return the error of the chosen file."""
        return self._error_of(self.made())

    def made(self) -> ModelProto:
        """Return the chosen file."""
        return self._better or self._made(self._nodes)

    def run(self, *, tries_layers: bool = True) -> None:
        """Choose the calibration method, then the operators and layers in float32.

        Args:
            tries_layers: whether layers are chosen, too; a judge chooses these by itself.
        """
        error = self._choose_method()
        error = self._keep_operators(error)
        if error > SMALL and tries_layers:
            self._keep_layers(error)

    def keep_slow(self, given: Given, threads: int) -> None:
        """Keep nodes in float32 where that is faster, with their weights stored in eight bits.

        Args:
            given: inputs of a call that is timed, in order.
            threads: that it may use.
        """
        single, known = self._quantizer.model, {*_names(self._quantizer.nodes)} - {*self._nodes}
        may = [node.name for node in single.graph.node if node.name in known]
        folder = self._path.parent

        def made(slow: Collection[str]) -> ModelProto:
            return self._quantizer.quantized(self.method, [*self._nodes, *slow])

        fastest = Fastest(single, made, may, given, threads, folder)
        self._slow, self.speed = fastest.run()
        shown = [name for name in self._slow if name in self._layers] or self._slow
        self._tell(map(self._quantizer.layer_of, shown))
        if self._slow:
            self._choose_method()

    def compensate(self, feeds: Sequence[Feed]) -> None:
        """Use weights that compensate the rounding if they make the error smaller."""
        plain = self.made()
        better = compensated(self._quantizer.model, plain, feeds)
        self.compensated = self._error_of(plain), self._error_of(better)
        self._better = better if self.compensated[1] < self.compensated[0] else plain

    def _made(self, nodes: Collection[str], method: str = "") -> ModelProto:
        """Return the file with these nodes in float32 beside those that are faster so."""
        made = self._quantizer.quantized(method or self.method, [*nodes, *self._slow])
        with_small_weights(made, self._slow)
        return made

    def _error(self, nodes: Collection[str], method: str = "", calls: int | None = None) -> float:
        return self._error_of(self._made(nodes, method), calls)

    def _error_of(self, model: ModelProto, calls: int | None = None) -> float:
        self._path.write_bytes(model.SerializeToString())
        return self._comparison.worst(collect.Network(self._path, 0, collect.CPU), calls)

    def _choose_method(self) -> float:
        errors = {method: self._error(self._nodes, method) for method in self._quantizer.ranges}
        self.method = min(errors, key=errors.__getitem__)
        return errors[self.method]

    def _keep_operators(self, error: float) -> float:
        """Keep kinds of operators in float32 where that is worth it; return the resulting error.

        A value is quantized unless all of its readers are in float32, so that kinds are excluded
        together, and then put back one by one.
        """
        kinds = self._others()
        recurrent = self._quantizer.nodes.get(RECURRENT, ())
        kinds |= {name: [name] for name in recurrent}
        least = self._error(_names(kinds)) if error > SMALL and kinds else error
        if least > _WORTH * error:
            return error
        enough = max(SMALL, least / _WORTH)
        for kind in list(kinds):
            names = kinds.pop(kind)
            if self._error(_names(kinds)) > enough:
                kinds[kind] = names
        self._nodes = _names(kinds)
        self._tell(sorted(kinds.keys() - {*recurrent}))
        self._tell(self._quantizer.layer_of(name) for name in recurrent if name in kinds)
        return self._choose_method()

    def _keep_layers(self, error: float) -> None:
        ranked = list(self._alone)
        least, chosen, number = error, 0, 1
        while number * _MOST <= len(ranked) and least > SMALL:
            left = self._error([*self._nodes, *ranked[:number]])
            if left < _WORTH * least:
                least, chosen = left, number
            number *= 2
        self._nodes += ranked[:chosen]
        self._tell(map(self._quantizer.layer_of, ranked[:chosen]))

    @cached_property
    def _alone(self) -> dict[str, float]:
        """The error of each layer where it alone is in eight bits, the largest first."""
        every = _names(self._quantizer.nodes)
        alone = {
            name: self._error([each for each in every if each != name], calls=_TRIED)
            for name in self._layers
        }
        ranked = sorted(self._layers, key=alone.__getitem__, reverse=True)
        self.costly = [(self._quantizer.layer_of(name), alone[name]) for name in ranked[:_NAMED]]
        return {name: alone[name] for name in ranked}

    def _tell(self, names: Iterable[str]) -> None:
        """Add operators and layers to those that are told to be in float32."""
        self.kept = list(dict.fromkeys((*self.kept, *names)))

    def _others(self) -> dict[str, Sequence[str]]:
        """Return the kinds of operators that do not multiply, with the names of their nodes."""
        return {k: v for k, v in self._quantizer.nodes.items() if k not in LAYERS}

    @property
    def _layers(self) -> list[str]:
        """The names of the nodes that multiply by weights."""
        return [n for kind in sorted(LAYERS) for n in self._quantizer.nodes.get(kind, ())]

    def beyond(self) -> list[Self]:
        """Return searches with ever more in float32 than this one, what costs most first.

        All operators that do not multiply are first, then one layer more each time. What is faster
        in float32, and weights that compensate, are to be chosen anew.
        """
        kinds = self._others()
        groups = [_names(kinds), *([name] for name in self._alone)]
        told = [sorted(kinds), *([self._quantizer.layer_of(name)] for name in self._alone)]
        found, last = list[Self](), self
        for group, names in zip(groups, told, strict=True):
            more = [name for name in group if name not in {*self._nodes}]
            if not more:
                continue
            last = copy.copy(last)
            last._nodes, last._slow, last._better = [*last._nodes, *more], [], None
            last.speed = last.compensated = None
            last._tell(names)
            found.append(last)
        return found


AnySearch = TypeVar("AnySearch", bound=Search)


def least_kept(search: AnySearch, is_within: Callable[[AnySearch], bool]) -> AnySearch:
    """Return the first of a search and those beyond it that is within, by bisection.

    All in float32 is within. Numbers double first: judging files with little in float32 is
    seldom in vain.

    Args:
        search: that was run.
        is_within: function that completes a search, and says whether its file is within.
    """
    if is_within(search):
        return search
    further = search.beyond()
    if not further:
        return search
    low, high = -1, 0
    while high < len(further) - 1 and not is_within(further[high]):
        low, high = high, min(2 * high + 1, len(further) - 1)
    if high == len(further) - 1:
        is_within(further[high])
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_within(further[middle]) else (middle, high)
    return further[high]


def _names(kinds: Mapping[str, Sequence[str]]) -> list[str]:
    return [name for names in kinds.values() for name in names]
