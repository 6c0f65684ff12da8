"""Command line app with all commands.

Torch takes seconds to load: the commands' modules do not import it, so that ``--help`` and usage
errors are answered at once. Modules that need torch are imported inside the commands.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from l0prune.cli.evaluate import evaluate
from l0prune.cli.export import export
from l0prune.cli.finetune import finetune
from l0prune.cli.fit import fit
from l0prune.cli.gate import gate, survey
from l0prune.cli.help import GroupedCommand
from l0prune.cli.messages import own_warnings, run_command
from l0prune.cli.more import extended
from l0prune.cli.report import report
from l0prune.doors import behind, missing
from l0prune.errors import UsageError, in_a_line, warn

_HELP = """\
Learn which parts of a trained PyTorch network can go, and cut them out, exactly.

\b
    l0prune gate model.pt
    l0prune finetune --faster 2
    l0prune export --onnx

That takes a folder with a model and images; each command has options for the rest.
Or all of it on embedded data: l0prune run digits-wide
"""


class Commands(TyperGroup):
    """Group of commands that names the feature of one that is not installed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See ``click.Group``."""
        if args[0] not in self.commands and (sentence := missing(args[0])):
            raise UsageError(sentence)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands, help=_HELP, no_args_is_help=True, add_completion=False, rich_markup_mode=None
)
COMMANDS = (survey, gate, fit, finetune, export, evaluate, report)
for command in COMMANDS:
    app.command(cls=GroupedCommand)(extended(command))
taken = {command.__name__: "l0prune" for command in COMMANDS}
for name, feature in behind("commands"):
    if name in taken:
        warn(
            f"the command {name!r} of {feature.package} is left out: {taken[name]} has a command "
            "of that name"
        )
        continue
    try:
        found = feature.load("commands", name)
    except Exception as error:  # of a package of someone else
        warn(f"the command {name!r} of {feature.name} is left out: {in_a_line(error)}")
        continue
    taken[name] = feature.package
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=name)
    else:
        app.command(cls=GroupedCommand)(extended(found))


# Spins of a waiting libgomp thread before it sleeps, about half a millisecond. With the default of
# 300,000 a small network beside other programs took 20 times as long to train as with one thread;
# with this value, 3 times; on an idle machine hardly longer than with the default.
_SPINS = "10000"
# Torch's own loggers: errors alone. It warns of itself when packages around it are loaded.
_LOGS = "-all"


def main() -> None:
    """Entry point: exit code 0 done, 1 failed, 2 wrong use, 130 stopped by Ctrl-C."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # read when torch is loaded
    os.environ.setdefault("TORCH_LOGS", _LOGS)  # read when torch is loaded
    click_command = typer.main.get_command(app)
    with own_warnings():
        code = run_command(lambda: click_command(standalone_mode=False))
    sys.exit(code)
