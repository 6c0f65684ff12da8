"""GGUF files: run by llama.cpp itself, whose answers are those of the network."""

import random
import shutil

import numpy as np
import pytest
import torch
from llama_server import greedy, log_probabilities, perplexity, runs
from small_llamas import VOCABULARY, built, cut, tokenizer
from torch import nn

import l0prune
from l0prune.errors import CertificateError, L0pruneWarning, UsageError

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
EXAMPLE = {"input_ids": torch.arange(14).reshape(2, 7)}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
BIASED = {"attention_bias": True, "mlp_bias": True}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    from tokenizers import pre_tokenizers

    folder = tmp_path_factory.mktemp("words")
    tokenizer(folder, pre_tokenizers.ByteLevel(add_prefix_space=False))
    return folder


def expected(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)


def error(model, path):
    """How far llama.cpp's logarithms of probabilities are from those of the network."""
    ids = [17, 3, 88, 140, 5, 61, 9, 120, 33, 74]
    lengths = (1, 4, len(ids))
    found = torch.tensor(log_probabilities(path, [ids[:n] for n in lengths], VOCABULARY))
    return (found - expected(model, ids)[[n - 1 for n in lengths]]).abs().max()


def written(model, path, words, **options):
    l0prune.save_gguf(model, path, tokenizer=words, **options)
    return gguf.GGUFReader(path)


def number(reader, key):
    (architecture,) = (reader.get_field("general.architecture").contents(),)
    return architecture, reader.get_field(f"{architecture}.{key}").contents()


@runs
@pytest.mark.parametrize(
    ("name", "settings", "architecture"),
    [
        ("llama", {}, "llama"),
        ("llama", BIASED | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, "llama"),
        ("mistral", {"sliding_window": 64}, "llama"),
        ("qwen2", {}, "qwen2"),
        ("qwen3", {"head_dim": 16}, "qwen3"),
    ],
)
def test_layers_alike_are_of_their_own_architecture(name, settings, architecture, words, tmp_path):
    model = built(name, **settings)
    reader = written(model, tmp_path / "model.gguf", words)
    assert number(reader, "block_count") == (architecture, 2)
    if name == "mistral":
        assert number(reader, "context_length")[1] == 64
    assert error(model, tmp_path / "model.gguf") < 1e-5


@runs
@pytest.mark.parametrize(
    ("name", "settings"), [("llama", {"rope_parameters": LLAMA3}), ("qwen2", {}), ("llama", BIASED)]
)
def test_layers_that_differ_run(name, settings, words, tmp_path):
    model = cut(built(name, num_hidden_layers=3, **settings), (1, 33), (4, 5), (2, 96))
    reader = written(model, tmp_path / "model.gguf", words)
    assert number(reader, "attention.head_count_kv") == ("deci", [1, 4, 2])
    assert number(reader, "attention.head_count")[1] == [2, 8, 4]
    assert number(reader, "feed_forward_length")[1] == [33, 5, 96]
    assert error(model, tmp_path / "model.gguf") < 1e-5


@runs
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_what_gates_close_at_random_runs(seed, words, tmp_path):
    """Widths, heads, hidden size and whole branches; the same tokens come out."""
    model = built(["llama", "qwen2"][seed % 2], num_hidden_layers=3 if seed else 2)
    with pytest.warns(match="num_attention_heads × num_key_value_heads, of which each has its own"):
        l0prune.gate(model, (), EXAMPLE, loadable_by="gguf", progress=False)
    bank, draw = l0prune.gates(model), random.Random(seed)
    branches = [axis.name for axis in bank.plan.axes if axis.kind == "branch"]
    closed = draw.sample(branches, 2)
    for axis in bank.plan.axes:
        if axis.kind != "branch":
            count = draw.choice(bank.plan.allowed.get(axis.name, range(1, axis.size + 1)))
            bank.set_open(axis.name, draw.sample(range(axis.size), count))
        elif axis.name in closed:
            bank.set_open(axis.name, [])
    small = l0prune.export(model, progress=False).module
    path = tmp_path / "model.gguf"
    written(small, path, words)
    assert error(small, path) < 1e-5
    ids = [5, 90, 41, 7]
    for _ in range(8):  # 1 ends a text, which llama.cpp is told to ignore
        ids.append(int(expected(small, ids)[-1].index_fill(0, torch.tensor([1]), -99).argmax()))
    assert greedy(path, ids[:4], 8) == ids[4:]


@pytest.mark.parametrize(
    ("layers", "queries", "widths"),
    [
        ([(0, 9), (4, 8)], [1, 8], [9, 8]),  # the first one has heads of zeros
        ([(1, 0), (0, 8)], [2], [8]),  # one layer of both
        ([(1, 9), (2, 0)], [2, 4], [9, 32]),  # an MLP of zeros
        ([(1, 9), (0, 8)], [2, 0], [9, 8]),
        ([(0, 0), (3, 7)], [6], [7]),
    ],
)
def test_parts_that_are_missing_are_left_out_or_zeros(layers, queries, widths, words, tmp_path):
    from l0prune.features.gguf.content import content_of

    model = built("llama")
    kept = {name: each for name, each in cut(model, *layers).state_dict().items() if each.numel()}
    content = content_of(model)
    assert content.by_layer("attention.head_count") == queries
    assert content.by_layer("feed_forward_length") == widths
    for name, tensor in kept.items():  # all weights are there
        if "down_proj" in name:
            assert any(tensor.equal(each) for each in content.tensors.values())


@runs
def test_types_round_what_they_say(words, tmp_path):
    """The perplexity of a text that the network itself draws is near that of F32."""
    model = cut(built("llama", num_hidden_layers=2), (4, 64), (2, 33))
    drawn, found = [3], {}
    torch.manual_seed(0)
    for _ in range(24):
        drawn.append(int(expected(model, drawn)[-1].exp().multinomial(1)))
    texts = [drawn[:n] for n in range(1, 25)]
    for kind in ("F32", "F16", "BF16", "Q8_0"):
        path = tmp_path / f"model.{kind}.gguf"  # by its name
        reader = written(model, path, words)
        kinds = {each.name: each.tensor_type.name for each in reader.tensors}
        assert kinds["output_norm.weight"] == "F32"
        assert kinds["blk.0.ffn_down.weight"] == kind
        assert kinds["blk.1.ffn_down.weight"] == ("F16" if kind == "Q8_0" else kind)  # of 33
        found[kind] = perplexity(log_probabilities(path, texts, VOCABULARY), drawn[1:])
    assert found["F32"] == pytest.approx(
        float((-expected(model, drawn)[:-1][range(24), drawn[1:]].mean()).exp()), rel=1e-5
    )
    for kind, near in (("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 1e-2)):
        assert 0 < abs(found[kind] / found["F32"] - 1) < near


def test_weights_are_in_their_own_type_by_default(tmp_path):
    model = built("llama").bfloat16()
    with pytest.warns(L0pruneWarning, match="no tokenizer"):
        l0prune.save_gguf(model, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    (down,) = (each for each in reader.tensors if each.name == "blk.1.ffn_down.weight")
    assert down.tensor_type.name == "BF16"
    bits = np.ascontiguousarray(down.data).view(np.int16).reshape(64, 96)
    weight = model.model.layers[1].mlp.down_proj.weight.detach().view(torch.int16)
    assert (bits == weight.numpy()).all()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: nn.Linear(2, 2), "Linear is no class of transformers"),
        (lambda: cut(built("qwen3"), (1, 9), (2, 9)), "norm of queries and keys(.|\n)*differ"),
        (
            lambda: built("gpt2", n_embd=64, n_head=4),
            "transformer.wte.weight is no weight of a Llama",
        ),
        (lambda: built("llama", rope_parameters=LLAMA3 | {"rope_type": "dynamic"}), "'dynamic'"),
    ],
)
def test_what_llama_cpp_cannot_run_is_refused(model, why, tmp_path):
    with pytest.raises(UsageError, match=why):
        l0prune.save_gguf(model(), tmp_path / "model.gguf")
    assert not [*tmp_path.iterdir()]


def test_sizes_of_heads_that_differ_are_refused(tmp_path):
    model = built("llama")
    value = model.model.layers[0].self_attn.v_proj
    value.weight = nn.Parameter(value.weight[:20])
    with pytest.raises(UsageError, match=r"4 of keys and 2.5 of values by heads of 8"):
        l0prune.save_gguf(model, tmp_path / "model.gguf")


def test_a_network_that_computes_something_else_is_not_written(tmp_path):
    with pytest.raises(CertificateError, match="would compute something else"):
        l0prune.save_gguf(built("llama", hidden_act="gelu"), tmp_path / "model.gguf")
    assert not [*tmp_path.iterdir()]


def test_a_type_that_does_not_hold_the_weights_is_refused(tmp_path):
    model = built("llama")
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e5
    with pytest.raises(UsageError, match=r"blk.0.ffn_up.weight has values above 65504"):
        l0prune.save_gguf(model, tmp_path / "model.gguf", type="f16")
    with pytest.raises(UsageError, match=r"F32, F16, BF16, Q8_0, not 'Q8_1'.*Q8_0"):
        l0prune.save_gguf(model, tmp_path / "model.gguf", type="Q8_1")
    assert not [*tmp_path.iterdir()]


def test_an_export_is_saved_by_suffix_and_layers_of_a_qwen3_stay_alike(words, tmp_path):
    model = built("qwen3")
    model.name_or_path = str(words)
    with pytest.warns(match="for gguf to load the result by itself, layers keep one width, and"):
        l0prune.gate(model, (), EXAMPLE, loadable_by="gguf", branches=False, progress=False)
    for axis in l0prune.gates(model).plan.axes:
        l0prune.gates(model).set_open(axis.name, range(axis.size // 2))
    small = l0prune.export(model, progress=False)
    assert small.save(tmp_path / "small.Q8_0.gguf") == (tmp_path / "small.Q8_0.gguf",)
    reader = gguf.GGUFReader(tmp_path / "small.Q8_0.gguf")
    assert number(reader, "feed_forward_length") == ("qwen3", 48)
    assert reader.get_field("tokenizer.ggml.model").contents() == "gpt2"


@pytest.mark.slow
def test_the_command_writes_a_file_of_the_suffix(done, refused, words, tmp_path):
    dense = tmp_path / "dense"
    built("llama").save_pretrained(dense)
    shutil.copytree(words, dense, dirs_exist_ok=True)
    given = (f"transformers:{dense}", "--input", "input_ids=2x7:int64", "--out", "small.gated.pt")
    done("gate", *given, "--loadable-by", "gguf")
    assert ".gguf" in refused(2, "export", "--gguf", "small.bin")
    told, _ = done("export", "--gguf", "small.F16.gguf", "--no-report", "--json")
    assert told["files"] == ["small.F16.gguf"]
    assert number(gguf.GGUFReader(tmp_path / "small.F16.gguf"), "block_count") == ("llama", 2)
