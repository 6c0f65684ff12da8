"""Checks whether a model can be analysed, and contexts for its mode and random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export.unflatten import InterpreterModule, UnflattenedModule
from torch.fx import GraphModule
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from l0prune.capture.compat import pytree
from l0prune.errors import UsageError, warn
from l0prune.plan.globs import listed

# Base classes that both packages have under these names; neither need be installed.
_QUANTIZERS = {
    "FakeQuantizeBase",
    "FakeQuantizerBase",
    "ObserverBase",
    "AffineQuantizedObserverBase",
}
# Attributes of torch's graphs, into which parameters are put by name.
_OF_GRAPHS = {"meta", *dir(GraphModule)} - {*dir(nn.Module)}
_FRAMEWORKS = ("torch.nn.", "lightning.", "pytorch_lightning.", "builtins")


@contextmanager
def same_draws(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Restore the random generators of torch, NumPy and Python after the context.

    Those of torch include the ones of the model's devices. With a ``seed`` they are seeded within
    the context; without one, as NumPy's and Python's always, they continue from their state.
    """
    others = random.getstate(), np.random.get_state()
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    gpus = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=gpus):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            for gpu in gpus:
                with torch.cuda.device(gpu):
                    torch.cuda.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(others[0])
            np.random.set_state(others[1])


def check_module(model: Any) -> None:
    """Raise UsageError for an object that is no nn.Module, or one that l0prune cannot change.

    The message says what to give instead.
    """
    why = _objection(model) or _scattered(model)
    if why:
        raise UsageError(f"l0prune takes an nn.Module as you wrote it. {why}")


def check_one_device(model: nn.Module) -> None:
    """Raise UsageError for a model on several devices."""
    if why := _scattered(model):
        raise UsageError(f"l0prune computes where a model is. {why}")


def warn_of_nan(model: nn.Module) -> None:
    """Warn of parameters that hold NaN or infinite numbers."""
    bad = [n for n, p in model.named_parameters() if not p.is_meta and not _is_finite(p)]
    if bad:
        warn(
            f"parameters of this model hold NaN or infinite numbers: {listed(bad, most=3)}. What "
            "is computed with them says nothing. The usual cause is a training that diverged"
        )


def _is_finite(tensor: Tensor) -> bool:
    eight_bits = tensor.is_floating_point() and tensor.itemsize == 1  # some have no isfinite
    values = tensor.float() if eight_bits else tensor
    # A sum is finite only if its terms are, and takes a thirtieth of the time.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def _scattered(model: nn.Module) -> str:
    places: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        places.setdefault(parameter.device, name)
    if len(places) < 2:
        return ""
    found = ", ".join(f"{name} on {device}" for device, name in places.items())
    return (
        f"This one is on several devices ({found}), as device_map of transformers and accelerate "
        "leaves it. Load it without device_map, and move it to one device that it fits on, such as "
        'model.to("cpu").'
    )


def _objection(model: Any) -> str:
    if not isinstance(model, nn.Module):
        return (
            f"This is a {type(model).__name__}; l0prune.load_model(...) builds a module from a "
            "file or a name."
        )
    if isinstance(model, torch.jit.ScriptModule):
        return "This one is compiled by TorchScript: give the module that it was made from."
    if "training_step" in dir(model) and "forward" not in _defined(type(model)):
        return (
            f"This {type(model).__name__} trains a network and has no forward of its own: give the "
            "network in it, such as module.network."
        )
    if isinstance(model, GraphModule) and "eval" in vars(model):
        return (
            "This is the graph of an ExportedProgram, which has no modes for training and testing: "
            "give the module that was exported."
        )
    names = {
        name.partition(".")[0] for name, _ in chain(model.named_parameters(), model.named_buffers())
    }
    if taken := sorted(_OF_GRAPHS & names):
        return (
            f"This one calls something {taken[0]!r}, which torch's graphs need for themselves: "
            "torch.export cannot write it. Rename that attribute."
        )
    if any(isinstance(each, InterpreterModule | UnflattenedModule) for each in model.modules()):
        return (
            "In this one there is what torch.export.unflatten made, which cannot be copied: give "
            "the module that was exported."
        )
    prepared = next((n for n, m in model.named_modules() if _simulates_quantization(m)), None)
    if prepared is not None:
        return (
            f"This one is prepared for quantization ({prepared} rounds or observes values): prune "
            "the model as it was before that, and prepare the smaller one. See "
            "docs/howto/in-eight-bits.md, 'Prune first, quantize then'."
        )
    tensors = [*model.parameters(), *model.buffers()]
    if any(isinstance(t, UninitializedParameter | UninitializedBuffer) for t in tensors):
        return "This one has lazy layers without sizes yet: call it once on an example first."
    if any(t.is_inference() for t in tensors):
        return (
            "This one was made under torch.inference_mode, so that nothing in it can ever learn: "
            "build it outside of that, or copy its state_dict into one that was."
        )
    return ""


def _simulates_quantization(module: nn.Module) -> bool:
    """Return whether a module is a fake quantizer or an observer of torch.ao or torchao."""
    return any(
        each.__name__ in _QUANTIZERS and each.__module__.startswith(("torch.ao.", "torchao."))
        for each in type(module).__mro__
    )


def _defined(kind: type) -> set[str]:
    """Return the names that a class and its bases define, up to the frameworks' own."""
    own = [each for each in kind.__mro__ if not each.__module__.startswith(_FRAMEWORKS)]
    return {name for each in own for name in vars(each)}


def check_owned(model: nn.Module, used: Iterable[Tensor]) -> None:
    """Raise UsageError where the forward uses a parameter that the model keeps but does not own.

    Layers in a plain list are no part of the module: nothing moves, converts, trains or saves them.

    ``used`` are tensors that its forward uses, neither parameters nor buffers of the model.
    """
    places = {tensor.data_ptr() for tensor in used} - {0}  # 0 without storage
    for path, module in model.named_modules() if places else ():
        for name, parameter in _kept_aside(module):
            if parameter.data_ptr() in places:
                where = f"{path}.{name}" if path else name
                raise UsageError(
                    "The forward uses parameters that the model does not own: they are in "
                    f"{where}, a plain attribute of Python, so that state_dict, .to(), optimizers "
                    "and gates do not see them. Keep layers in an nn.ModuleList or nn.ModuleDict, "
                    "and parameters in an nn.ParameterList."
                )


def _kept_aside(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters in the module's plain attributes, after the attribute's name."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        for leaf in pytree.tree_leaves(value):
            found = leaf.parameters() if isinstance(leaf, nn.Module) else (leaf,)
            yield from ((name, each) for each in found if isinstance(each, nn.Parameter))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set eval mode without gradients, and restore each submodule's mode after the context."""
    with modes_kept(model), torch.no_grad():
        model.eval()
        yield


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the mode of each submodule, train or eval, after the context."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
