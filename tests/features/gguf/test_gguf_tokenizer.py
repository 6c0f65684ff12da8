"""Tokenizers in GGUF files: llama.cpp gives texts the numbers that the original gives them."""

import json

import pytest
from llama_server import runs, tokenized
from small_llamas import LETTERS, TEXTS, VOCABULARY, built, tokenizer

import l0prune
from l0prune.errors import L0pruneWarning
from l0prune.features.gguf import tokenizer as known

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
tokenizers = pytest.importorskip("tokenizers")
pre_tokenizers = tokenizers.pre_tokenizers
CHECKED = [
    "the cat sat on the mat",
    "The other's hats, in 1999: 12345 and 7.",
    "  two  spaces\tHATS-and caps!!  ",
    "sat</s>on the mat",
]
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)


def split(steps):
    regex = tokenizers.Regex
    made = {"single digits": pre_tokenizers.Digits(True), "bytes": BYTES, "bytes by words": WORDS}
    parts = [made.get(each) or pre_tokenizers.Split(regex(each), "isolated") for each in steps]
    return parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)


def written(model, path, folder):
    l0prune.save_gguf(model, path, tokenizer=folder)
    return gguf.GGUFReader(path)


@runs
@pytest.mark.parametrize(("steps", "name"), known._SPLITS.items(), ids=known._SPLITS.values())
def test_llama_cpp_splits_as_the_original_does(steps, name, tmp_path):
    original = tokenizer(tmp_path, split(steps), pre_tokenizers.ByteLevel.alphabet(), 350)
    path = tmp_path / "model.gguf"
    reader = written(built("llama", vocab_size=360), path, tmp_path)
    assert reader.get_field("tokenizer.ggml.pre").contents() == name
    assert reader.get_field("tokenizer.ggml.eos_token_id").contents() == 1
    assert tokenized(path, CHECKED) == [original(text).input_ids for text in CHECKED]


def with_bytes(folder, prefix):
    """A tokenizer as SentencePiece's, with a token for each byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    before = [normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(before)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=LETTERS, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    data = json.loads(made.to_str())
    learned = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    first = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    names = [*first, *learned]
    data["model"] |= {"vocab": {n: i for i, n in enumerate(names)}, "byte_fallback": True}
    made = Tokenizer.from_str(json.dumps(data))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    made.add_special_tokens([AddedToken(each, normalized=False) for each in first[:3]])
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    fast.save_pretrained(folder)
    return fast, len(names)


@runs
@pytest.mark.parametrize("prefix", [True, False])
def test_pairs_merge_by_scores_where_bytes_are_tokens(prefix, tmp_path):
    original, size = with_bytes(tmp_path, prefix)
    model, path = built("llama", vocab_size=size), tmp_path / "model.gguf"
    assert written(model, path, tmp_path).get_field("tokenizer.ggml.model").contents() == "llama"
    texts = [*CHECKED[:3], "the caté"]
    assert tokenized(path, texts) == [original(text).input_ids for text in texts]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data["model"].update(type="WordPiece"), "a WordPiece tokenizer"),
        (lambda data: data["pre_tokenizer"].update(add_prefix_space=True), "have none for it"),
        (lambda data: data.update(normalizer={"type": "Lowercase"}), "changes texts before"),
        (lambda data: data["added_tokens"][0].update(id=500), "501 tokens, and the network knows"),
    ],
)
def test_a_tokenizer_that_is_not_converted_is_said(change, why, tmp_path):
    tokenizer(tmp_path, WORDS)
    file = tmp_path / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    change(data)
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.warns(L0pruneWarning, match=rf"has no tokenizer(.|\n)*{why}"):
        said = l0prune.save_gguf(built("llama"), tmp_path / "model.gguf", tokenizer=tmp_path)
    assert "llama_decode" in said


def test_a_tokenizer_is_looked_for_where_the_model_came_from(tmp_path):
    model = built("llama")
    model.name_or_path = str(tmp_path)
    with pytest.warns(L0pruneWarning, match=r"there is no .*tokenizer.json, which"):
        l0prune.save_gguf(model, tmp_path / "model.gguf")
    tokenizer(tmp_path, WORDS)
    assert "llama-cli" in l0prune.save_gguf(model, tmp_path / "model.gguf")
