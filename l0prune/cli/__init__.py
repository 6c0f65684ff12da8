"""The command line: l0prune survey, gate, finetune, export, run, recipes."""

from l0prune.cli.app import main

__all__ = ["main"]
