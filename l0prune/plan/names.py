"""Names that come with l0prune, of which users give some: known before torch is loaded.

Tests show that they are those of the registries.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from l0prune.doors import behind, no_such
from l0prune.errors import UsageError, meant

SCORES = (
    *("magnitude", "group-magnitude", "bn-scale", "taylor", "fisher", "outputs", "ablation"),
    *("auto", "random"),
)
LOSSES = ("auto", "cross-entropy", "mse", "l1", "smooth-l1", "bce", "next-token")
METRICS = (
    *("error", "accuracy", "label-error", "mae", "perplexity"),
    *(name for name in LOSSES if name != "auto"),
)
GATES = ("binary-concrete", "continuous-sparsification", "hard-concrete")
PENALTIES = (
    *("group-lasso", "group-lq", "q-shrinkage", "scad", "mcp", "firm", "trimmed-l1"),
    *("l0-projection", "gsm"),
)
DATA = ("digits", "mnist", "fashion-mnist", "cifar10", "cifar100")
PACKAGES = ("torchvision", "timm", "transformers")  # whose networks have a name


def check_score(name: str, known: Collection[str]) -> None:
    """Raise UsageError if there is no score of this name."""
    known = {*known, *(added for added, _ in behind("scores"))}
    if name not in known:
        raise no_such("score", name, sorted(known))


def check_gate(name: str, known: Collection[str]) -> None:
    """Raise UsageError if there is no kind of gate of this name."""
    known = {*known, *(added for added, _ in behind("gates"))}
    if name not in known and name.replace("_", "-") not in known:
        raise no_such("gate", name, sorted(known))


def check_penalty(name: str) -> None:
    """Raise UsageError if there is no penalty of this name, with or without ``group-``."""
    known = (*PENALTIES, *(added for added, _ in behind("penalties")))
    if name not in known and name.removeprefix("group-") not in known:
        raise no_such("penalty", name, known)


def check_criterion(name: str, kind: str) -> None:
    """Raise UsageError if there is no loss (or metric, by ``kind``) of this name."""
    known = LOSSES if kind == "loss" else METRICS
    if name in known:
        return
    more = ", a file.py:function, and in Python a function of (outputs, targets)"
    raise no_such(kind, name, known, more)


def no_data(spec: str) -> UsageError:
    """Return the error of a data source that is none."""
    near = meant(spec, DATA) or "."
    if Path(spec).is_dir():
        near = f", but a folder: write imagefolder:{spec} for images, text:{spec} for texts."
    return UsageError(
        f"{spec!r} is no data source{near} Known: {', '.join(DATA)}, "
        "imagefolder:DIR, FILE.txt, text:DIR, file.py:function."
    )


def no_model(spec: str) -> UsageError:
    """Return the error of a model source that is none."""
    known = ", ".join(f"{kind}:NAME" for kind in PACKAGES)
    return UsageError(
        f"{spec!r} is neither a file nor any other model source. Give a file written by "
        f"torch.save(model, path), path.py:factory, or one of {known}."
    )
