"""Compensation of a cut network, layer by layer, beside the dense network.

The dense and the cut network compute the same batches side by side. At each weight they pause: the
weight is replaced by the least-squares map from the layer's inputs in the cut network to its
outputs in the dense one, and both are resumed. A weight that several products read is fitted to
all of them at the last one, so what lies between is computed in a second pass with the new weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.features.unlabelled.joint import Part, solve_together
from l0prune.features.unlabelled.lockstep import (
    OTHER_WAYS,
    Read,
    Reader,
    View,
    Weights,
    along_reads,
    forwards,
    places_of,
)
from l0prune.features.unlabelled.uses import norm_of, uses_of
from l0prune.gating.multiplying import along
from l0prune.plan.plan import Plan
from l0prune.progress.stages import counting, steps
from l0prune.selection.least_squares import Moments, Solution, precision, solve
from l0prune.selection.matrices import by_channel

_ROWS, _FEW_ROWS = 1 << 19, 1 << 16  # of one layer, at most, and where features are few: …
_ENOUGH = 32  # … rows for each feature. Neighbouring positions of maps are much alike
LARGEST = 1 << 14  # most features for a full covariance, …
_FOR_EACH, _LARGEST_OF_FEW = 2, 1280  # … or so many, without so many rows for each
_HELD = 4  # one batch in so many is held out to choose the damping
_PASSES = 2  # where several products read one weight


class Tandem:
    """The dense and the cut network, which compute the same batches side by side.

    Attributes:
        layers: by the name of each weight that was changed, the part of its outputs' variance that
            is left as error.
        few: layers with few samples for their features, by name: number of both.
        large: layers with too many features for a full covariance, by name: their number.
    """

    def __init__(self, dense: nn.Module, cut: nn.Module, plan: Plan, kept: Tensor) -> None:
        self.dense, self.cut, self.plan, self.kept = dense, cut, plan, kept
        self.of_dense, self.of_cut = Weights(dense), Weights(cut)
        self.norms: dict[tuple[str, ...], _Statistics] = {}
        self.layers: dict[str, float] = {}
        self.few: dict[str, tuple[int, int]] = {}
        self.large: dict[str, int] = {}

    def run(self, batches: Sequence[Any]) -> dict[str, float]:
        """Refit the cut network's weights, and return the remaining error of each layer."""
        uses = uses_of(self.dense, batches[0])
        is_shared = any(each.calls > 1 or not each.is_alone for each in uses.readers.values())
        for _ in steps(range(_PASSES if is_shared else 1)):
            self.norms, self.layers = {}, {}
            self._pass(batches, uses.readers, uses.norms)
        for norm, statistics in self.norms.items():
            self._tell(norm, statistics)
        return self.layers

    def _pass(
        self,
        batches: Sequence[Any],
        readers: Mapping[View, Reader],
        norms: set[tuple[str, ...]],
    ) -> None:
        """Run all batches once, and refit each weight at its last product."""
        fits = dict[View | str, _Fit]()
        for view, reader in readers.items():
            fits.setdefault(view if reader.is_alone else reader.name, _Fit()).calls += reader.calls
        with (
            counting(sum(reader.calls for reader in readers.values())) as counter,
            forwards(self.dense, batches, self.of_dense, readers=readers) as dense,
            forwards(self.cut, batches, self.of_cut, note=self._note, readers=readers) as cut,
        ):
            unseen = Counter({view: reader.calls for view, reader in readers.items()})
            while unseen or norms - self.norms.keys():
                theirs = [forward.advance() for forward in dense]
                ours = [forward.advance() for forward in cut]
                pairs = [self._pair(a, b) for a, b in zip(theirs, ours, strict=True)]
                views = {None if pair is None else pair[0].view for pair in pairs}
                if views == {None}:
                    break
                if len(views) > 1:
                    raise UsageError(OTHER_WAYS.format(next(filter(None, views)).name))
                self._step([pair for pair in pairs if pair], readers, fits)
                unseen -= Counter(filter(None, views))
                counter.step()

    def _pair(self, dense: Read | None, cut: Read | None) -> tuple[Read, Read] | None:
        if dense is None or cut is None or dense.view != cut.view:
            if dense is cut:
                return None
            raise UsageError(OTHER_WAYS.format((dense or cut).name))  # type: ignore[union-attr]
        return dense, cut

    def _step(
        self,
        pairs: Sequence[tuple[Read, Read]],
        readers: Mapping[View, Reader],
        fits: dict[View | str, _Fit],
    ) -> None:
        view = pairs[0][0].view
        reader = readers.get(view)
        if reader is None:
            return
        key = view if reader.is_alone else reader.name
        fit = fits[key]
        fit.calls -= 1
        layer = _Layer(self, reader, *pairs[0], len(pairs))
        fit.is_possible &= layer.can_change
        fit.is_needed |= layer.has_to_change(pairs)
        if fit.is_needed:
            self._tell_of(layer)
        if not fit.is_possible or not (fit.is_needed or fit.calls or fit.layers):
            return
        seen, held = fit.moments.setdefault(view, (layer.moments(), layer.moments()))
        for number, (dense, cut) in enumerate(pairs):
            layer.count(held if number % _HELD == 0 else seen, dense, cut, len(pairs), number)
        fit.layers[view] = layer
        if not fit.calls:
            if fit.is_needed:
                error = fit.change()
                self.layers[reader.name] = max(error, self.layers.get(reader.name, 0.0))
            del fits[key]  # and the activations that its layers hold

    def _tell_of(self, layer: _Layer) -> None:
        """Note a layer that cannot be repaired as well as others."""
        features, name = len(layer.features), layer.reader.name
        if layer.is_left_out and features > LARGEST:
            self.large[name] = features
        elif layer.is_left_out or (layer.places == 1 and layer.rows < features):
            self.few[name] = layer.rows, features

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


@dataclass
class _Fit:
    """Products that one weight is fitted to, in one pass.

    Attributes:
        calls: how many are to come.
        layers: the last of each view of the weight.
        moments: of each view, those that weights are fitted to, and the held-out ones.
        is_needed: some product is cut, or has not the dense network's inputs.
        is_possible: none is too large.
    """

    calls: int = 0
    layers: dict[View, _Layer] = field(default_factory=dict)
    moments: dict[View, tuple[Moments, Moments]] = field(default_factory=dict)
    is_needed: bool = False
    is_possible: bool = True

    def change(self) -> float:
        """Refit the weight, and return the remaining error."""
        parts = [(layer, *self.moments[view]) for view, layer in self.layers.items()]
        if len(parts) == 1 and parts[0][0].reader.is_alone:
            layer, seen, held = parts[0]
            return layer.change(seen, held)
        return _change_together(parts)


def _change_together(parts: Sequence[tuple[_Layer, Moments, Moments]]) -> float:
    """Fit a weight that products read in several ways, and return the remaining error."""
    whole = parts[0][0].whole
    flat = whole.double().flatten()
    order = torch.arange(len(flat), device=flat.device).reshape(whole.shape)
    found = solve_together(
        [
            Part(*layer.targets(seen, held), layer.at_features(order), layer.reader.has_bias)
            for layer, seen, held in parts
        ],
        flat,
    )
    with torch.no_grad():
        whole.copy_(found.flat.reshape(whole.shape))
        for (layer, *_), bias in zip(parts, found.biases, strict=True):
            layer.shift(bias)
    return found.error


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
        self.whole = tandem.of_cut.tensors[reader.name]
        plan, alive = tandem.plan, torch.ones((), dtype=torch.bool)
        self.layouts = plan.tensors[plan.aliases.get(reader.name, reader.name)]
        for dim, layout in enumerate(self.layouts):
            alive = alive & along(self.whole, plan.mask(layout, tandem.kept), dim)
        alive = along_reads(alive, read.view, reader.matrix, self.whole)
        self.features = alive.any(0).any(1).nonzero().flatten()
        self.outputs = alive.any(0).any(0).nonzero().flatten()
        self.is_cut = len(self.features) < alive.shape[1]
        _, features, outputs = alive.shape
        self.is_wide = outputs > features and read.stream is None
        self.rows = batches * reader.rows
        is_few = self.rows < _FOR_EACH * features
        is_folded = (is_few or features > LARGEST) and reader.is_alone
        self.places = places_of(read, self._slots()) if is_folded else 1
        is_large = len(self.features) > (_LARGEST_OF_FEW if is_few else LARGEST)
        self.is_left_out = is_large and self.places == 1
        self.can_change = bool(alive.any()) and not self.is_left_out

    def _slots(self) -> Tensor:
        """Return numbers that differ between slots, for each feature; shape (groups, features)."""
        plan, found = self.tandem.plan, torch.ones((), dtype=torch.float64)
        numbers = 2 + torch.arange(plan.size, dtype=torch.float64)
        for dim, layout in enumerate(self.layouts):
            found = found * along(self.whole, plan.spread(layout, numbers.sqrt()), dim)
        return along_reads(found, self.read.view, self.reader.matrix, self.whole)[..., 0]

    def has_to_change(self, pairs: Sequence[tuple[Read, Read]]) -> bool:
        """Return whether the layer is cut, or has not the dense one's inputs."""
        return self.is_cut or not all(_are_fed_alike(dense, cut) for dense, cut in pairs)

    def moments(self) -> Moments:
        """Return empty moments."""
        return Moments(is_basis=self.is_wide and self.places == 1)

    def count(self, moments: Moments, dense: Read, cut: Read, batches: int, seed: int) -> None:
        """Add a batch: the layer's inputs in the cut network, and its outputs in the dense one."""
        is_of_outputs = self.places == 1 and not self.is_wide
        if is_of_outputs:
            out = dense.run() if self.reader.bias else dense.without_bias
            if dense.stream is not None and cut.stream is not None:
                out = out + (dense.stream - cut.stream).reshape(out.shape)
        most = min(_ROWS, max(_FEW_ROWS, _ENOUGH * len(self.features) // self.places))
        for wanted in dense.row_blocks(most // batches // self.reader.calls, seed, self.places):
            x = cut.product.inputs(cut.args, wanted)[..., self.features]
            if self.places > 1:
                y = dense.product.inputs(dense.args, wanted)
                x, y = (by_channel(each, self.places) for each in (x, y))
            elif self.is_wide:
                y = dense.product.inputs(dense.args, wanted)
            else:
                y = dense.product.outputs(out, wanted)[..., self.outputs]
            moments.add(x, y)

    def targets(self, seen: Moments, held: Moments) -> tuple[Moments, Moments]:
        """Return the moments of the inputs and of the outputs that they should give."""
        if not self.is_wide:
            return seen, held
        own, shift = self._dense_matrix(), self._dense_bias()
        return seen.through(own, shift), held.through(own, shift)

    def at_features(self, values: Tensor) -> Tensor:
        """Return those values of a weight's elements that may change, as in the matrix."""
        found = along_reads(values, self.read.view, self.reader.matrix, self.whole)
        return found[:, self.features][..., self.outputs]

    def change(self, seen: Moments, held: Moments) -> float:
        """Fit the layer's weights to the dense layer's outputs, and return the remaining error."""
        read = self.read
        dtype = precision(len(self.features))
        matrix = read.product.matrix(read.weight).to(dtype, copy=True)
        if self.places > 1:
            found = self._by_channel(seen, held)
        else:
            prior = matrix[:, self.features][..., self.outputs]
            found = solve(*self.targets(seen, held), prior, has_bias=self.reader.has_bias)
        block = matrix[:, self.features]
        block[..., self.outputs] = found.weight.to(block)  # by channel it is as precise as these
        matrix[:, self.features] = block
        with torch.no_grad():
            read.weight.copy_(read.product.unmatrix(matrix).reshape(read.weight.shape))
            self.shift(found.bias)
        return found.error

    def _by_channel(self, seen: Moments, held: Moments) -> Solution:
        """Weights W′_kp = Σ_c B_kc W_cp, with B the same at each place p of the kernel.

        B predicts the dense layer's channels from the remaining ones: a fit of every feature would
        need many samples, and too large a matrix.
        """
        kept = self.features[:: self.places] // self.places
        prior = torch.zeros_like(seen.xy)
        prior[:, torch.arange(len(kept)), kept] = 1
        found = solve(seen, held, prior, has_bias=self.reader.has_bias)
        own, shift = self._dense_matrix(), self._dense_bias()
        places = own.unflatten(1, (-1, self.places))  # groups, channels, places, outputs
        by = places.to(found.weight)
        weight = torch.einsum("gkc,gcpo->gkpo", found.weight, by).flatten(1, 2)
        bias = torch.einsum("gc,gcpo->go", found.bias, places)
        return Solution(weight, bias if shift is None else bias + shift, found.error)

    def _dense_matrix(self) -> Tensor:
        """Return the dense layer's weight, shape (groups, features, outputs), float64."""
        return self.dense.product.matrix(self.dense.weight).double()[..., self.outputs]

    def _dense_bias(self) -> Tensor | None:
        """Return the dense layer's bias where it may change, shape (groups, outputs), or None."""
        bias = self.dense.bias
        if bias is None or not self.reader.bias:
            return None
        groups, _, outputs = self.dense.product.matrix(self.dense.weight).shape
        return bias.double().reshape(groups, outputs)[:, self.outputs]

    def shift(self, bias: Tensor) -> None:
        """Write the constant into the bias, or change by it what comes after the product.

        Shape: bias (groups, outputs).
        """
        groups, tensors = len(bias), self.tandem.of_cut.tensors
        size = self.read.product.matrix(self.read.weight).shape[2]
        index = (torch.arange(groups, device=bias.device)[:, None] * size + self.outputs).flatten()
        shift = bias.flatten()
        if self.reader.bias is not None:
            assert self.read.bias is not None
            self.read.bias.view(-1)[index] = shift.to(self.read.bias)
        elif self.reader.added is not None:
            added = tensors[self.reader.added.name].view(-1)[self.reader.added.begin :]
            added[index] += shift.to(added)
        elif self.reader.norm is not None:
            mean = tensors[self.reader.norm[2]]
            mean[index] -= shift.to(mean)
