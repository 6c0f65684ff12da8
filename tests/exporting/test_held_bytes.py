"""Bytes of tensors that a cut holds at most, from its gates to its folder, beside the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import l0prune
from tests.held import Held

MOST = 1.3  # times the weights


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
@pytest.mark.parametrize(
    ("size", "layers", "dtype"),
    [(128, 6, torch.float32), (128, 6, torch.bfloat16), (1024, 12, torch.bfloat16)],
    ids=["float32", "bf16", "158 M in bf16"],
)
@pytest.mark.filterwarnings("ignore:l0prune. for transformers")
def test_a_llama_that_transformers_loads_takes_no_more_than_a_copy(tmp_path, size, layers, dtype):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=2 * size, hidden_size=size, intermediate_size=3 * size, num_hidden_layers=layers,
        num_attention_heads=size // 32, num_key_value_heads=size // 64, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(256, (2, 8))
    for parameter in model.parameters():  # buffers stay in float32, as transformers loads them
        parameter.data = parameter.data.to(dtype)
    with Held(model) as held:
        l0prune.gate(model, ids, loadable_by="transformers")
        l0prune.fit(model, "params=0.5", l0prune.score(model, "magnitude"))
        small = l0prune.export(model)
        said = small.save_pretrained(tmp_path / "small")
    assert "So does LlamaForCausalLM.from_pretrained" in said
    assert held.above < MOST


def in_files(model, folder):
    """Which parameters lie in memory that is mapped from files in a folder."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    spans = [line.split()[0].split("-") for line in lines if str(folder) in line]
    at = [range(int(begin, 16), int(end, 16)) for begin, end in spans]
    return [any(p.data_ptr() in span for span in at) for p in model.parameters()]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.slow
def test_weights_that_lie_in_a_folder_stay_in_its_files(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    model, ids = l0prune.load_model(f"transformers:{tmp_path / 'model'}"), torch.ones(2, 8).long()
    assert all(in_files(model, tmp_path))
    l0prune.shrink(
        model, torch.randint(64, (64, 8)), "params=0.8", batch_size=8, round_to=1, progress=False,
        allow_worse_than_mean=True,
    )  # fmt: skip
    assert all(in_files(model, tmp_path))
    l0prune.gate(model, ids)
    l0prune.fit(model, "params=0.5", l0prune.score(model, "magnitude"), round_to=1)
    small = l0prune.export(model)
    small.save_pretrained(tmp_path / "small")
    found = in_files(model, tmp_path)
    assert all(found[: len(found) - 1])  # the last one is log α
    again = l0prune.load_model(f"transformers:{tmp_path / 'model'}")
    mine = dict(model.named_parameters())
    assert all(torch.equal(mine[name], tensor) for name, tensor in again.named_parameters())


def test_files_of_16_bits_are_made_from_what_the_module_holds_where_nothing_was_rounded():
    torch.manual_seed(0)
    layers = nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)
    model, x = nn.Sequential(*layers).bfloat16().eval(), torch.randn(2, 8).bfloat16()
    l0prune.gate(model, x, exclude=["0.in"])
    bank = l0prune.gates(model)
    z = torch.where(torch.arange(bank.plan.size) % 2 == 0, 8.0, -8.0)
    z[2] = 0.1  # which scales a column, so that the product is rounded
    with torch.no_grad():
        bank.log_alpha.copy_(z)
    small = l0prune.export(model)
    memory = {p.untyped_storage().data_ptr() for p in small.module.parameters()}
    exact = dict(small._made.module.named_parameters())
    borrowed = {n: p.loan.original.untyped_storage().data_ptr() in memory for n, p in exact.items()}
    assert borrowed == {"0.weight": True, "0.bias": True, "2.weight": False, "2.bias": True}
