"""Learned L0 gates for any PyTorch network, cut into a smaller model that gives the same answers."""

from l0prune.artifact import load, read_info, save
from l0prune.gates import HardConcrete
from l0prune.gating import gate, gates, ungate
from l0prune.survey import Survey, survey

__all__ = ["HardConcrete", "Survey", "gate", "gates", "load", "read_info", "save", "survey", "ungate"]
