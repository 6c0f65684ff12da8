"""Training: weights and gates learn together, by a loop for those who have none."""

from l0prune.finetune.evaluate import evaluate
from l0prune.finetune.history import History
from l0prune.finetune.interrupt import Interrupted
from l0prune.finetune.run import finetune, train_dense
from l0prune.finetune.settings import Settings
from l0prune.finetune.task import Task, cross_entropy, error_rate
from l0prune.finetune.world import StoppedElsewhere

__all__ = [
    "History",
    "Interrupted",
    "Settings",
    "StoppedElsewhere",
    "Task",
    "cross_entropy",
    "error_rate",
    "evaluate",
    "finetune",
    "train_dense",
]
