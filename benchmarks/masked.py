"""Is a network from which channels were cut the one in which they are zero?

In a copy of the original every element of a parameter that was cut is zero, and the two must
compute the same. They differ if positions that belong together were cut apart, and also where a
channel that is zero is not the same as none (LayerNorm, a mean, a scale by the head's width): then
there is no mask that the cut stands for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.isolation import Row
from benchmarks.scramble import Example
from l0prune.capture.example_inputs import tensors_in
from l0prune.exporting.certify.difference import difference
from l0prune.exporting.certify.dtypes import InOneDtype, cast
from l0prune.exporting.certify.inputs import fresh_inputs
from l0prune.exporting.onnx.file import Session

Kept = dict[str, list[Tensor]]  # by parameter: the positions that are left, in each dimension


def output_of(model: nn.Module, example: Example) -> list[Tensor]:
    """All tensors that a model returns."""
    args, kwargs = example
    with torch.no_grad():
        result = model(*args, **kwargs)
    result = vars(result) if dataclasses.is_dataclass(result) else result
    return tensors_in(result)


def shapes_of(model: nn.Module, example: Example) -> list[tuple[int, ...]]:
    """Of all outputs; of a detector's, which are as many as it found, without that number."""
    counted = any(isinstance(given, list) for given in example[0])
    return [tuple(out.shape[1:] if counted else out.shape) for out in output_of(model, example)]


def zeroed(original: nn.Module, kept: Kept) -> nn.Module:
    """Every element that was cut is zero; tied weights come apart where they were cut apart."""
    for name, left in kept.items():
        path, _, leaf = name.rpartition(".")
        module = original.get_submodule(path)
        weight = getattr(module, leaf).detach().clone()
        for dim, index in enumerate(left):
            dead = torch.ones(weight.shape[dim], dtype=torch.bool).index_fill(0, index, False)
            weight.index_fill_(dim, dead.nonzero().flatten(), 0)
        setattr(module, leaf, nn.Parameter(weight))
    return original


def errors(masked: nn.Module, pruned: nn.Module, kept: Kept, example: Example) -> Iterator[Row]:
    """In float64, relative to how far another input moves the output."""
    masked.double()
    pruned.double()
    batch = tensors_in(example)[0].shape[0]
    given, other = (cast(e, torch.float64) for e in (example, fresh_inputs(example, batch, 1)))
    with InOneDtype(torch.float64):
        expected, found = output_of(masked, given), output_of(pruned, given)
        signal = difference(expected, output_of(masked, other))
        yield {"signal": signal}
        if signal < 1e-12:
            return  # equal or not, it would prove nothing
        exact = difference(expected, found) / min(signal, 1)
        yield {"exact": exact, "norms": exact}
        norms = [
            (name, norm)
            for name, norm in masked.named_modules()
            if isinstance(norm, nn.LayerNorm | nn.GroupNorm) and f"{name}.weight" in kept
        ]
        for name, norm in norms:
            hook = _of_kept(pruned.get_submodule(name), kept[f"{name}.weight"][-1])
            norm.register_forward_hook(hook)
        if norms:
            yield {"norms": difference(output_of(masked, given), found) / min(signal, 1)}


def _of_kept(norm: nn.Module, kept: Tensor) -> Any:
    """A hook: the norm of the channels that were kept, zero elsewhere."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        is_first = getattr(module, "data_format", None) == "channels_first"
        is_image = isinstance(module, nn.GroupNorm) or type(module).__name__ == "LayerNorm2d"
        dim = 1 if is_first or is_image else -1
        part = norm(args[0].index_select(dim, kept))
        return torch.zeros_like(output).index_copy_(dim, kept, part)

    return hook


def onnx_error(model: nn.Module, example: Example) -> float:
    """The difference between PyTorch and ONNX Runtime in float32."""
    args, kwargs = example
    made = torch.onnx.export(model, args, kwargs=kwargs, dynamo=True, verbose=False)
    assert made is not None
    run = Session(made.model_proto.SerializeToString())
    return difference(output_of(model, example), run(tensors_in(example)))
