"""Budgets in bytes, beside files, the cache that transformers fills, and counts by hand."""

import json

import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.features.memory.conditions import Conditions
from l0prune.features.memory.memory import ACTIVATIONS, CACHE
from l0prune.plan.limits import bounds, limits
from l0prune.plan.switches import dead_parameters

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 40,
}
IDS = torch.arange(10).reshape(2, 5)


def built(name, **settings):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES | settings)
    auto = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        auto = transformers.AutoModelForSeq2SeqLM
    return auto.from_config(config).eval()


def amounts(model, at):
    """Bytes of the export of a gated model: stored, in the cache, of activations."""
    plan = l0prune.gates(model).plan
    (bound,) = bounds(plan, limits(f"memory=0.5@{at}"), (), model)
    open_ = l0prune.gates(model).open()
    found = bound.measure.by_owner(plan.kept(open_).double())
    assert bound.actual(open_) == pytest.approx(sum(found.values()), abs=1e-6)
    cache, values = found.pop(CACHE, 0.0), found.pop(ACTIVATIONS)
    return round(sum(found.values())), round(cache), round(values)


def nbytes(tensors):
    return sum(each.numel() * each.element_size() for each in tensors)


def in_cache(model, batch, context):
    """Bytes of the cache that a module of transformers really fills."""
    ids = torch.zeros(batch, context, dtype=torch.int64)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        cache = model(input_ids=ids, **more, use_cache=True).past_key_values
    parts = [cache] if hasattr(cache, "layers") else [cache.self_attention_cache]
    parts += [] if hasattr(cache, "layers") else [cache.cross_attention_cache]
    return nbytes(
        each
        for part in parts
        for layer in part.layers
        for each in vars(layer).values()
        if isinstance(each, torch.Tensor)
    )


def in_file(folder):
    """Bytes of the tensors in a folder's safetensors file, and their names."""
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    assert max(each["data_offsets"][1] for each in header.values()) == len(data) - 8 - length
    return len(data) - 8 - length, {*header}


def test_a_network_of_convolutions_has_what_its_file_has(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12),
        nn.Flatten(), nn.Linear(48, 5),
    ).eval()  # fmt: skip
    l0prune.gate(model, torch.randn(2, 3, 6, 6), progress=False)
    scores = l0prune.score(model, "magnitude")
    counts = l0prune.fit(model, "memory=6kB", scores, round_to=1, progress=False)
    assert 5500 < counts["memory=6kB"] <= 6000
    stored, cache, values = amounts(model, "1x")
    assert stored + values == counts["memory=6kB"]
    assert cache == 0
    small = l0prune.export(model, progress=False)
    assert stored == nbytes([*small.module.parameters(), *small.module.buffers()])
    small.save_pretrained(tmp_path)
    assert stored == in_file(tmp_path)[0]


@pytest.mark.parametrize(
    ("name", "settings", "closed"),
    [
        ("llama", {"num_key_value_heads": 3, "head_dim": 4, "num_hidden_layers": 1}, []),
        pytest.param("llama", {"num_key_value_heads": 3, "head_dim": 4},
                     ["model.layers.1.self_attn"], marks=pytest.mark.slow),
        pytest.param("gpt2", {"n_embd": 24, "n_layer": 2, "n_head": 6}, [], marks=pytest.mark.slow),
        pytest.param("gemma3_text", {"num_key_value_heads": 3, "head_dim": 8, "sliding_window": 16,
                     "num_hidden_layers": 2,
                     "layer_types": ["sliding_attention", "full_attention"]}, [],
                     marks=pytest.mark.slow),
        pytest.param("opt", {"ffn_dim": 40, "word_embed_proj_dim": 24}, [], marks=pytest.mark.slow),
        pytest.param("mixtral", {"num_key_value_heads": 3, "num_local_experts": 2, "head_dim": 4},
                     [], marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_decoder_has_the_cache_that_it_fills(name, settings, closed, tmp_path):
    model = built(name, **settings)
    l0prune.gate(model, (), {"input_ids": IDS}, progress=False)
    bank = l0prune.gates(model)
    whole = amounts(model, "3x40")
    assert whole[1] == in_cache(model, 3, 40)
    for axis in bank.plan.axes:
        if axis.kind in ("head", "head_dim", "group", "neuron"):
            bank.set_open(axis.name, range(axis.size // 2))
    for each in closed:
        bank.set_open(each, [])
    stored, cache, _ = amounts(model, "3x40")
    small = l0prune.export(model, verify="float32", progress=False)
    assert cache == in_cache(small.module, 3, 40) < whole[1]
    dead = {*dead_parameters(bank.plan, small.gone)}  # of which one number stays in the module
    tensors = dict([*small.module.named_parameters(), *small.module.named_buffers()])
    assert stored == nbytes(t for n, t in tensors.items() if n not in dead) < whole[0]
    small.save_pretrained(tmp_path)
    size, names = in_file(tmp_path)
    assert stored == size + nbytes(t for n, t in tensors.items() if n not in names) - nbytes(
        t for n, t in tensors.items() if n in dead
    )


@pytest.mark.slow
def test_a_cache_beside_an_encoder_is_never_larger_than_counted():
    model = built("t5", d_model=24, d_kv=4, d_ff=40, num_layers=2, num_heads=6)
    l0prune.gate(model, (), {"input_ids": IDS, "decoder_input_ids": IDS}, progress=False)
    assert amounts(model, "3x40")[1] == in_cache(model, 3, 40)
    scores = l0prune.score(model, "magnitude")
    l0prune.fit(model, "memory=0.6@3x40", scores, kinds="head", progress=False)
    stored, cache, _ = amounts(model, "3x40")
    small = l0prune.export(model, verify="float32", progress=False)
    assert cache == in_cache(small.module, 3, 40)
    l0prune.fit(model, "memory=0.5@3x40", scores, progress=False)
    stored, cache, _ = amounts(model, "3x40")
    small = l0prune.export(model, verify="float32", progress=False)
    assert in_cache(small.module, 3, 40) <= cache
    assert stored == nbytes([*small.module.parameters(), *small.module.buffers()])


def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    l0prune.gate(model, torch.randn(3, 4), progress=False)
    return model


def test_activations_are_those_that_are_needed_at_once():
    model = mlp()
    weights = 4 * (4 * 8 + 8 + 8 * 2 + 2)
    assert amounts(model, "5x") == (weights, 0, 5 * 4 * (8 + 8))  # before and after the ReLU
    assert amounts(model, "5x/bfloat16") == (weights // 2, 0, 5 * 4 * (8 + 8))
    l0prune.gates(model).set_open("0", range(3))
    # the input and the first layer's result take more than this and the ReLU's
    assert amounts(model, "") == (4 * (4 * 3 + 3 + 3 * 2 + 2), 0, 4 * (4 + 3))


def test_learning_meets_a_budget_in_bytes():
    x, y = torch.randn(24, 4), torch.randint(2, (24,))
    for budget in ("memory=0.6", "memory=0.3kB, params=0.9"):
        model = mlp()
        data = torch.utils.data.TensorDataset(x, y)
        history = l0prune.finetune(
            model, data, budget=budget, epochs=2, batch_size=8, progress=False
        )
        last = history.last
        most = 300 if "kB" in budget else 0.6 * last["dense_memory"]
        assert sum(amounts(model, "")) == last["memory"] <= most
        assert "memory " in repr(history)


def test_budgets_say_conditions_and_units():
    (limit,) = limits("memory=6GB@8x4096/bfloat16")
    assert (limit.amount, limit.suffix, limit.at) == (6e9, "B", "8x4096/bfloat16")
    assert limits(str(limit)) == (limit,)
    assert str(limits({"memory": "0.5@4096"})[0]) == "memory=0.5@4096"
    assert limits("memory=2MiB")[0].amount == 2 * 1024**2
    assert Conditions.of("8x4096/float16") == Conditions(4096, 8, "float16")
    assert Conditions.of("4096") == Conditions(4096)
    assert Conditions.of("8x") == Conditions(None, 8)
    for text, why in {
        "memory=6 gb": "none of its units. Write memory=6B, memory=6kB",
        "memory=300": "300 of what",
        "memroy=6GB": "did you mean 'memory'",
        "params=0.5@4096": "params depends on no conditions: leave out '@4096'",
        "speed=2@4096": "cannot read the budget",
    }.items():
        with pytest.raises(UsageError, match=why):
            limits(text)
    for text, why in {
        "8by4096": "no dtype '8by4096'",
        "8-4096": "cannot read '@8-4096'",
        "0x4096": "a size of 0",
        "4096/bfloat61": "mean 'bfloat16'",
    }.items():
        with pytest.raises(UsageError, match=why):
            Conditions.of(text)


def test_a_cache_without_a_context_is_refused():
    model = built("llama", num_hidden_layers=1)
    l0prune.gate(model, (), {"input_ids": IDS[:, :3]}, branches=False, progress=False)
    with pytest.raises(UsageError, match=r"its context, which this budget does not name: write"):
        l0prune.fit(model, "memory=1MB", progress=False)
