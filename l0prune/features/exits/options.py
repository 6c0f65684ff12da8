"""Options for early exits: ``l0prune gate --exits``, ``l0prune export --exits``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

import l0prune
from l0prune.cli.more import More, Written

At = Annotated[
    list[str] | None,
    typer.Option(
        help="Number of early exits, or paths of the modules that they read (globs). They paid on "
        "digits, not on a ResNet-20."
    ),
]
Chosen = Annotated[
    str | None,
    typer.Option(
        help="With early exits (`gate --exits`): write MODEL.exits.onnx, whose thresholds are "
        "chosen on --data's test part for tolerance=1%, latency=8ms or macs=0.5."
    ),
]


def gate(module: Any, example: Any, *, exits: At = None) -> Any:
    """Return the network with early exits, if they are asked for."""
    if not exits:
        return module
    at = int(exits[0]) if len(exits) == 1 and exits[0].isdecimal() else exits
    return l0prune.add_exits(module, *example, at=at)


def export(examples: Callable[[str], Any], *, exits: Chosen = None) -> More | None:
    """Return what writes the file that is left early, if it is asked for."""
    if not exits:
        return None
    held_out = examples("--exits")
    name, _, value = exits.partition("=")
    asked: dict[str, Any] = (
        {"tolerance": value} if name.strip() == "tolerance" else {"budget": exits}
    )

    def finish(small: l0prune.Export, stem: object) -> Written:
        early = l0prune.choose_exits(small, held_out, **asked)
        file = early.save_onnx(f"{stem}.exits.onnx")
        return Written([file], {"exits": early.to_dict()}, early)

    return More(finish=finish)
