"""Inference of axes: which dimensions of which tensors live or die together."""

from l0prune.axes.build import Analysis, analyse

__all__ = ["Analysis", "analyse"]
