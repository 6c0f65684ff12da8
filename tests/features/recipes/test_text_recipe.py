"""Texts in recipes: read with the model's tokenizer, or a named one, as by the commands."""

import onnxruntime
import pytest
import torch

from l0prune.errors import DataError, UsageError
from l0prune.features.recipes.files import load
from l0prune.features.recipes.runs import _data, run
from l0prune.files.model_sources import load_model

transformers = pytest.importorskip("transformers")
WORDS = ["[PAD]", "[UNK]", "the", "cat", "sees", "a", "bird"]
SIZES = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 12}
RECIPE = """
description = "Texts."
[model]
source = "transformers:bert"
[data]
source = "lines.txt"
tokenizer = "words"
answers = true
[gate]
branches = false
dynamic = ["input_ids:1=n", "attention_mask:1=n"]
[fit]
budget = "params=0.9"
score = "worth.py:last"
round_to = 1
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    from tokenizers import Tokenizer, models, pre_tokenizers

    monkeypatch.chdir(tmp_path)
    words = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    tokenizer.save_pretrained("words")
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES)
    transformers.BertForSequenceClassification(config).save_pretrained("bert")
    lines = [" ".join(WORDS[2 + k % 5] for k in range(n, 2 * n + 1)) for n in range(10)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    (tmp_path / "one.txt").write_text(lines[3])
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.toml").write_text(RECIPE)
    (tmp_path / "recipe" / "worth.py").write_text(
        "import torch\ndef last(of):\n    return torch.arange(of.plan.size)\n"
    )


def test_every_eighth_line_is_for_the_test():
    recipe = load("recipe/mine.toml", [])
    data = _data(recipe, load_model(recipe.model.source), None)
    assert [len(data.train), len(data.test)] == [8, 2]
    assert data.test.example(2)["attention_mask"].sum(1).tolist() == [1, 9]


@pytest.mark.slow
def test_a_classifier_learns_its_own_answers_to_lines(tmp_path):
    result = run(load("recipe/mine.toml", []), tmp_path / "run", report=False)
    assert result["params"] <= 0.9 * result["params_before"]
    assert result["test_loss"] == pytest.approx(result["onnx_test_loss"], rel=1e-3)
    session = onnxruntime.InferenceSession(tmp_path / "run" / "mine.onnx")
    ids = torch.full((1, 5), 3)
    session.run(None, {each.name: ids.numpy() for each in session.get_inputs()})


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("data.tokenizer=", UsageError, "there is no tokenizer in bert"),
        ("data.answers=false", DataError, "in a recipe answers = true"),
        ("data.source=one.txt", DataError, "one.txt has one example"),
        ("gate.dynamic=['input_ids:1=n']", UsageError, "fixed in attention_mask: give its dim"),
    ],
)
def test_what_a_text_lacks_is_told(tmp_path, override, error, message):
    with pytest.raises(error, match=message):
        run(load("recipe/mine.toml", [override]), tmp_path / "run")


@pytest.mark.slow
def test_a_language_model_is_tested_on_windows(tmp_path):
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained("llama")
    asked = ["model.source=transformers:llama", "data.source=lines.txt:6"]
    asked += ["data.answers=", "gate.dynamic=", "fit.score=magnitude"]
    result = run(load("recipe/mine.toml", asked), tmp_path / "run", report=False)
    assert result["metric"] == "perplexity"
    assert result["onnx_test_perplexity"] == pytest.approx(result["test_perplexity"], rel=1e-3)
