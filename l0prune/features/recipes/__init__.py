"""Recipes: whole runs in one file, ``l0prune run`` and ``l0prune recipes``."""

from l0prune.doors import Feature

FEATURE = Feature(
    __name__,
    commands={"run": "command", "recipes": "command"},
    options={"Output": ("folder",)},
)
