"""``l0prune run`` and ``l0prune recipes``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from l0prune.cli.edge import announced, emit, say
from l0prune.cli.options import DataRoot, Json
from l0prune.cli.report import NoReport
from l0prune.errors import UsageError
from l0prune.running.environment import is_launched

app = typer.Typer(help="Recipes that come with l0prune.", no_args_is_help=True)


def run(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (recipes ls) or a .toml file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="section.key=value, e.g. finetune.epochs=20 'finetune.lam=\"0.2/N\"'; without a "
            "value the default counts, e.g. finetune.budget=."
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of the run; default runs/NAME.")
    ] = None,
    data_root: DataRoot = None,
    report: NoReport = True,
    json: Json = False,
) -> None:
    """Run a whole recipe: train if asked, gate, fine-tune, export. Resumable.

    A stage whose file stands in the run folder is not done again. Example:

        l0prune run digits-lenet
    """
    if is_launched():
        raise UsageError(
            "a recipe runs in one process; torchrun goes with `l0prune finetune`, between "
            "`l0prune gate` and `l0prune export`"
        )
    from l0prune.cli import recipe_files
    from l0prune.cli.recipe_run import run as carried_out  # loads torch

    loaded = recipe_files.load(recipe, overrides or [])
    target = folder or Path("runs") / loaded.name
    root = str(data_root) if data_root else None
    with announced(say):
        result = carried_out(loaded, target, root, report=report)
    emit(result, json, _table(result))
    if report:
        say(f"the report is {result['page']}")


def _table(result: dict) -> Table:
    table = Table("", "value", title=f"{result['recipe']}: {result['onnx']}", show_header=False)
    table.add_row("axes left", result["architecture"])
    if result["gone"]:
        table.add_row("branches gone", ", ".join(result["gone"]))
    for name in ("params", "macs"):
        after, before = result[name], result[f"{name}_before"]
        table.add_row(name, f"{after:,} of {before:,} ({after / before:.1%})")
    from l0prune.training.history import IN_PERCENT  # loads torch

    metric = result["metric"]
    form = ".2%" if metric in IN_PERCENT else ".4g"
    for text, of in ((f"test {metric}", "test"), ("of the ONNX file", "onnx_test")):
        if (value := result[f"{of}_{metric}"]) is not None:
            table.add_row(text, format(value, form))
    for text, value in result["report"].items():
        table.add_row(text, format(value, ".4g") if isinstance(value, float) else str(value))
    errors: dict[tuple[str, str], float] = {}
    for check in result["certificate"]:
        key = (check["what"], check["dtype"])
        errors[key] = max(errors.get(key, 0.0), check["error"])
    for (what, dtype), error in errors.items():
        table.add_row(f"certificate: {what}, {dtype}", f"{error:.1e} of the output's scale")
    return table


@app.command("ls")
def ls(json: Json = False) -> None:
    """List the recipes."""
    from l0prune.cli import recipe_files  # loads torch

    found = recipe_files.builtin()
    table = Table("recipe", "what it does")
    for name, recipe in found.items():
        table.add_row(name, recipe.description)
    emit({name: recipe.description for name, recipe in found.items()}, json, table)


@app.command("show")
def show(name: Annotated[str, typer.Argument(help="A recipe's name.")]) -> None:
    """Print a recipe, to read or to start one of your own from.

    Example:

        l0prune recipes show digits-lenet > my.toml

        l0prune run my.toml
    """
    from l0prune.cli import recipe_files  # loads torch

    sys.stdout.flush()
    sys.stdout.buffer.write(recipe_files.find(name).read_bytes())  # a console would wrap its lines
    sys.stdout.buffer.flush()
