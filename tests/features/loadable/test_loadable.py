"""What transformers loads by itself: cut, written, loaded by it alone and compared."""

import warnings

import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import L0pruneWarning, NothingToPrune, UsageError
from l0prune.plan.plan import Plan

transformers = pytest.importorskip("transformers")
SMALL = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 40,
}
TEXT = {"input_ids": torch.arange(10).reshape(2, 5)}
IMAGE = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)}


def built(name, **settings):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SMALL | settings)
    with_head = name in ("llama", "qwen3", "gpt2")
    auto = transformers.AutoModelForCausalLM if with_head else transformers.AutoModel
    return auto.from_config(config).eval()


def gated(model, inputs=TEXT, **options):
    """The model, and what the warning said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", L0pruneWarning)
        l0prune.gate(model, (), inputs, **{"loadable_by": "transformers"} | options)
    return model, " ".join(str(each.message) for each in caught)


def first_layer(model):
    """The branches of a layer that goes as a whole; none where none can."""
    plan = l0prune.gates(model).plan
    kinds = {axis.name: axis.kind for axis in plan.axes}
    return next((group for group in plan.together if kinds[group[0]] == "branch"), ())


def loaded_alone(model, folder, inputs=TEXT):
    """Export and write a gated model; the outputs of its module, and of what transformers loads."""
    small = l0prune.export(model)
    assert "So does" in small.save_pretrained(folder)
    for name in ("l0prune.json", "l0prune_model.py"):
        (folder / name).unlink(missing_ok=True)
    loaded = getattr(transformers, type(model).__name__).from_pretrained(folder).eval()
    with torch.no_grad():
        assert torch.allclose(small.module(**inputs)[0], loaded(**inputs)[0], atol=1e-5)
    return small, loaded.config


LLAMA = {"num_key_value_heads": 3, "head_dim": 4}


@pytest.mark.parametrize(
    ("name", "settings", "whole"),
    [
        pytest.param("llama", LLAMA, ["inv_freq"], marks=pytest.mark.slow),
        pytest.param("qwen3", LLAMA, ["inv_freq", "norms over other dims"], marks=pytest.mark.slow),
        pytest.param("gpt2", {"n_embd": 24, "n_layer": 2, "n_head": 6}, ["wte", "n_embd"],
                     marks=pytest.mark.slow),
        pytest.param("bert", {}, ["hidden_size says"], marks=pytest.mark.slow),
        pytest.param("vit", {"image_size": 16, "patch_size": 8}, ["hidden_size says"],
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_transformers_loads_what_is_cut_so(name, settings, whole, tmp_path):
    inputs = IMAGE if name == "vit" else TEXT
    model, said = gated(built(name, **settings), inputs)
    for each in whole:
        assert each in said
    assert "layers keep one width" in said
    plan = l0prune.gates(model).plan
    for layer in range(2):  # as one would choose without: each layer by itself
        mine = [axis for axis in plan.axes if f".{layer}." in axis.name and axis.kind != "branch"]
        for axis in mine:
            l0prune.gates(model).set_open(axis.name, range(layer, axis.size - 1))
    dense, config = loaded_alone(model, tmp_path, inputs)
    assert dense.params < dense.params_before
    assert config.num_hidden_layers == 2
    if name == "llama":
        assert (config.num_key_value_heads, config.head_dim) == (3, 4)  # 2 are not allowed
        assert (config.hidden_size, config.intermediate_size) == (24, 39)
    if layer := first_layer(model):
        for branch in layer:
            l0prune.gates(model).set_open(branch, [])
        dense, config = loaded_alone(model, tmp_path, inputs)
        assert config.num_hidden_layers == 1


@pytest.mark.slow
def test_widths_of_numbers_that_code_divides_are_those_that_it_takes(tmp_path):
    """The hidden size stays a multiple of the number of heads, which stays a divisor of 24."""
    model, _ = gated(built("llama", **LLAMA), branches=False)
    plan = l0prune.gates(model).plan
    heads = next(name for name in plan.names if name.endswith("heads"))
    assert plan.allowed["model.embed_tokens"] == (6, 12, 18, 24)
    assert plan.allowed[heads] == (1, 3)  # 4 heads do not divide 18
    counts = l0prune.fit(model, "params=0.5", l0prune.score(model, "magnitude"))
    assert l0prune.export(model).params == next(iter(counts.values()))
    _, config = loaded_alone(model, tmp_path)
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    assert config.hidden_size % 6 == 0


@pytest.mark.slow
def test_heads_need_to_divide_the_width_that_is_left(tmp_path):
    """Three heads do not divide a stream of 32, and do one of 24; layers go as a whole."""
    model, said = gated(built("llama", hidden_size=32, num_attention_heads=4, head_dim=4))
    bank = l0prune.gates(model)
    heads = "model.layers.0.self_attn.q_proj.heads"
    assert bank.plan.allowed[heads] == (1, 2, 3, 4)
    assert "no whole layer" not in said
    assert first_layer(model) == ("model.layers.0.self_attn", "model.layers.0.mlp")
    bank.set_open(heads, [0, 2, 3])
    bank.set_open(heads.replace("0", "1"), [1])
    kept = Plan.from_json(bank.plan.to_json()).kept(bank.open())
    assert int(kept[next(a for a in bank.axes if a.name == heads).slice].sum()) == 4
    scores = l0prune.score(model, "magnitude")
    l0prune.fit(model, ["model.embed_tokens: width=24", "heads=3"], scores)
    for branch in first_layer(model):
        bank.set_open(branch, [])
    _, config = loaded_alone(model, tmp_path)
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (24, 3, 4)
    assert config.num_hidden_layers == 1


def test_vllm_takes_a_width_by_layer_and_branches_one_by_one():
    inputs = {"input_ids": TEXT["input_ids"][:, :3]}
    model, said = gated(built("llama", **LLAMA), inputs, loadable_by="vllm")
    plan = l0prune.gates(model).plan
    kinds = {axis.name: axis.kind for axis in plan.axes}
    heads = tuple(name for name in plan.names if name.endswith("heads"))
    assert plan.together == (heads,)
    assert [name for name in plan.names if kinds[name] == "branch"] == [
        "model.layers.0.mlp", "model.layers.1.self_attn", "model.layers.1.mlp",
    ]  # fmt: skip
    assert "model.layers.1.mlp.gate_proj" not in plan.allowed
    assert plan.allowed["model.embed_tokens"] == (6, 12, 18, 24)
    assert "one width but for intermediate_size" in said
    assert "The first branch has no gate: 1" in said


def test_what_it_cannot_be_is_refused():
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(UsageError, match=r"is for models of a class in transformers.*a Sequential"):
        l0prune.gate(plain, torch.randn(2, 4), loadable_by="transformers")
    with pytest.raises(
        UsageError, match=r"loadable_by is one of 'transformers', 'vllm', 'gguf', not 'ollama'"
    ):
        l0prune.gate(plain, torch.randn(2, 4), loadable_by="ollama")
    model = built("bert")
    with pytest.raises(UsageError, match="its own class"):
        l0prune.gate(model, (), TEXT, loadable_by="transformers", keep_class=False)
    with pytest.raises(NothingToPrune, match=r"nothing can be cut that transformers .*hidden_size"):
        l0prune.gate(model, (), TEXT, loadable_by="transformers", include="*.heads", branches=False)
    assert "l0prune_gates" not in dict(model.named_children())
    model = built("llama", num_hidden_layers=1)
    with pytest.raises(NothingToPrune, match="a layer goes with all of its branches, and some"):
        l0prune.gate(model, (), TEXT, loadable_by="transformers", include="model.layers.0.mlp")
