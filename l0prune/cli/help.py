"""Layout of ``--help``: description of a command, its options in groups, examples."""

from __future__ import annotations

import inspect
import re
from typing import Any

from typer.core import TyperCommand

from l0prune.doors import behind

_EXAMPLES = "\n\nExamples:\n"  # heading in a command's docstring; a line for each example follows
# Options of each group, by parameter name; the last group has all others. Features add theirs.
_GROUPS = {
    "Model and data": (
        "model_option", "weights", "input", "dynamic", "data", "data_root", "batches", "loss",
        "metric", "augment", "batch_size", "against",
    ),
    "Gates": (
        "include", "exclude", "keep", "branches", "no_branches", "uniform", "loadable_by",
        "keep_class", "kind", "score", "open_probability", "jitter", "learn", "gate_lr", "start",
        "input_gates", "penalty", "elements",
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
        "onnx", "pt2", "pte", "tflite", "state", "pretrained", "code", "vllm", "opset",
        "external_data", "int8", "dtype", "half_io", "exits", "timed", "html", "run",
        "skipping", "out", "report", "json",
    ),
    "Other": (),
}  # fmt: skip
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names} | {
    name: group for group, each in behind("options") for name in each.options[group]
}


class GroupedCommand(TyperCommand):
    """Command whose help has groups of options, and examples."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        text, _, self.examples = inspect.cleandoc(kwargs.pop("help", "") or "").partition(_EXAMPLES)
        super().__init__(*args, help=text, **kwargs)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then each non-empty group of options."""
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in ("Arguments", *_GROUPS)}
        for each in self.get_params(ctx):
            if (row := each.get_help_record(ctx)) is not None:
                is_argument = each.param_type_name == "argument"
                group = "Arguments" if is_argument else _GROUP_OF.get(each.name or "", "Other")
                flags = row[0].replace("<list[str]>", "<str> …")
                text = re.sub(r"\s*\[default: (.*)\]$", r" [\1]", row[1])
                rows[group].append((flags, text))
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
