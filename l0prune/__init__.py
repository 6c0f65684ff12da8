"""Learned L0 gates for any PyTorch network, cut into a smaller one that computes the same.

Names are loaded when they are first used: ``import l0prune`` itself costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from l0prune.data.dataset import Data
    from l0prune.exporting.certify.certificate import Certificate
    from l0prune.exporting.export import export
    from l0prune.exporting.result import Export
    from l0prune.features.exits.adding import add_exits
    from l0prune.features.exits.early_exits import EarlyExits, choose_exits
    from l0prune.features.experts.cut import shrink_experts
    from l0prune.features.experts.result import FewerExperts
    from l0prune.features.input_gates.adding import add_input_gates
    from l0prune.features.input_gates.macs import InputMacs, input_macs
    from l0prune.features.input_gates.network import input_penalty
    from l0prune.features.input_gates.skip_file import save_skipping
    from l0prune.features.latency.measure import measure
    from l0prune.features.latency.table import LatencyTable
    from l0prune.features.unlabelled.compensate import Compensation, compensate
    from l0prune.features.unlabelled.shrink import shrink
    from l0prune.features.vocabulary.cut import shrink_vocabulary
    from l0prune.features.vocabulary.result import SmallerVocabulary
    from l0prune.files.artifact import load, read_info, save
    from l0prune.files.model_sources import load_model
    from l0prune.files.smaller_model import from_pretrained, resize
    from l0prune.gating.bank import Gates
    from l0prune.gating.gate import gate, gates, ungate
    from l0prune.gating.kinds import distributions
    from l0prune.gating.kinds.base import Gate
    from l0prune.gating.kinds.binary_concrete import BinaryConcrete
    from l0prune.gating.kinds.continuous_sparsification import ContinuousSparsification
    from l0prune.gating.kinds.hard_concrete import HardConcrete
    from l0prune.plan import measures
    from l0prune.plan.measures import Measure
    from l0prune.report.live import finetune, train_dense
    from l0prune.report.report import Report
    from l0prune.report.survey import Survey, survey
    from l0prune.running.evaluate import evaluate
    from l0prune.running.sources import load_data, with_pseudo_labels
    from l0prune.running.task import Task
    from l0prune.selection import scores
    from l0prune.selection.fit import fit
    from l0prune.selection.scores import score
    from l0prune.training.budget import Budget
    from l0prune.training.history import History
    from l0prune.training.penalty import param_groups, penalty
    from l0prune.training.pruner import Pruner
    from l0prune.training.settings import Settings

__version__ = "0.1.0"

_HOMES = {
    "BinaryConcrete": "gating.kinds.binary_concrete",
    "Budget": "training.budget",
    "Certificate": "exporting.certify.certificate",
    "ContinuousSparsification": "gating.kinds.continuous_sparsification",
    "Data": "data.dataset",
    "Export": "exporting.result",
    "Gate": "gating.kinds.base",
    "Gates": "gating.bank",
    "HardConcrete": "gating.kinds.hard_concrete",
    "History": "training.history",
    "Measure": "plan.measures",
    "Pruner": "training.pruner",
    "Report": "report.report",
    "Settings": "training.settings",
    "Survey": "report.survey",
    "Task": "running.task",
    "distributions": "gating.kinds",
    "evaluate": "running.evaluate",
    "export": "exporting.export",
    "finetune": "report.live",
    "fit": "selection.fit",
    "from_pretrained": "files.smaller_model",
    "gate": "gating.gate",
    "gates": "gating.gate",
    "load": "files.artifact",
    "load_data": "running.sources",
    "load_model": "files.model_sources",
    "measures": "plan",
    "param_groups": "training.penalty",
    "penalty": "training.penalty",
    "read_info": "files.artifact",
    "resize": "files.smaller_model",
    "save": "files.artifact",
    "score": "selection.scores",
    "scores": "selection",
    "survey": "report.survey",
    "train_dense": "report.live",
    "ungate": "gating.gate",
    "with_pseudo_labels": "running.sources",
}

__all__ = [
    "BinaryConcrete",
    "Budget",
    "Certificate",
    "Compensation",
    "ContinuousSparsification",
    "Data",
    "EarlyExits",
    "Export",
    "FewerExperts",
    "Gate",
    "Gates",
    "HardConcrete",
    "History",
    "InputMacs",
    "LatencyTable",
    "Measure",
    "Pruner",
    "Report",
    "Settings",
    "SmallerVocabulary",
    "Survey",
    "Task",
    "__version__",
    "add_exits",
    "add_input_gates",
    "choose_exits",
    "compensate",
    "distributions",
    "evaluate",
    "export",
    "finetune",
    "fit",
    "from_pretrained",
    "gate",
    "gates",
    "input_macs",
    "input_penalty",
    "load",
    "load_data",
    "load_model",
    "measure",
    "measures",
    "param_groups",
    "penalty",
    "read_info",
    "resize",
    "save",
    "save_skipping",
    "score",
    "scores",
    "shrink",
    "shrink_experts",
    "shrink_vocabulary",
    "survey",
    "train_dense",
    "ungate",
    "with_pseudo_labels",
]


if not TYPE_CHECKING:  # mypy is to know which names there are

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            globals()[name] = value = _of_a_feature(name)
            return value
        home = import_module(f"l0prune.{_HOMES[name]}")
        value = getattr(home, name, None)
        if value is None:  # a module rather than a name in one
            value = import_module(f"{home.__name__}.{name}")
        globals()[name] = value
        return value


def _of_a_feature(name: str) -> Any:
    """Return a public name that a feature declares."""
    from l0prune.doors import feature_with, missing

    no_name = f"module 'l0prune' has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(no_name)
    feature = feature_with("names", name)
    if feature is None:
        why = missing(name)
        raise AttributeError(f"{no_name}: {why}" if why else no_name)
    return feature.load("names", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
