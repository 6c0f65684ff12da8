"""Compensation: the weights that are left give back best what the dense network's layers gave.

No labels and no gradients: in the order of the forward, the weights of each layer become the
least-squares solution from what the cut network feeds it to what the dense one's layer gave. So each
layer also repairs what those before it have done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.compat import pytree
from l0prune.capture.copying import copied
from l0prune.capture.model_checks import evaluating
from l0prune.errors import DataError, UsageError, warn
from l0prune.gating.attaching import bypass, detach, holder
from l0prune.gating.bank import Gates
from l0prune.plan.plan import Plan
from l0prune.running.batches import Feed, call
from l0prune.running.device import choose_device, on_device
from l0prune.running.task import Task, batch_length
from l0prune.selection.least_squares import Moments, Solution, solve
from l0prune.selection.lockstep import Forward, Read, Reader, Weights, forwards, norm_of, readers_of
from l0prune.selection.score_input import output_tensor

_ROWS = 1 << 19  # of one layer, at most: positions of maps next to each other say much the same
_LARGEST = 5120  # features of which the whole covariance is taken
_HELD = 4  # every so many-th batch chooses the damping …
_JUDGED = 5  # … and one in so many is used for nothing but to tell what has been gained
SAMPLES, BATCH_SIZE = 512, 64


@dataclass(frozen=True, slots=True)
class Compensation:
    """What a compensation has done.

    Attributes:
        cut: error of the cut network's outputs on inputs that were used for nothing else: its
            mean square over the variance of the dense network's outputs.
        compensated: the same afterwards.
        agreement: the part of these inputs (of their positions, in a dense task) for which the
            largest output is the same as the dense network's, before and afterwards; None where
            outputs are single numbers.
        layers: by the name of each weight that was changed, the part of its outputs' variance that
            is left as error.
    """

    cut: float
    compensated: float
    agreement: tuple[float, float] | None
    layers: dict[str, float]


def compensate(
    model: nn.Module,
    inputs: Any,
    *,
    samples: int = SAMPLES,
    batch_size: int = BATCH_SIZE,
    device: str | torch.device = "auto",
    seed: int = 0,
) -> Compensation:
    """Change the weights that are left, in place, so that the cut network computes what it did.

    Gates stay as they are. A layer keeps its weights where no others do better on inputs that were
    held out, and so does the whole network.

    Args:
        model: a gated model whose open gates are chosen, for instance by ``fit``. With all gates
            open it computes what is to be given back.
        inputs: a tensor or mapping of examples, or what ``finetune`` takes; labels are not looked
            at.
        samples: how many examples are used, at most.
        batch_size: examples at a time, where the source lets us choose.
        device: see ``Settings``.
        seed: of the choice of examples.

    Returns:
        What was gained, on inputs that were not used for it.

    Raises:
        NotGated: the model carries no gates.
        DataError: there are too few inputs, or they do not fit the model.
    """
    root, gates = holder(model)
    gates.make_whole()
    place = choose_device(device, root)
    with on_device(root, place), evaluating(root):
        batches = list(inputs_of(inputs, samples, batch_size, place, seed))
        if len(batches) < 3:
            raise DataError(
                "compensation wants three batches of inputs or more: some to fit the weights, some "
                f"to choose how far, some to judge. There are {len(batches)}: give more inputs, or "
                "a smaller batch_size"
            )
        judged, used = batches[::_JUDGED], [b for n, b in enumerate(batches) if n % _JUDGED]
        with bypass(root):
            cut = cut_copy(root, gates)
            before = fidelity(root, cut, judged)
            layers = _Tandem(root, cut, gates.plan, gates.plan.kept(gates.open())).run(used)
            after = fidelity(root, cut, judged)
        if not after[0] < before[0]:
            return Compensation(before[0], before[0], before[1] and (before[1], before[1]), {})
        _write_back(root, cut, gates)
    agreement = None if before[1] is None or after[1] is None else (before[1], after[1])
    return Compensation(before[0], after[0], agreement, layers)


def inputs_of(
    given: Any, samples: int, batch_size: int, place: torch.device, seed: int
) -> Iterator[Any]:
    """Yield batches of a model's inputs on a device, in random order where there is a choice.

    Raises:
        DataError: there are none, or some are not finite.
    """
    if isinstance(given, Tensor) or _is_example(given):
        generator = torch.Generator().manual_seed(seed)
        count = len(given) if isinstance(given, Tensor) else len(next(iter(given.values())))
        order = torch.randperm(count, generator=generator)[:samples].split(batch_size)
        found: Iterator[Any] = (
            given[index].to(place)
            if isinstance(given, Tensor)
            else {name: value[index].to(place) for name, value in given.items()}
            for index in order
        )
    else:
        feed = Feed(Task.of(given), batch_size, seed, augment=False)
        found = (batch.inputs for batch in feed.train(0, place))
    left = samples
    for batch in found:
        if left <= 0:
            return
        left -= batch_length(batch, None)
        _check_finite(batch)
        yield batch


def _is_example(given: Any) -> bool:
    is_mapping = isinstance(given, Mapping) and bool(given)
    return is_mapping and all(isinstance(value, Tensor) for value in given.values())


def _check_finite(batch: Any) -> None:
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.isfinite().all():
            raise DataError("the inputs hold numbers that are not finite (NaN or infinite)")


def fidelity(
    dense: nn.Module, other: nn.Module, batches: Iterable[Any]
) -> tuple[float, float | None]:
    """Return how far a network's outputs are from another's.

    Returns:
        The mean square of the difference over the variance of the dense network's outputs; and the
        part of the examples (of their places) whose largest output is the same, None where outputs
        are single numbers.
    """
    error = scale = alike = count = 0.0
    with torch.no_grad():
        for batch in batches:
            wanted, found = (output_tensor(call(net, batch)) for net in (dense, other))
            dim = class_dim(wanted)
            error += float((wanted - found).double().square().sum())
            scale += float((wanted - wanted.mean(0)).double().square().sum())
            if dim is not None:
                same = wanted.argmax(dim) == found.argmax(dim)
                alike, count = alike + float(same.sum()), count + same.numel()
    return error / max(scale, 1e-30), alike / count if count else None


def class_dim(outputs: Tensor) -> int | None:
    """Return the dim along which outputs are of classes: the last of a sequence's, else the first.

    None where there is one number for an example.
    """
    if outputs.dim() < 2:
        return None
    dim = 2 if outputs.dim() == 3 else 1
    return dim if outputs.shape[dim] > 1 else None


def cut_copy(root: nn.Module, gates: Gates) -> nn.Module:
    """Return a copy without gates whose tensors are multiplied by them."""
    result = copied(root)
    detach(result)
    tensors = {**dict(result.named_parameters()), **dict(result.named_buffers())}
    for name, by in multipliers(gates).items():
        tensors[name].data.mul_(by.to(tensors[name]))
    return result


def multipliers(gates: Gates) -> dict[str, Tensor]:
    """Return what multiplies each gated tensor in eval mode, by name, to be broadcast."""
    found: dict[str, Tensor] = {}
    z = gates.z()
    for site in gates.plan.sites:
        spread = gates.plan.spread(site.layout, z)
        dims = len(gates.plan.tensors[site.tensor])
        spread = spread.reshape([-1 if dim == site.dim else 1 for dim in range(dims)])
        found[site.tensor] = found.get(site.tensor, 1.0) * spread
    return found


def _write_back(root: nn.Module, cut: nn.Module, gates: Gates) -> None:
    """Copy what has changed into the gated model, whose gates multiply it."""
    mine = {**dict(root.named_parameters()), **dict(root.named_buffers())}
    theirs = {**dict(cut.named_parameters()), **dict(cut.named_buffers())}
    by = multipliers(gates)
    with torch.no_grad():
        for name, new in theirs.items():
            old = mine[name]
            if name in by:
                z = by[name].to(old)
                old.copy_(torch.where(z != 0, new / torch.where(z != 0, z, 1), old))
            elif not torch.equal(old, new):
                old.copy_(new)


class _Tandem:
    """The dense and the cut network, which compute the same batches side by side."""

    def __init__(self, dense: nn.Module, cut: nn.Module, plan: Plan, kept: Tensor) -> None:
        self.dense, self.cut, self.plan, self.kept = dense, cut, plan, kept
        self.of_dense, self.of_cut = Weights(dense), Weights(cut)
        self.norms: dict[tuple[str, ...], _Statistics] = {}
        self.layers: dict[str, float] = {}

    def run(self, batches: Sequence[Any]) -> dict[str, float]:
        """Change the cut network's weights; what is left as error of each layer."""
        readers = readers_of(self.dense, partial(call, self.dense, batches[0]))
        computes = [[partial(call, model, b) for b in batches] for model in (self.dense, self.cut)]
        with (
            forwards(computes[0], self.of_dense) as dense,
            forwards(computes[1], self.of_cut, self._note) as cut,
        ):
            left = dict.fromkeys(readers, 0)
            moments: dict[str, tuple[Moments, Moments]] = {}
            while True:
                theirs = [forward.advance() for forward in dense]
                ours = [forward.advance() for forward in cut]
                pairs = [self._pair(a, b) for a, b in zip(theirs, ours, strict=True)]
                names = {None if pair is None else pair[0].name for pair in pairs}
                if names == {None}:
                    break
                if len(names) > 1:
                    raise UsageError(
                        "the network's forward takes other ways for other inputs (it reads "
                        f"{' and '.join(sorted(map(str, names)))} at the same point), and is not "
                        "compensated: fit without compensate"
                    )
                self._step([pair for pair in pairs if pair], readers, left, moments)
        for norm, statistics in self.norms.items():
            self._tell(norm, statistics)
        return self.layers

    def _pair(self, dense: Read | None, cut: Read | None) -> tuple[Read, Read] | None:
        if dense is None or cut is None or dense.name != cut.name:
            if dense is cut:
                return None
            raise UsageError("the cut network's forward takes another way than the dense one's")
        return dense, cut

    def _step(
        self,
        pairs: Sequence[tuple[Read, Read]],
        readers: Mapping[str, Reader],
        left: dict[str, int],
        moments: dict[str, tuple[Moments, Moments]],
    ) -> None:
        name = pairs[0][0].name
        reader = readers.get(name)
        for dense, _ in pairs:
            dense.run()
        if reader is None:
            return
        work = _Layer(self, reader, *pairs[0])
        if not work.has_to_change(pairs):
            return
        seen, held = moments.setdefault(name, (work.moments(), work.moments()))
        for number, (dense, cut) in enumerate(pairs):
            work.count(held if number % _HELD == 0 else seen, dense, cut, len(pairs))
        left[name] += 1
        if left[name] == reader.calls:
            self.layers[name] = work.change(seen, held)
            del moments[name]

    def _note(self, operator: Any, args: tuple[Any, ...], _: Any) -> None:
        norm = norm_of(operator, args, self.of_cut)
        if norm is not None:
            self.norms.setdefault(norm, _Statistics()).add(args[0], args[7])

    def _tell(self, norm: tuple[str, ...], statistics: _Statistics) -> None:
        """Give a BatchNorm the statistics that its inputs now have; what it computes stays.

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
    """One layer of the cut network, and what of it may change."""

    def __init__(self, tandem: _Tandem, reader: Reader, dense: Read, read: Read) -> None:
        self.tandem, self.reader, self.dense, self.read = tandem, reader, dense, read
        tensor = tandem.of_cut.tensors[reader.name]
        alive = torch.ones((), dtype=torch.bool, device=tensor.device)
        for dim, layout in enumerate(
            tandem.plan.tensors[tandem.plan.aliases.get(reader.name, reader.name)]
        ):
            mask = tandem.plan.mask(layout, tandem.kept).to(tensor.device)
            alive = alive & mask.reshape([-1 if d == dim else 1 for d in range(tensor.dim())])
        lies = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=torch.bool, device=tensor.device
        )
        lies.copy_(alive.expand(tensor.shape))
        weight = read.weight
        lies = lies.as_strided(
            weight.shape, weight.stride(), weight.storage_offset() - tensor.storage_offset()
        )
        alive = read.product.matrix(lies)
        self.features = alive.any(0).any(1).nonzero().flatten()
        self.outputs = alive.any(0).any(0).nonzero().flatten()
        self.is_cut = len(self.features) < alive.shape[1]
        self.has_bias = bool(reader.bias) or reader.norm is not None
        _, features, outputs = alive.shape
        self.is_wide = outputs > features
        self.places = self._places(alive) if features > _LARGEST else 1

    def _places(self, alive: Tensor) -> int:
        """Return how many features in a row are of one channel: those of a kernel or a flatten."""
        kernel = self.read.weight.shape[2:].numel() if self.read.product.weight == 1 else 1
        if kernel > 1:
            return kernel
        is_alive = alive.any(0).any(1)
        changes = (is_alive[1:] != is_alive[:-1]).nonzero().flatten() + 1
        found = math.gcd(*changes.tolist(), len(is_alive))
        return found if len(changes) else 1

    def has_to_change(self, pairs: Sequence[tuple[Read, Read]]) -> bool:
        """Return whether the layer is fed, or multiplies, anything else than the dense one's."""
        if not len(self.features) or not len(self.outputs):
            return False
        at = [
            n
            for n in range(len(self.read.args))
            if n not in (self.read.product.weight, self.read.product.bias)
        ]
        values = [
            (d.args[n], c.args[n]) for d, c in pairs for n in at if isinstance(d.args[n], Tensor)
        ]
        return self.is_cut or not all(torch.equal(dense, cut) for dense, cut in values)

    def moments(self) -> Moments:
        """Return sums that are still empty."""
        return Moments(is_basis=self.is_wide or self.places > 1)

    def count(self, moments: Moments, dense: Read, cut: Read, batches: int) -> None:
        """Count a batch: what the cut network's layer reads, and what the dense one's gives."""
        assert dense.out is not None
        rows = dense.product.outputs(dense.out, None).shape[1]
        wanted = None
        if rows > (most := _ROWS // batches):
            generator = torch.Generator().manual_seed(moments.count)
            wanted = torch.randperm(rows, generator=generator)[:most].to(dense.out.device)
        x = cut.product.inputs(cut.args, wanted)[..., self.features]
        if self.places > 1:
            y = dense.product.inputs(dense.args, wanted)
            x, y = (each.unflatten(2, (-1, self.places)).mT.flatten(1, 2) for each in (x, y))
        elif self.is_wide:
            y = dense.product.inputs(dense.args, wanted)
        else:
            y = dense.product.outputs(dense.out, wanted)[..., self.outputs]
        moments.add(x, y)

    def change(self, seen: Moments, held: Moments) -> float:
        """Give the layer the weights that give back best what the dense one gave."""
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

        B gives the dense layer's channels from those that are left: many features from few samples
        would take as many of the latter, and a matrix too large.
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
        return bias.double().reshape(self.dense_matrix().shape[0], -1)[:, self.outputs]

    def _shift(self, found: Solution) -> None:
        """Put the constant into the bias, or take it from the mean of the norm behind."""
        tensors = self.tandem.of_cut.tensors
        groups, outputs = found.bias.shape
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
