"""Learned L0 gates for any PyTorch network, cut into a smaller one that gives the same answers."""

from l0prune.artifact import load, read_info, save
from l0prune.budget import Budget
from l0prune.data import Data, load_data
from l0prune.export import Certificate, Export, export
from l0prune.finetune import History, Task, evaluate, finetune, train_dense
from l0prune.fit import fit
from l0prune.gates import BinaryConcrete, ContinuousSparsification, HardConcrete
from l0prune.gating import gate, gates, ungate
from l0prune.models import load_model
from l0prune.objective import param_groups, penalty
from l0prune.scores import score
from l0prune.survey import Survey, survey

__all__ = [
    "BinaryConcrete",
    "Budget",
    "Certificate",
    "ContinuousSparsification",
    "Data",
    "Export",
    "HardConcrete",
    "History",
    "Survey",
    "Task",
    "evaluate",
    "export",
    "finetune",
    "fit",
    "gate",
    "gates",
    "load",
    "load_data",
    "load_model",
    "param_groups",
    "penalty",
    "read_info",
    "save",
    "score",
    "survey",
    "train_dense",
    "ungate",
]
