"""Text on the command line: a language model of a folder, and the tokenizer beside it."""

import pytest
import torch

pytest.importorskip("transformers")
WORDS = ["[UNK]", *["the", "cat", "dog", "sees", "a", "bird", "and", "runs", "to", "sea"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama with its tokenizer, as ``save_pretrained`` leaves them, and some text."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=24, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path / "llama")
    numbers = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path / "llama")
    draws = torch.randint(1, len(WORDS), (800,), generator=torch.Generator().manual_seed(1))
    (path / "a.txt").write_text(" ".join(WORDS[n] for n in draws), encoding="utf-8")
    return path


@pytest.fixture
def found(done):
    """What a command gives on stdout, as JSON."""
    return lambda *arguments: done(*arguments, "--json")[0]


def test_gate_fit_and_evaluate_on_a_text(found, folder):
    model, text = f"transformers:{folder / 'llama'}", f"{folder / 'a.txt'}:16"
    plain = found("evaluate", model, "--data", text)
    found("gate", model, "--data", text, "--no-branches", "--out", "g.pt")
    found("fit", "g.pt", "--budget", "macs=0.7", "--score", "outputs", "--out", "f.pt")
    fitted = found("evaluate", "f.pt")  # on the text that the file names
    assert plain["examples"] == fitted["examples"] == 7  # the last eighth of 50 windows
    assert 5 < plain["perplexity"] < 20  # of words drawn alike, 10
    assert fitted["perplexity"] != plain["perplexity"]
    again = found("evaluate", "f.pt", "--data", text, "--batch-size", "1")
    assert again["perplexity"] == pytest.approx(fitted["perplexity"], rel=1e-6)


def test_the_tokenizer_is_named_where_the_model_does_not_know_it(folder, tmp_path, found, refused):
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Embedding(11, 11)\n", encoding="utf-8"
    )
    asked = ("evaluate", "net.py:net", "--data", f"{folder / 'a.txt'}:16")
    assert "--tokenizer" in refused(2, *asked)
    assert found(*asked, "--tokenizer", folder / "llama")["perplexity"] > 5


@pytest.mark.slow
def test_a_classifier_takes_lines_of_unequal_length(done, refused, folder, tmp_path):
    import onnxruntime
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "max_position_embeddings": 8, "vocab_size": len(WORDS)}
    model = BertForSequenceClassification(BertConfig(**sizes)).eval()
    model.save_pretrained(tmp_path / "bert")
    tokenizer = AutoTokenizer.from_pretrained(folder / "llama", pad_token="[UNK]")
    tokenizer.save_pretrained(tmp_path / "bert")
    lines = [" ".join(WORDS[1 + n % 9] for n in range(k, 2 * k + 1)) for k in range(1, 12)]
    (tmp_path / "lines.txt").write_text("\n".join(lines), encoding="utf-8")
    asked = (f"transformers:{tmp_path / 'bert'}", "--data", tmp_path / "lines.txt")
    free = [f"--dynamic={name}:1=n" for name in ("input_ids", "attention_mask")]
    _, said = done("gate", *asked, *free, "--no-branches", "--out", "b.pt")
    assert "11 texts, one a line, padded to 8 tokens, with a mask" in said
    assert "--learn gates" in refused(1, "finetune", "b.pt")
    done("fit", "b.pt", "--budget", "macs=0.9", "--score", "outputs", "--out", "f.pt")
    done("fit", "f.pt", "--compensate", "--out", "c.pt")
    told, _ = done(
        "export", "c.pt", "--int8", "--no-compensate", "--no-time", "--out", "f.onnx", "--json"
    )
    assert told["files"] == ["f.onnx", "f.int8.onnx"]
    session = onnxruntime.InferenceSession("f.onnx")
    texts = tokenizer(lines[:3], padding=True, return_tensors="np")
    assert {each.name for each in session.get_inputs()} == {*texts}
    padded = session.run(None, dict(texts))[0]
    alone = session.run(None, dict(tokenizer(lines[:1], return_tensors="np")))[0]
    torch.testing.assert_close(torch.tensor(padded[:1]), torch.tensor(alone))


@pytest.mark.slow
def test_shrink_writes_what_transformers_loads_alone(done, folder):
    from transformers import AutoModelForCausalLM

    data = ("--data", f"{folder / 'a.txt'}:16", "--batch-size", "4")
    options = ("--loadable-by", "transformers", "--budget", "macs=0.8", "--pretrained", "small")
    told, _ = done("shrink", f"transformers:{folder / 'llama'}", *data, *options, "--json")
    assert told["files"] == ["small"]
    assert told["fidelity"]["agreement"] > 0.5
    assert "AutoModelForCausalLM" in told["loads"]
    assert AutoModelForCausalLM.from_pretrained("small").num_parameters() == told["params"]


@pytest.mark.slow
def test_shrink_and_export_write_what_vllm_serves(done, refused, folder):
    data = ("--data", f"{folder / 'a.txt'}:16", "--batch-size", "4")
    options = ("--loadable-by", "vllm", "--budget", "macs=0.8", "--vllm", "served")
    told, _ = done("shrink", f"transformers:{folder / 'llama'}", *data, *options, "--json")
    assert told["files"] == ["served"]
    assert "vllm serve served" in told["loads"]
    done("gate", f"transformers:{folder / 'llama'}", *data[:2], "--out", "any.pt")
    assert "vllm serve again" in done("export", "any.pt", "--vllm", "again", "--json")[0]["loads"]
    done("gate", "torchvision:squeezenet1_1", "--input", "1x3x64x64", "--out", "net.pt")
    assert "no class of transformers" in refused(2, "export", "net.pt", "--vllm", "none")


@pytest.mark.slow
def test_finetune_distils_on_a_text(found, folder):
    data = ("--data", f"{folder / 'a.txt'}:16")
    found("gate", f"transformers:{folder / 'llama'}", *data, "--out", "d.pt")
    options = ("--budget", "macs=0.8", "--epochs", "2", "--set", "distill=1", "--no-report")
    assert found("finetune", "d.pt", *options)["perplexity"] < 20


@pytest.mark.slow
def test_experts_writes_a_model_of_fewer(done, refused, folder, tmp_path):
    from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": len(WORDS)}
    MixtralForCausalLM(MixtralConfig(**sizes)).save_pretrained(tmp_path / "mixtral")
    asked = ("experts", f"transformers:{tmp_path / 'mixtral'}", "--tokenizer", folder / "llama")
    asked += ("--data", f"{folder / 'a.txt'}:16", "--score", "reap")
    told, _ = done(*asked, "--experts", "6", "--out", "six", "--json")
    small = AutoModelForCausalLM.from_pretrained("six")
    assert small.config.num_local_experts == 6
    assert small.num_parameters() == told["params"] < told["params_before"]
    assert "1 experts are fewer than the 2" in refused(2, *asked, "--experts", "1")


def test_vocabulary_writes_a_model_and_its_tokenizer(done, refused, folder, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "few.txt").write_text("the dog runs to the sea", encoding="utf-8")
    (tmp_path / "ids").write_text("1, 5\n", encoding="utf-8")
    asked = ("vocabulary", f"transformers:{folder / 'llama'}")
    given = ("--text", tmp_path / "few.txt", "--ids", tmp_path / "ids", "--out", "few")
    told, _ = done(*asked, *given, "--json")
    assert (told["tokens_before"], told["tokens"], told["coverage"]) == (11, 7, 1.0)
    small, whole = (
        AutoModelForCausalLM.from_pretrained(path) for path in ("few", folder / "llama")
    )
    ids = [
        AutoTokenizer.from_pretrained(path)("the dog a")["input_ids"]
        for path in ("few", folder / "llama")
    ]
    assert ids == [[1, 2, 3], [1, 3, 5]]
    expected = whole(torch.tensor(ids[1:])).logits[..., [0, 1, 3, 5, 8, 9, 10]]
    torch.testing.assert_close(small(torch.tensor(ids[:1])).logits, expected)
    assert "which tokens stay" in refused(2, *asked)
    assert "no file of ids" in refused(2, *asked, "--ids", tmp_path / "few.txt")
