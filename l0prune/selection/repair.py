"""Compensation of a cut network, layer by layer, beside the dense network.

The dense and the cut network compute the same batches side by side. At each weight they pause: the
weight is replaced by the least-squares map from the layer's inputs in the cut network to its
outputs in the dense one, and both are resumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.gating.multiplying import along
from l0prune.plan.plan import Plan
from l0prune.selection.least_squares import Moments, Solution, solve
from l0prune.selection.lockstep import (
    OTHER_WAYS,
    Read,
    Reader,
    Weights,
    along_reads,
    forwards,
    norm_of,
    places_of,
    survey_of,
)
from l0prune.selection.matrices import by_channel

_ROWS = 1 << 19  # of one layer, at most: neighbouring positions of maps are much alike
_LARGEST = 5120  # most features for a full covariance, …
_FOR_EACH = 2  # … with so many rows for each
_HELD = 4  # one batch in so many is held out to choose the damping


class Tandem:
    """The dense and the cut network, which compute the same batches side by side.

    Attributes:
        layers: by the name of each weight that was changed, the part of its outputs' variance that
            is left as error.
        few: layers with fewer samples than features, by name: number of both.
    """

    def __init__(self, dense: nn.Module, cut: nn.Module, plan: Plan, kept: Tensor) -> None:
        self.dense, self.cut, self.plan, self.kept = dense, cut, plan, kept
        self.of_dense, self.of_cut = Weights(dense), Weights(cut)
        self.norms: dict[tuple[str, ...], _Statistics] = {}
        self.layers: dict[str, float] = {}
        self.few: dict[str, tuple[int, int]] = {}

    def run(self, batches: Sequence[Any]) -> dict[str, float]:
        """Refit the cut network's weights, and return the remaining error of each layer."""
        survey = survey_of(self.dense, batches[0])
        readers = survey.readers
        with (
            forwards(self.dense, batches, self.of_dense, readers=readers) as dense,
            forwards(self.cut, batches, self.of_cut, note=self._note, readers=readers) as cut,
        ):
            counted = Counter[str]()
            unseen = Counter({name: reader.calls for name, reader in readers.items()})
            moments: dict[str, tuple[Moments, Moments]] = {}
            while True:
                theirs = [forward.advance() for forward in dense]
                ours = [forward.advance() for forward in cut]
                pairs = [self._pair(a, b) for a, b in zip(theirs, ours, strict=True)]
                names = {None if pair is None else pair[0].name for pair in pairs}
                if names == {None} or not (unseen or survey.norms - self.norms.keys()):
                    break
                if len(names) > 1:
                    raise UsageError(OTHER_WAYS.format(next(filter(None, names))))
                self._step([pair for pair in pairs if pair], readers, counted, moments)
                unseen -= Counter(filter(None, names))
        for norm, statistics in self.norms.items():
            self._tell(norm, statistics)
        return self.layers

    def _pair(self, dense: Read | None, cut: Read | None) -> tuple[Read, Read] | None:
        if dense is None or cut is None or dense.name != cut.name:
            if dense is cut:
                return None
            raise UsageError(OTHER_WAYS.format((dense or cut).name))  # type: ignore[union-attr]
        return dense, cut

    def _step(
        self,
        pairs: Sequence[tuple[Read, Read]],
        readers: Mapping[str, Reader],
        counted: Counter[str],
        moments: dict[str, tuple[Moments, Moments]],
    ) -> None:
        name = pairs[0][0].name
        reader = readers.get(name)
        for dense, _ in pairs:
            dense.run()
        if reader is None:
            return
        work = _Layer(self, reader, *pairs[0], len(pairs))
        if not work.has_to_change(pairs):
            return
        if work.places == 1 and work.rows < len(work.features):
            self.few[name] = work.rows, len(work.features)
        seen, held = moments.setdefault(name, (work.moments(), work.moments()))
        for number, (dense, cut) in enumerate(pairs):
            work.count(held if number % _HELD == 0 else seen, dense, cut, len(pairs), number)
        counted[name] += 1
        if counted[name] == reader.calls:
            self.layers[name] = work.change(seen, held)
            del moments[name]

    def _note(self, operator: Any, args: tuple[Any, ...], _: Any) -> None:
        norm = norm_of(operator, args, self.of_cut)
        if norm is not None:
            self.norms.setdefault(norm, _Statistics()).add(args[0], args[-1])

    def _tell(self, norm: tuple[str, ...], statistics: _Statistics) -> None:
        """Set a BatchNorm's statistics to those of its present inputs, and keep its function.

        γ′ = γ·σ′/σ and β′ = β + γ·(μ′ − μ)/σ, so that train mode computes the same, too.
        """
        weight, bias, mean, variance = (self.of_cut.tensors.get(name) for name in norm)
        if weight is None or bias is None or mean is None or variance is None:
            return
        new_mean, new_variance = statistics.result()
        old = (variance.double() + statistics.epsilon).sqrt()
        new = (new_variance + statistics.epsilon).sqrt()
        with torch.no_grad():
            bias.add_((weight.double() * (new_mean - mean.double()) / old).to(bias))
            weight.mul_((new / old).to(weight))
            mean.copy_(new_mean)
            variance.copy_(new_variance)


def _are_fed_alike(dense: Read, cut: Read) -> bool:
    if dense.stream is not None and cut.stream is not None:
        return torch.equal(dense.given, cut.given) and torch.equal(dense.stream, cut.stream)
    return torch.equal(dense.given, cut.given)


class _Statistics:
    """Mean and variance of each channel, streamed."""

    def __init__(self) -> None:
        self.count, self.epsilon = 0, 0.0
        self.first = self.second = torch.zeros(())

    def add(self, x: Tensor, epsilon: float) -> None:
        rows = x.transpose(0, 1).flatten(1).double()
        self.count, self.epsilon = self.count + rows.shape[1], epsilon
        self.first = self.first + rows.sum(1)
        self.second = self.second + rows.square().sum(1)

    def result(self) -> tuple[Tensor, Tensor]:
        mean = self.first / self.count
        return mean, (self.second / self.count - mean.square()).clamp(min=0)


class _Layer:
    """One layer of the cut network, with the features and outputs that may change."""

    def __init__(
        self, tandem: Tandem, reader: Reader, dense: Read, read: Read, batches: int
    ) -> None:
        self.tandem, self.reader, self.dense, self.read = tandem, reader, dense, read
        tensor = tandem.of_cut.tensors[reader.name]
        plan, alive = tandem.plan, torch.ones((), dtype=torch.bool)
        for dim, layout in enumerate(plan.tensors[plan.aliases.get(reader.name, reader.name)]):
            alive = alive & along(tensor, plan.mask(layout, tandem.kept), dim)
        alive = along_reads(alive, read, tensor)
        self.features = alive.any(0).any(1).nonzero().flatten()
        self.outputs = alive.any(0).any(0).nonzero().flatten()
        self.is_cut = len(self.features) < alive.shape[1]
        self.has_bias = bool(reader.bias) or reader.norm is not None
        _, features, outputs = alive.shape
        self.is_wide = outputs > features and read.stream is None
        self.rows = batches * dense.rows
        self.is_few = self.rows < _FOR_EACH * features
        is_folded = self.is_few or features > _LARGEST
        self.places = places_of(read, alive.any(0).any(1)[None]) if is_folded else 1
        self.is_large = len(self.features) > (_LARGEST // 4 if self.is_few else _LARGEST)

    def has_to_change(self, pairs: Sequence[tuple[Read, Read]]) -> bool:
        """Return whether the layer can be fitted, and is cut or has not the dense one's inputs."""
        is_hopeless = self.is_large and self.places == 1
        if is_hopeless or not len(self.features) or not len(self.outputs):
            return False
        return self.is_cut or not all(_are_fed_alike(dense, cut) for dense, cut in pairs)

    def moments(self) -> Moments:
        """Return empty moments."""
        return Moments(is_basis=self.is_wide and self.places == 1)

    def count(self, moments: Moments, dense: Read, cut: Read, batches: int, seed: int) -> None:
        """Add a batch: the layer's inputs in the cut network, and its outputs in the dense one."""
        assert dense.out is not None
        missing = None
        if dense.stream is not None and cut.stream is not None:
            missing = (dense.stream - cut.stream).reshape(dense.out.shape)
        for wanted in dense.row_blocks(_ROWS // batches, seed, self.places):
            x = cut.product.inputs(cut.args, wanted)[..., self.features]
            if self.places > 1:
                y = dense.product.inputs(dense.args, wanted)
                x, y = (by_channel(each, self.places) for each in (x, y))
            elif self.is_wide:
                y = dense.product.inputs(dense.args, wanted)
            else:
                y = dense.product.outputs(dense.out, wanted)[..., self.outputs]
                if missing is not None:
                    y = y + dense.product.outputs(missing, wanted)[..., self.outputs]
            moments.add(x, y)

    def change(self, seen: Moments, held: Moments) -> float:
        """Fit the layer's weights to the dense layer's outputs, and return the remaining error."""
        read = self.read
        matrix = read.product.matrix(read.weight).double().clone()
        prior = matrix[:, self.features][..., self.outputs]
        own = self.dense_matrix()[..., self.outputs]
        shift = self.dense_bias()
        if self.places > 1:
            found = self._by_channel(seen, held, own, shift)
        else:
            if self.is_wide:
                seen, held = (each.through(own, shift) for each in (seen, held))
            found = solve(seen, held, prior, has_bias=self.has_bias)
        block = matrix[:, self.features]
        block[..., self.outputs] = found.weight
        matrix[:, self.features] = block
        with torch.no_grad():
            read.weight.copy_(read.product.unmatrix(matrix).reshape(read.weight.shape))
            self._shift(found)
        return found.error

    def _by_channel(
        self, seen: Moments, held: Moments, own: Tensor, shift: Tensor | None
    ) -> Solution:
        """Weights W′_kp = Σ_c B_kc W_cp, with B the same at each place p of the kernel.

        B predicts the dense layer's channels from the remaining ones: a fit of every feature would
        need many samples, and too large a matrix.
        """
        kept = self.features[:: self.places] // self.places
        prior = torch.zeros_like(seen.xy)
        prior[:, torch.arange(len(kept)), kept] = 1
        found = solve(seen, held, prior, has_bias=self.has_bias)
        places = own.unflatten(1, (-1, self.places))  # groups, channels, places, outputs
        weight = torch.einsum("gkc,gcpo->gkpo", found.weight, places).flatten(1, 2)
        bias = torch.einsum("gc,gcpo->go", found.bias, places)
        return Solution(weight, bias if shift is None else bias + shift, found.error)

    def dense_matrix(self) -> Tensor:
        """Return the dense layer's weight, shape (groups, features, outputs), float64."""
        return self.dense.product.matrix(self.dense.weight).double()

    def dense_bias(self) -> Tensor | None:
        """Return the dense layer's bias, shape (groups, outputs); None where there is none."""
        bias = self.dense.bias
        if bias is None:
            return None
        groups = len(self.dense.product.matrix(self.dense.weight))
        return bias.double().reshape(groups, -1)[:, self.outputs]

    def _shift(self, found: Solution) -> None:
        """Write the constant into the bias, or subtract it from the mean of the next norm."""
        tensors = self.tandem.of_cut.tensors
        groups = len(found.bias)
        size = self.read.product.matrix(self.read.weight).shape[2]
        index = (
            torch.arange(groups, device=found.bias.device)[:, None] * size + self.outputs
        ).flatten()
        shift = found.bias.flatten()
        if self.reader.bias:
            bias = tensors[self.reader.bias]
            bias.view(-1)[index] = shift.to(bias)
        elif self.reader.norm is not None:
            mean = tensors[self.reader.norm[2]]
            mean[index] = mean[index] - shift.to(mean)
