"""Tokenizers for llama.cpp, from the ``tokenizer.json`` beside a model of transformers."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How texts are split into words, by llama.cpp's names.
_SPLITS = {
    ("bytes by words",): "gpt-2",
    ("single digits", "bytes by words"): "smollm",
    (rf"{_WORDS}\p{{N}}{{1,3}}{_REST}", "bytes"): "llama-bpe",
    (rf"{_WORDS}\p{{N}}{_REST}", "bytes"): "qwen2",
    (_TEKKEN, "bytes"): "tekken",
}


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer as llama.cpp's metadata has it: tokens by number, with kinds and scores.

    Attributes:
        split: llama.cpp's name for how texts are split into words; empty where they are not.
        adds_space: whether a text begins with a space that is added.
        scores: of tokens, by which pairs merge; None where the file has the merges themselves.
        special: special tokens, merges and the chat template, by the package ``gguf``.
    """

    split: str
    adds_space: bool
    tokens: list[bytes]
    kinds: list[Any]
    scores: list[float] | None
    special: Any

    def write(self, writer: Any) -> None:
        """Add the metadata to a file of the package ``gguf``."""
        writer.add_tokenizer_model("gpt2" if self.scores is None else "llama")
        writer.add_tokenizer_pre(self.split or "default")
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        writer.add_add_space_prefix(self.adds_space)
        self.special.add_to_gguf(writer, quiet=True)


def tokenizer_in(folder: Path, size: int) -> Tokenizer:
    """Return the tokenizer in a folder, for a network that knows ``size`` tokens.

    Raises:
        ValueError: it cannot be converted; the text says why.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"there is no {file}, which tokenizer.save_pretrained writes")
    data = json.loads(file.read_text(encoding="utf-8"))
    model = data["model"]
    if model["type"] != "BPE":
        raise ValueError(
            f"a {model['type']} tokenizer is not converted, only one that merges pairs"
        )
    has_bytes = bool(model.get("byte_fallback"))  # as tokenizers of SentencePiece
    split = "" if has_bytes else _split_of(data)
    tokens, kinds = _tokens(data, size)
    gguf: Any = importlib.import_module("gguf")
    special = gguf.SpecialVocab(folder, load_merges=not has_bytes, n_vocab=size)
    if "eos" not in special.special_token_ids:
        raise ValueError("it names no token that ends a text (eos_token)")
    bare, whole = (_ids(file, add_special_tokens=each) for each in (False, True))
    special.add_special_token.setdefault("bos", whole[:1] != bare[:1])
    special.add_special_token.setdefault("eos", whole[-1:] != bare[-1:])
    scores = _scores(model, tokens) if has_bytes else None
    return Tokenizer(split, has_bytes and _adds_space(data), tokens, kinds, scores, special)


def _ids(file: Path, *, add_special_tokens: bool) -> list[int]:
    known: Any = importlib.import_module("tokenizers").Tokenizer.from_file(str(file))
    ids: list[int] = known.encode("a", add_special_tokens=add_special_tokens).ids
    return ids


def _split_of(data: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for how a tokenizer splits texts into words."""
    if ((data.get("normalizer") or {}).get("type") or "NFC") != "NFC":
        raise ValueError("it changes texts before it splits them, which is not converted")
    before = data.get("pre_tokenizer") or {}
    steps = tuple(_step(each) for each in before.get("pretokenizers", [before]))
    if steps not in _SPLITS:
        raise ValueError("llama.cpp's names for how texts are split into words have none for it")
    return _SPLITS[steps]


def _step(given: Mapping[str, Any]) -> str:
    match given:
        case {"type": "Digits", "individual_digits": True}:
            return "single digits"
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return "bytes by words" if given.get("use_regex", True) else "bytes"
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated"}:
            return regex * (not given["invert"])
    return ""


def _adds_space(data: Mapping[str, Any]) -> bool:
    normalizer, before = data.get("normalizer") or {}, data.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer]) + before.get("pretokenizers", [before])
    return any(
        each.get("type") == "Prepend" or each.get("prepend_scheme", "never") != "never"
        for each in steps
    )


def _tokens(data: Mapping[str, Any], size: int) -> tuple[list[bytes], list[Any]]:
    """Return tokens and their kinds by number; numbers without a token have a name of their own."""
    kind: Any = importlib.import_module("gguf").TokenType
    vocabulary: dict[str, int] = data["model"]["vocab"]
    added = {each["id"]: each for each in data.get("added_tokens") or ()}
    names = {number: name for name, number in vocabulary.items()}
    names |= {number: each["content"] for number, each in added.items()}
    if max(names) >= size:
        raise ValueError(f"it has {max(names) + 1} tokens, and the network knows {size}")
    kinds = []
    for number in range(size):
        name = names.get(number)
        if name is None:
            names[number] = f"[PAD{number}]"
            kinds.append(kind.UNUSED)
        elif number in added:
            kinds.append(kind.CONTROL if added[number]["special"] else kind.USER_DEFINED)
        elif name == data["model"].get("unk_token"):
            kinds.append(kind.UNKNOWN)
        elif data["model"].get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", name):
            kinds.append(kind.BYTE)
        else:
            kinds.append(kind.NORMAL)
    return [names[number].encode() for number in range(size)], kinds


def _scores(model: Mapping[str, Any], tokens: list[bytes]) -> list[float]:
    """Return scores by which pairs merge in the order of a tokenizer's list of merges."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(model["merges"]):
        first, second = pair if isinstance(pair, list) else pair.split(" ")
        ranks.setdefault(first + second, rank)
    return [-float(ranks.get(token.decode(), len(ranks))) for token in tokens]
