"""Random numbers that do not come between two models whose tensors differ in size."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l0prune.capture.compat import TorchDispatchMode

_ATEN = torch.ops.aten


class SteadyDraws(TorchDispatchMode):
    """Within the context, dropout of every kind keeps all, and other draws are noted.

    Two models compute the same there if they do with whatever dropout leaves, and if their other
    draws are of the same sizes: then torch draws the same numbers for both, from the same seed.
    """

    def __init__(self, seed: int) -> None:
        """``seed`` is of torch's own generator, which is as before afterwards."""
        super().__init__()
        self._seed = seed
        self._drawn: list[tuple[str, tuple[torch.Size, ...]]] = []

    def __enter__(self) -> SteadyDraws:
        """From here torch draws from the seed."""
        self._others = _state_of_others()
        self._fork = torch.random.fork_rng(devices=[])
        self._fork.__enter__()
        torch.default_generator.manual_seed(self._seed)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Notes whether anything was drawn that torch knows nothing of."""
        super().__exit__(*error)
        self._fork.__exit__(*error)
        self._is_known = _state_of_others() == self._others

    def is_like(self, other: SteadyDraws) -> bool:
        """Whether both drew the same numbers; to be asked when both are done."""
        return self._is_known and other._is_known and self._drawn == other._drawn

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, without its draw where it is that of a dropout."""
        if func is _ATEN.bernoulli_.float:
            return args[0].fill_(1)
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:  # type: ignore[attr-defined]
            tensors = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
            self._drawn.append((str(func), tuple(tensor.shape for tensor in tensors)))
        return result


def _state_of_others() -> bytes:
    """Where the generators of Python and NumPy stand, which a forward may draw from, too."""
    return pickle.dumps((random.getstate(), np.random.get_state()))
