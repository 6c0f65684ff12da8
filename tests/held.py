"""Bytes of tensors that operators make, counted as long as something holds them."""

from __future__ import annotations

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

SMALL = 1 << 14  # bytes below which a tensor is not counted


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make, as long as something holds them."""

    supports_higher_order_operators = True

    def __init__(self, model):
        super().__init__()
        self.known, self.most, self.total = {}, 0, 0
        self.weights = sum(self.note(tensor) for tensor in model.parameters())

    @classmethod
    def ignore_compile_internals(cls):
        return True

    @property
    def above(self):
        """The most so far above the weights, as a multiple of them."""
        return self.most / self.weights - 1

    def note(self, tensor):
        if tensor.device.type != "cpu" or type(tensor) not in (torch.Tensor, nn.Parameter):
            return 0  # of a fake one, of a lent parameter
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALL:
            return 0
        key = storage._cdata
        if key not in self.known or self.known[key][0].expired():
            self.total += storage.nbytes()
            self.known[key] = StorageWeakRef(storage), storage.nbytes()
        return storage.nbytes()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.note(leaf)
        if self.total > self.most:  # what is gone is counted still
            self.known = {k: of for k, of in self.known.items() if not of[0].expired()}
            self.total = sum(size for _, size in self.known.values())
            self.most = max(self.most, self.total)
        return result
