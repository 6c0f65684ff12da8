"""Compensation: the weights that are left give back best what the dense network's layers gave.

No labels and no gradients: in the order of the forward, the weights of each layer become the
least-squares solution from what the cut network feeds it to what the dense one's layer gave. So
each layer also repairs what those before it have done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.compat import pytree
from l0prune.capture.copying import copied
from l0prune.capture.model_checks import evaluating
from l0prune.errors import DataError
from l0prune.gating.attaching import bypass, detach, holder
from l0prune.gating.bank import Gates
from l0prune.running.batches import Feed, call
from l0prune.running.device import choose_device, on_device
from l0prune.running.task import Task, batch_length
from l0prune.selection.repair import Tandem
from l0prune.selection.score_input import output_tensor

_JUDGED = 5  # one batch in so many is used for nothing but to tell what has been gained
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
            layers = Tandem(root, cut, gates.plan, gates.plan.kept(gates.open())).run(used)
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
