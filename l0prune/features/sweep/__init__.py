"""Runs of a recipe with all combinations of some settings, side by side: ``l0prune sweep``."""

from l0prune.doors import Feature

FEATURE = Feature(
    __name__,
    needs=("recipes",),
    commands={"sweep": "command"},
    most_used={"sweep": ("sweeps", "budget", "seed", "jobs", "folder")},
    options={"Training": ("sweeps",), "Machine": ("jobs", "where", "job"), "Output": ("folder",)},
    launchers={"processes": "launchers", "submitit": "launchers", "ray": "launchers"},
)
