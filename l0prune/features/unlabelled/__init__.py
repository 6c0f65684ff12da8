"""Smaller networks from inputs without labels: ``shrink``, ``compensate``, ``fit(compensate=)``."""

from l0prune.doors import Feature

FEATURE = Feature(
    __name__,
    names={"Compensation": "compensate", "compensate": "compensate", "shrink": "shrink"},
    commands={"shrink": "command"},
    most_used={"shrink": ("data", "faster", "budget", "tolerance", "recover", "out")},
    options={"Machine": ("samples",), "Budget": ("tolerance", "measure", "recover")},
    functions={"fit_compensated": "fitting"},
)
