"""Gates: how a slot's parameter becomes its multiplier, and the one bank that a model carries."""

from l0prune.gates.bank import GateAxis, Gates
from l0prune.gates.binary_concrete import BinaryConcrete
from l0prune.gates.continuous_sparsification import ContinuousSparsification
from l0prune.gates.gate import Gate, gate_from_dict, gate_of, gate_to_dict, register
from l0prune.gates.hard_concrete import HardConcrete

__all__ = [
    "BinaryConcrete",
    "ContinuousSparsification",
    "Gate",
    "GateAxis",
    "Gates",
    "HardConcrete",
    "gate_from_dict",
    "gate_of",
    "gate_to_dict",
    "register",
]
