"""Layout of ``--help`` (the most used options of a command) and ``--help-all`` (all of them).

A command's description comes first, then its options in groups, then examples.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from typer.core import TyperCommand

from l0prune.cli import early
from l0prune.doors import behind
from l0prune.progress.loading import loading_shown

_EXAMPLES = "\n\nExamples:\n"  # heading in a command's docstring; a line for each example follows
# Options of each group, by parameter name; the last group has all others. Features add theirs.
_GROUPS = {
    "Model and data": (
        "model_option", "weights", "input", "dynamic", "data", "data_root", "batches", "loss",
        "metric", "augment", "batch_size", "against", "outputs",
    ),
    "Gates": (
        "include", "exclude", "keep", "branches", "no_branches", "uniform", "loadable_by",
        "keep_class", "kind", "score", "open_probability", "jitter", "learn", "gate_lr", "start",
        "penalty", "elements",
    ),
    "Budget": ("faster", "budget", "lam", "latency", "round_to", "target", "measures", "counting"),
    "Training": (
        "epochs", "lr", "optimizer", "settle", "distill", "compact", "resume",
    ),
    "Machine": (
        "device", "autocast", "accumulate", "checkpointing", "compile", "channels_last",
        "distributed", "threads",
    ),
    "Output": (
        "onnx", "pt2", "pte", "tflite", "state", "pretrained", "code", "vllm", "write", "opset",
        "external_data", "timed", "html", "run",
        "out", "report", "json",
    ),
    "Other": (),
}  # fmt: skip
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names} | {
    name: group for group, each in behind("options") for name in each.options[group]
}
# Options that --help shows, by command; a command that is not here shows all.
_MOST_USED = {
    "survey": ("weights", "input", "data", "html"),
    "gate": ("weights", "input", "data", "keep", "no_branches", "out"),
    "fit": ("data", "faster", "budget", "score", "out"),
    "finetune": ("data", "faster", "budget", "epochs", "batch_size", "lr"),
    "export": ("onnx", "pretrained", "data", "out"),
    "evaluate": ("weights", "data", "loss", "metric", "against"),
}  # fmt: skip
for _name, _each in behind("most_used"):
    _MOST_USED[_name] = (*_MOST_USED.get(_name, ()), *_each.most_used[_name])
_ALL = "--help-all"


class GroupedCommand(TyperCommand):
    """Command whose help has groups of options, and examples."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        text, _, self.examples = inspect.cleandoc(kwargs.pop("help", "") or "").partition(_EXAMPLES)
        super().__init__(*args, help=text, **kwargs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, on which --help-all is --help with all options."""
        ctx.meta[_ALL] = _ALL in args
        return super().parse_args(ctx, ["--help"] if ctx.meta[_ALL] else args)

    def invoke(self, ctx: Any) -> Any:
        """Check the arguments while torch is not loaded, and call the command."""
        early.check(ctx.info_name, ctx.params)
        with loading_shown():
            return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then each non-empty group of options."""
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in ("Arguments", *_GROUPS)}
        shown = None if ctx.meta.get(_ALL) else _MOST_USED.get(self.name or "")
        for each in self.get_params(ctx):
            is_argument = each.param_type_name == "argument"
            if shown and not is_argument and each.name not in (*shown, "help"):
                continue
            if (row := each.get_help_record(ctx)) is not None:
                group = "Arguments" if is_argument else _GROUP_OF.get(each.name or "", "Other")
                flags = row[0].replace("<list[str]>", "<str> …")
                text = re.sub(r"\s*\[default: (.*)\]$", r" [\1]", row[1])
                rows.setdefault(group, []).append((flags, text))
        if shown:
            rows["Other"].append((_ALL, "Show all options and exit."))
        for group, found in rows.items():
            if found:
                with formatter.section(group):
                    formatter.write_dl(found)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, one per line."""
        if self.examples:
            with formatter.section("Examples"):
                for line in inspect.cleandoc(self.examples).splitlines():
                    formatter.write(f"{' ' * formatter.current_indent}{line}\n")
