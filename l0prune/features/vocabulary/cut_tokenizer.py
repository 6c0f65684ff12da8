"""Tokenizers with fewer tokens, as the JSON of the ``tokenizers`` library.

A text whose tokens are all kept is encoded as before. For WordPiece (the longest piece that fits
comes first) and Unigram (the path of the largest score) this holds for any kept tokens: the best
choice among all is also the best among fewer. BPE also needs the tokens that a token is merged
from: the same merges are then the first that apply.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from l0prune.capture.configurations import quietly
from l0prune.errors import UsageError

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # token of a byte, with ``byte_fallback``
_MODELS = ("BPE", "WordPiece", "Unigram", "WordLevel")


def backend_of(tokenizer: Any) -> Any:
    """Return the ``tokenizers.Tokenizer`` behind a tokenizer, or itself if it is one.

    Raises:
        UsageError: there is none behind it.
    """
    found = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not (hasattr(found, "to_str") and hasattr(found, "encode_batch")):
        raise UsageError(
            f"the vocabulary of a {type(tokenizer).__name__} cannot be cut: only tokenizers of the "
            "tokenizers library, and those of transformers that work with one, say how they make "
            "their tokens. Where transformers has a fast version, load that (use_fast=True)"
        )
    return found


# Files from which a class of transformers would load the whole vocabulary again.
_OTHERS = (".txt", ".model", ".tiktoken", "vocab.json", "merges.json", "added_tokens.json")
_FILE, _SETTINGS = "tokenizer.json", "tokenizer_config.json"


def renewed(tokenizer: Any, backend: Any) -> Any:
    """Return a copy of the tokenizer on top of another ``tokenizers.Tokenizer``.

    It keeps the settings of the original (special tokens, chat template).

    Raises:
        UsageError: transformers loads another tokenizer than was written.
    """
    if not hasattr(tokenizer, "backend_tokenizer"):
        return backend
    from transformers import PreTrainedTokenizerFast

    with quietly(), tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in Path(folder).iterdir():
            if path.name.endswith(_OTHERS):
                path.unlink()
        backend.save(str(Path(folder, _FILE)))
        settings = json.loads(Path(folder, _SETTINGS).read_text(encoding="utf-8"))
        settings.pop("added_tokens_decoder", None)  # is in tokenizer.json, too
        Path(folder, _SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
        for kind in (type(tokenizer), PreTrainedTokenizerFast):
            with suppress(Exception):  # a class may need files that were removed
                found = kind.from_pretrained(folder)
                if json.loads(found.backend_tokenizer.to_str()) == json.loads(backend.to_str()):
                    found.name_or_path = ""
                    return found
    raise UsageError(
        "transformers makes something else of the cut tokenizer than the "
        f"{type(tokenizer).__name__} that it was: give the tokenizers.Tokenizer itself "
        "(tokenizer.backend_tokenizer)"
    )


class CutTokenizer:
    """Cutter of a tokenizer's vocabulary: dependencies between tokens, choice, and cut.

    Attributes:
        tokens: text of each token by id, added tokens included.
        required: ids that no cut may remove: special tokens, those that are put around a text,
            bytes, the unknown token.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Read a tokenizer without changing it.

        Raises:
            UsageError: there is no ``tokenizers.Tokenizer`` behind it, or one of another model.
        """
        self._backend = backend_of(tokenizer)
        self._data: dict[str, Any] = json.loads(self._backend.to_str())
        self._model: dict[str, Any] = self._data["model"]
        if self._model.get("type") not in _MODELS:
            raise UsageError(
                f"a tokenizer of the model {self._model.get('type')!r} cannot be cut, one of "
                f"{', '.join(_MODELS)} can"
            )
        self._added = {each["content"]: each["id"] for each in self._data["added_tokens"]}
        self._ids = {**self._of_model(), **self._added}
        self.tokens = {number: token for token, number in self._ids.items()}
        self.required = frozenset(self._required())

    def count(self, texts: Iterable[str]) -> Counter[int]:
        """Count the tokens of texts, without special tokens around them."""
        backend = type(self._backend).from_str(self._backend.to_str())
        backend.no_truncation()
        backend.no_padding()
        found: Counter[int] = Counter()
        for text in texts:
            found.update(backend.encode(text, add_special_tokens=False).ids)
        return found

    def chosen(
        self, order: Iterable[int], size: int | None = None, more: Sequence[int] = ()
    ) -> list[int]:
        """Choose the tokens to keep, each with the tokens that it needs.

        Args:
            order: ids, the most important first.
            size: number of tokens to keep; if ``order`` is too short, the first others are added.
                By default all in ``order``, and those that these need.
            more: ids to keep beside those of ``required``.

        Returns:
            The ids, ascending.

        Raises:
            UsageError: the tokens that have to stay are more than ``size``.
        """
        kept = {each for number in (*self.required, *more) for each in self.needed_by(number)}
        if size is not None and len(kept) > size:
            raise UsageError(
                f"a vocabulary of {size:,} tokens is too small: {len(kept):,} have to stay "
                "(special tokens, bytes, and what these are made of)"
            )
        others = sorted(self.tokens) if size is not None else ()
        for number in (*order, *others):
            if len(kept) == size:
                break
            if number not in kept:
                wanted = kept | self.needed_by(number)
                kept = wanted if size is None or len(wanted) <= size else kept
        return sorted(kept)

    def needed_by(self, number: int) -> frozenset[int]:
        """Return the id with the ids of the tokens that it is merged from and of its letters."""
        token = self.tokens[number]
        if token in self._added:
            return frozenset({number})
        made_of = self._merged_from(token) if self._model["type"] == "BPE" else ()
        names = (*made_of, *self._letters(token))
        return frozenset({number, *(self._ids[each] for each in names if each in self._ids)})

    def cut(self, kept: Sequence[int]) -> Any:
        """Return the ``tokenizers.Tokenizer`` of the kept ids, numbered in their order.

        Raises:
            UsageError: the library gives the tokens other numbers.
        """
        new = {old: number for number, old in enumerate(kept)}
        data = json.loads(json.dumps(self._data))
        self._cut_model(data["model"], new)
        data["added_tokens"] = [
            {**each, "id": new[each["id"]]} for each in data["added_tokens"] if each["id"] in new
        ]
        _renumber(data["post_processor"], new)
        if data.get("padding"):
            data["padding"]["pad_id"] = new[data["padding"]["pad_id"]]
        result = type(self._backend).from_str(json.dumps(data))
        wrong = [old for old in kept if result.token_to_id(self.tokens[old]) != new[old]]
        if wrong or result.get_vocab_size(with_added_tokens=True) != len(new):
            token = self.tokens[wrong[0]] if wrong else ""
            raise UsageError(
                f"the tokenizers library numbers the tokens that stay ({token!r}) in another "
                "order, as added tokens lie between those of the model: keep these, too (ids=…)"
            )
        return result

    def _of_model(self) -> dict[str, int]:
        """Return the ids of the model's tokens, without added ones, by token."""
        vocab = self._model["vocab"]
        if self._model["type"] != "Unigram":
            return dict(vocab)
        return {piece: number for number, (piece, _) in enumerate(vocab)}

    def _required(self) -> Iterator[int]:
        yield from (each["id"] for each in self._data["added_tokens"] if each["special"])
        yield from _numbers(self._data["post_processor"])
        if self._data.get("padding"):
            yield self._data["padding"]["pad_id"]
        unknown = self._model.get("unk_token")
        if unknown in self._ids:
            yield self._ids[unknown]
        if self._model["type"] == "Unigram":
            if self._model.get("unk_id") is not None:
                yield self._model["unk_id"]
            scores = [score for _, score in self._model["vocab"]]
            yield scores.index(min(scores))  # the score of unknown pieces derives from it
        yield from (self._ids[token] for token in self._bytes if token in self._ids)

    @cached_property
    def _bytes(self) -> frozenset[str]:
        """Tokens of single bytes; empty if the tokenizer does not work on bytes."""
        if any(each.get("type") == "ByteLevel" for each in _objects(self._data)):
            from tokenizers.pre_tokenizers import ByteLevel

            return frozenset(ByteLevel.alphabet())
        if self._model.get("byte_fallback"):
            return frozenset(token for token in self._ids if _BYTE.fullmatch(token))
        return frozenset()

    @property
    def _ends(self) -> tuple[str, str]:
        """Prefix of pieces inside a word, and suffix of those at its end."""
        prefix, suffix = (
            self._model.get(f"{name}") or ""
            for name in ("continuing_subword_prefix", "end_of_word_suffix")
        )
        return prefix, suffix

    def _letters(self, token: str) -> Iterator[str]:
        """Yield single-letter tokens by which a text with the token can be encoded without it."""
        prefix, suffix = self._ends
        bare = token.removeprefix(prefix).removesuffix(suffix)
        for letter in () if self._bytes else set(bare):
            yield from (letter, prefix + letter, letter + suffix)

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], int]:
        """Rank of each merge, by the pair of tokens that it merges."""
        pairs = (
            tuple(each.split(" ") if isinstance(each, str) else each)
            for each in self._model["merges"]
        )
        return {(first, second): rank for rank, (first, second) in enumerate(pairs)}

    def _merged_from(self, token: str) -> set[str]:
        """Return all tokens, letters included, from which BPE merges this one; empty if it cannot.

        In a word with this token BPE does the same merges: none reaches across the token's ends, or
        it would not be a token of the word.
        """
        prefix, suffix = self._ends
        starts = prefix if prefix and token.startswith(prefix) else ""
        ends = suffix if suffix and token.endswith(suffix) else ""
        letters = token[len(starts) : len(token) - len(ends)]
        parts = [(prefix if place else starts) + letter for place, letter in enumerate(letters)]
        parts[-1:] = [last + ends for last in parts[-1:]]
        found = set(parts)
        while len(parts) > 1:
            ranks = [self._ranks.get(pair, -1) for pair in pairwise(parts)]
            known = [rank for rank in ranks if rank >= 0]
            if not known:
                return set()
            at = ranks.index(min(known))
            parts[at : at + 2] = [parts[at] + parts[at + 1][len(prefix) :]]
            found.add(parts[at])
        return found if parts == [token] else set()

    def _cut_model(self, model: dict[str, Any], new: dict[int, int]) -> None:
        """Remove from the model, in place, the tokens and merges that are not kept."""
        if model["type"] == "Unigram":
            model["vocab"] = [each for old, each in enumerate(model["vocab"]) if old in new]
            if model.get("unk_id") is not None:
                model["unk_id"] = new[model["unk_id"]]
            return
        vocab = {token: new[old] for token, old in model["vocab"].items() if old in new}
        model["vocab"] = vocab
        if model["type"] == "BPE":
            length = len(self._ends[0])
            model["merges"] = [
                list(pair)
                for pair in self._ranks
                if {*pair, pair[0] + pair[1][length:]} <= vocab.keys()
            ]


def _objects(data: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in JSON data, except in a model's vocabulary and merges."""
    if isinstance(data, dict):
        yield data
        for name, value in data.items():
            yield from () if name in ("vocab", "merges") else _objects(value)
    elif isinstance(data, list):
        for each in data:
            yield from _objects(each)


def _numbers(processor: Any) -> Iterator[int]:
    """Yield the ids of the tokens that a post-processor puts around a text."""
    for place in _places(processor):
        yield from (number for number in place if isinstance(number, int))


def _renumber(processor: Any, new: dict[int, int]) -> None:
    """Replace the ids in a post-processor by the new ones, in place."""
    for place in _places(processor):
        place[:] = [new[each] if isinstance(each, int) else each for each in place]


def _places(processor: Any) -> Iterator[list[Any]]:
    """Yield the lists of a post-processor that hold ids, maybe beside their tokens."""
    for each in _objects(processor):
        yield from (each[name] for name in ("sep", "cls") if isinstance(each.get(name), list))
        if isinstance(each.get("special_tokens"), dict):
            yield from (token["ids"] for token in each["special_tokens"].values())
