"""``l0prune run`` and ``l0prune recipes``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from l0prune.cli import options
from l0prune.cli.help import GroupedCommand
from l0prune.cli.messages import announced, emit, err, say
from l0prune.cli.project import find_recipe
from l0prune.errors import UsageError
from l0prune.progress.display import shown
from l0prune.progress.launched import is_launched

recipes = typer.Typer(help="Recipes that come with l0prune.", no_args_is_help=True)


def run(
    recipe: options.Recipe,
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
    data_root: options.DataRoot = None,
    report: options.WithReport = True,
    json: options.Json = False,
) -> None:
    """Run a whole recipe: train if asked, gate, fine-tune, export. Resumable.

    A stage whose file is in the run folder is skipped.

    Examples:
        l0prune run digits-wide
        l0prune run digits-wide finetune.budget=macs=0.3 --out runs/third
        l0prune run my.toml finetune.epochs=20
    """
    if is_launched():
        raise UsageError(
            "a recipe runs in one process; torchrun goes with `l0prune finetune`, between "
            "`l0prune gate` and `l0prune export`"
        )
    from l0prune.features.recipes import files
    from l0prune.features.recipes.runs import run as run_recipe  # loads torch

    loaded = files.load(recipe, overrides or [])
    target = folder or Path("runs") / loaded.name
    root = str(data_root) if data_root else None
    with shown(console=err), announced(say):
        result = run_recipe(loaded, target, root, report=report)
    emit(result, json, _table(result))
    if report:
        say(f"the report is {result['page']}")


def _table(result: dict) -> Table:
    from l0prune.features.recipes import files  # loads torch, as does the next one
    from l0prune.training.history import IN_PERCENT

    table = Table("", "value", title=f"{result['recipe']}: {result['onnx']}", show_header=False)
    table.add_row("axes left", result["architecture"])
    if result["gone"]:
        table.add_row("branches gone", ", ".join(result["gone"]))
    for name in ("params", "macs"):
        after, before = result[name], result[f"{name}_before"]
        table.add_row(name, f"{after:,} of {before:,} ({after / before:.1%})")
    if (time := result.get("speedup")) is not None:
        ms = f"{time['before_ms']:.3g} → {time['after_ms']:.3g} ms"
        table.add_row("times as fast", f"{time['speedup']:.3g} ({ms} in ONNX Runtime)")
    metric = result["metric"]
    form = ".2%" if metric in IN_PERCENT else ".4g"
    for text, of in ((f"test {metric}", "test"), ("of the ONNX file", "onnx_test")):
        if (value := result[f"{of}_{metric}"]) is not None:
            table.add_row(text, format(value, form))
    for name, section in files.SECTIONS.items():
        if (found := result.get(name)) is not None:
            for row in section.rows(found, metric, form):
                table.add_row(*row)
    for text, value in result["report"].items():
        table.add_row(text, format(value, ".4g") if isinstance(value, float) else str(value))
    errors: dict[tuple[str, str], float] = {}
    for check in result["certificate"]:
        key = (check["what"], check["dtype"])
        errors[key] = max(errors.get(key, 0.0), check["error"])
    for (what, dtype), error in errors.items():
        table.add_row(f"certificate: {what}, {dtype}", f"{error:.1e} of the output's scale")
    return table


@recipes.command("ls", cls=GroupedCommand)
def ls(json: options.Json = False) -> None:
    """List the recipes.

    Examples:
        l0prune recipes ls
        l0prune recipes ls --json
    """
    from l0prune.features.recipes import files  # loads torch

    found = files.builtin()
    table = Table("recipe", "what it does")
    for name, recipe in found.items():
        table.add_row(name, recipe.description)
    emit({name: recipe.description for name, recipe in found.items()}, json, table)


@recipes.command("show", cls=GroupedCommand)
def show(name: options.Recipe) -> None:
    """Print a recipe, to read or to start one of your own from.

    Examples:
        l0prune recipes show digits-wide
        l0prune recipes show digits-wide > my.toml && l0prune run my.toml
    """
    sys.stdout.flush()
    sys.stdout.buffer.write(find_recipe(name).read_bytes())  # a console would wrap its lines
    sys.stdout.buffer.flush()
