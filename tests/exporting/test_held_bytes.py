"""Bytes of tensors that a cut holds at most, from its gates to its folder, beside the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import l0prune

SMALL = 1 << 14  # bytes below which a tensor is not counted
MOST = 1.3  # times the weights


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make, as long as something holds them."""

    supports_higher_order_operators = True

    def __init__(self, model):
        super().__init__()
        self.known, self.most = {}, 0
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
            self.known[key] = StorageWeakRef(storage), storage.nbytes()
        return storage.nbytes()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if sum(map(self.note, leaves)):
            self.known = {k: of for k, of in self.known.items() if not of[0].expired()}
            self.most = max(self.most, sum(size for _, size in self.known.values()))
        return result


def network():
    torch.manual_seed(0)
    pairs = [(64, 512), (512, 64)] * 10
    layers = [part for pair in pairs for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 4)).eval()


def test_the_counter_counts_what_is_held_and_nothing_that_is_gone():
    layer = nn.Linear(64, 64)  # 16 KiB
    with Held(layer) as held:
        for _ in range(3):
            torch.zeros(64, 64)
        kept = [torch.zeros(64, 64) for _ in range(2)]
        kept.append(kept[0].view(-1))
    assert held.above == 2


def test_a_cut_holds_the_smaller_network_once(tmp_path):
    model, x = network(), torch.randn(2, 64)
    with Held(model) as held:
        l0prune.gate(model, x)
        l0prune.fit(model, "params=0.5", l0prune.score(model, "magnitude"), round_to=1)
        assert held.above < MOST
        held.most = 0
        small = l0prune.export(model)
        small.save_pretrained(tmp_path / "small")
    assert small.params < 0.51 * held.weights / 4
    assert held.above < 1  # half of the weights, and a layer in float64
    assert torch.equal(l0prune.resize(network(), tmp_path / "small")(x), small.module(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:l0prune. for transformers")
def test_a_llama_that_transformers_loads_takes_no_more_than_a_copy(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(256, (2, 8))
    with Held(model) as held:
        l0prune.gate(model, ids, loadable_by="transformers")
        l0prune.fit(model, "params=0.5", l0prune.score(model, "magnitude"))
        small = l0prune.export(model)
        said = small.save_pretrained(tmp_path / "small")
    assert "So does LlamaForCausalLM.from_pretrained" in said
    assert held.above < MOST
