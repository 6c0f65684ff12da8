"""Options for input gates: ``l0prune gate --input-gates``, ``l0prune export --skipping``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

import l0prune
from l0prune.cli.more import More, Written
from l0prune.errors import UsageError

InputGates = Annotated[
    list[str] | None,
    typer.Option(
        "--input-gates",
        help="Gates that depend on the input: the share of the MACs that they leave on average "
        "(0.7), paths of blocks (globs) that get them, or both. They have saved no milliseconds so "
        "far.",
    ),
]
Skipping = Annotated[
    bool,
    typer.Option(
        "--skipping",
        help="With input gates (`gate --input-gates`): write MODEL.skipping.onnx, which skips "
        "blocks that they close as a whole, for one example at a time.",
    ),
]


def gate(module: Any, example: Any, *, input_gates: InputGates = None) -> Any:
    """Return the network with input gates, if they are asked for."""
    if not input_gates:
        return module
    targets = [number for each in input_gates if (number := _number(each)) is not None]
    if len(targets) > 1:
        raise UsageError(f"--input-gates has two shares, {targets[0]:g} and {targets[1]:g}")
    at = [each for each in input_gates if _number(each) is None]
    target = targets[0] if targets else None
    return l0prune.add_input_gates(module, *example, at=at or "*", target=target)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def export(_: Callable[[str], Any], *, skipping: Skipping = False) -> More | None:
    """Return what writes the file that skips closed blocks, if it is asked for."""
    return More(finish=_skipping) if skipping else None


def _skipping(small: l0prune.Export, stem: object) -> Written:
    return Written([l0prune.save_skipping(small, f"{stem}.skipping.onnx")], {})
