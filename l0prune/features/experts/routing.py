"""Routers of mixtures of experts, found while the model runs, and routing past closed experts.

A router is a weight whose rows give the scores from which ``topk`` chooses. It is identified while
the model runs, without names and without a graph, so that the experts' code may depend on the
choice.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from l0prune.capture.compat import pytree
from l0prune.files.cut_layers import tensors_held

_TOPK = (torch.topk, Tensor.topk)
_PRODUCTS = (nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.addmm)
_MOST_DIMS = 2  # of a router's weight


@dataclass(frozen=True)
class Router:
    """A weight whose rows score experts, of which the best are chosen.

    Attributes:
        name: of the weight.
        experts: how many there are.
        chosen: number of experts that an input gets.
        groups: number of equal groups of experts that are chosen first; 1 without such a choice.
        within: number of best experts of a group that count for that choice.
        beside: names of other tensors with a number for each expert that change the scores, such
            as a bias that another module holds.
    """

    name: str
    experts: int
    chosen: int
    groups: int = 1
    within: int = 1
    beside: tuple[str, ...] = ()


class Routing(TorchFunctionMode):
    """Context that records the routers of a model and prevents the choice of closed experts.

    Scores of closed experts become -inf where the router computes them, and once more before
    ``topk``, since a sigmoid and a bias make them finite again.

    Attributes:
        found: the routers, by name.
        loads: how many inputs got each expert, by a router's name; int64.
    """

    def __init__(self, model: nn.Module, closed: Mapping[str, Tensor] | None = None) -> None:
        """Watch a model; ``closed`` has a bool mask of closed experts by a router's name."""
        super().__init__()
        self.found: dict[str, Router] = {}
        self.loads: dict[str, Tensor] = {}
        self._closed = closed
        # by tensor, the name of its parameter, and of the router whose scores it holds
        self._weights: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        self._scores: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        self._rows: dict[str, int] = {}
        self._numbers: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        self._beside: dict[str, dict[str, None]] = {}
        for name, parameter in model.named_parameters():
            if parameter.dim() and (closed is None or name in closed):
                self._weights[parameter] = name
                self._rows[name] = parameter.shape[0]
        for name, tensor in tensors_held(model).items():
            if tensor.dim() == 1:
                self._numbers[tensor] = name

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch; track weights and scores, and mask closed experts."""
        kwargs = kwargs or {}
        if function in _TOPK:
            return self._compared(function, args, kwargs)
        result = function(*args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        names = [self._weights[each] for each in given if each in self._weights]
        numbers = [self._numbers[each] for each in given if each in self._numbers]
        if len(given) == 1 and numbers and result.shape[-1:] == given[0].shape[-1:]:
            self._numbers[result] = numbers[0]
        if function in _PRODUCTS:
            name = next((n for n in names if self._rows[n] == result.shape[-1]), None)
            return result if name is None else self._scored(name, result)
        if len(given) == 1 and names and result.dim() <= _MOST_DIMS:  # another dtype, transposed
            self._weights[result] = names[0]
            return result
        self._follow(given, result)
        return result

    def _scored(self, name: str, scores: Tensor) -> Tensor:
        if self._closed is not None:
            scores = scores.masked_fill(self._closed[name].to(scores.device), -torch.inf)
        self._scores[scores] = name
        return scores

    def _follow(self, given: Sequence[Tensor], result: Tensor) -> None:
        """Record a tensor computed from scores if it still has a number for each expert."""
        name = next((self._scores[each] for each in given if each in self._scores), None)
        if name and result.is_floating_point() and _groups(result, self._rows[name]):
            self._scores[result] = name
            self._beside.setdefault(name, {}).update(
                (self._numbers[each], None)
                for each in given
                if each in self._numbers and each.shape[-1] == self._rows[name]
            )

    def _compared(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``topk`` with closed experts at -inf; record the router and the loads."""
        given = dict(zip(("input", "k", "dim"), args, strict=False)) | kwargs
        source, dim = given["input"], given.get("dim", -1)
        name = self._scores.get(source)
        if name is None or dim not in (-1, source.dim() - 1):
            return function(*args, **kwargs)
        groups = _groups(source, self._rows[name])
        if self._closed is not None:
            closed = self._closed[name].to(source.device)
            shape = (groups, -1) if groups > 1 else (-1,)
            source = source.masked_fill(closed.view(shape), -torch.inf)
        result = torch.topk(**{**given, "input": source})
        known = self.found.get(name, Router(name, self._rows[name], 0))
        if groups > 1:
            self.found[name] = replace(known, groups=groups, within=int(given["k"]))
        else:
            beside = tuple(self._beside.get(name, {}))
            self.found[name] = replace(known, chosen=int(given["k"]), beside=beside)
            load = result[1].flatten().bincount(minlength=known.experts)
            self.loads[name] = self.loads.get(name, 0) + load
        return result


def _groups(scores: Tensor, size: int) -> int:
    """Return the number of groups in a tensor of scores, 1 without groups; 0 for others."""
    if scores.dim() and scores.shape[-1] == size:
        return 1
    if scores.dim() > 1 and scores.shape[-1] * scores.shape[-2] == size:
        return int(scores.shape[-2])
    return 0
