"""Serve a folder with vLLM and compare its log probabilities with those of PyTorch.

    python served_by_vllm.py small                      # a folder of save_pretrained
    python served_by_vllm.py served --reference small   # a folder of save_vllm, and the other one

vLLM needs a GPU here. The reference runs first, in PyTorch, on the CPU or the same GPU, and is
freed before vLLM starts. Of each token of a few texts vLLM gives the log probability, and those
of the likeliest tokens at its place; the differences are printed in one line. In 16 bits they are
about 0.05, in float32 about 0.001.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def mean(values):\n    return sum(values) /",
    "Water boils at one hundred degrees, and it freezes at",
    "1, 1, 2, 3, 5, 8, 13, 21,",
)
_LIKELIEST = 5  # tokens of each place that vLLM gives


class Given(Protocol):
    """Log probability of a token, as vLLM gives it."""

    logprob: float


@dataclass
class Differences:
    """Differences of log probabilities, over all places of all texts.

    Attributes:
        places: tokens with others before them.
        compared: log probabilities at these places.
        largest: difference of one of them.
        total: of all differences.
        alike: places with the same likeliest token.
    """

    places: int = 0
    compared: int = 0
    largest: float = 0.0
    total: float = 0.0
    alike: int = 0

    def __str__(self) -> str:
        return (
            f"{self.compared} log probabilities at {self.places} places differ by "
            f"{self.total / max(1, self.compared):.2e} in the mean and {self.largest:.2e} at most; "
            f"the likeliest token is the same at {self.alike}"
        )


def compare(
    logits: Sequence[Tensor], served: Sequence[Sequence[Mapping[int, Given] | None]]
) -> Differences:
    """Compare logits with the ``prompt_logprobs`` of vLLM, text by text.

    Args:
        logits: of each text, shape ``(tokens, vocabulary)``.
        served: for each token of each text the log probabilities of some tokens at its place, by
            those before it; None for the first.

    Raises:
        ValueError: vLLM read other tokens, or a log probability is missing or not finite.
    """
    found = Differences()
    for of_text, given in zip(logits, served, strict=True):
        expected = of_text.double().log_softmax(-1)
        if len(given) != len(expected):
            raise ValueError(f"vLLM read {len(given)} tokens, and PyTorch {len(expected)}")
        for place in range(1, len(given)):
            known = {token: float(each.logprob) for token, each in (given[place] or {}).items()}
            errors = [abs(p - float(expected[place - 1, token])) for token, p in known.items()]
            if not errors or any(error != error or error == float("inf") for error in errors):
                raise ValueError(f"vLLM gives no finite log probabilities of token {place}")
            found.places += 1
            found.compared += len(errors)
            found.total += sum(errors)
            found.largest = max(found.largest, *errors)
            found.alike += max(known, key=lambda token: known[token]) == int(
                expected[place - 1].argmax()
            )
    return found


def by_torch(folder: Path, ids: Sequence[Sequence[int]], dtype: str) -> list[Tensor]:
    """Return the logits of the network in a folder: by transformers, or by l0prune's manifest."""
    model: Any
    if (folder / "l0prune.json").exists():
        import l0prune

        model = l0prune.from_pretrained(folder)
    else:
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device, getattr(torch, dtype)).eval()
    with torch.no_grad():
        return [
            model(input_ids=torch.tensor([each], device=device)).logits[0].float().cpu()
            for each in ids
        ]


def by_vllm(folder: Path, ids: Sequence[Sequence[int]], dtype: str) -> list[Any]:
    """Return the ``prompt_logprobs`` of each text."""
    from vllm import LLM, SamplingParams

    is_own = (folder / "configuration_l0prune.py").exists()
    server = LLM(model=str(folder), dtype=dtype, trust_remote_code=is_own, enforce_eager=True)
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=_LIKELIEST)
    answers = server.generate([{"prompt_token_ids": [*each]} for each in ids], asked)
    return [answer.prompt_logprobs for answer in answers]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and return 1 if a difference is larger than allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("folder", type=Path, help="of save_pretrained or save_vllm")
    parser.add_argument("--reference", type=Path, help="folder for PyTorch, if another one")
    parser.add_argument("--text", action="append", help="to score; may be repeated")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--most", type=float, default=0.2, help="largest difference that is right")
    given = parser.parse_args(arguments)

    import transformers

    words = transformers.AutoTokenizer.from_pretrained(given.folder)
    ids = [words(text)["input_ids"] for text in given.text or TEXTS]
    logits = by_torch(given.reference or given.folder, ids, given.dtype)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    found = compare(logits, by_vllm(given.folder, ids, given.dtype))
    is_right = found.largest <= given.most
    print(f"{'right' if is_right else 'WRONG'}: {given.folder}: {found}")
    return 0 if is_right else 1


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Formatter that keeps the description's lines, and shows defaults."""


if __name__ == "__main__":
    sys.exit(main())
