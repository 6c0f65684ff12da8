"""State of a model and of the process, for a comparison before and after a call of l0prune."""

from __future__ import annotations

import random
from collections import OrderedDict, deque

import numpy as np
import rich.style  # noqa: F401 (draws from Python's generator when it is loaded)
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from l0prune.capture.example_inputs import call, tensors_in
from l0prune.capture.model_checks import evaluating

_CONTAINERS = (dict, OrderedDict, list, tuple, set, deque)


def state_of(model: nn.Module) -> dict[str, object]:
    """Everything that the model holds, by path: tensors by object, values and gradient."""
    found: dict[str, object] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if _is_ours(module):
            continue
        found[f"{name} class"] = type(module)
        for attribute, value in vars(module).items():
            _put(found, f"{name}.{attribute}", value, set())
    return found | process_state()


def _put(found: dict[str, object], path: str, value: object, above: set[int]) -> None:
    if isinstance(value, Tensor):
        assert not isinstance(value, FakeTensor), path
        grad = None if not value.is_leaf or value.grad is None else value.grad.tolist()
        found[path] = id(value), _bits(value), value.requires_grad, grad
    elif isinstance(value, nn.Module) or id(value) in above or _is_ours(value):
        found[path] = id(value)
    elif isinstance(value, _CONTAINERS):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        found[path] = type(value), len(value)
        for number, (key, each) in enumerate(inner):
            _put(found, f"{path}[{number}: {key!r}]", each, above | {id(value)})
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        _put(found, f"{path} of {type(value).__name__}", vars(value), above | {id(value)})
    else:
        found[path] = value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def _is_ours(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "l0prune"


def _bits(tensor: Tensor) -> object:
    if tensor.is_meta:
        return tensor.shape, tensor.dtype
    data = tensor.detach().cpu().contiguous().reshape(-1)
    return tensor.shape, tensor.dtype, hash(data.view(torch.uint8).numpy().tobytes())


def process_state() -> dict[str, object]:
    """Settings of torch and of random generators that belong to the whole process."""
    numbers = np.random.get_state()
    return {
        "torch's generator": hash(torch.get_rng_state().numpy().tobytes()),
        "numpy's generator": (numbers[1].tobytes(), numbers[2]),
        "Python's generator": random.getstate(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
        "fast attention": torch.backends.mha.get_fastpath_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "products": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.fp32_precision,
    }


def changes(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Paths at which two states differ."""
    lost = [f"{path} is gone" for path in before if path not in after]
    new = [f"{path} is new" for path in after if path not in before]
    return [*lost, *new, *(p for p in before if p in after and before[p] != after[p])]


def answer(model: nn.Module, example) -> list[Tensor]:
    """The tensors that a call in eval mode returns, on copies of the inputs."""
    with evaluating(model):
        return [tensor.clone() for tensor in tensors_in(call(model, example))]
