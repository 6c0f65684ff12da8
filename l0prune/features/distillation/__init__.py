"""Distillation: learning from the network as it was before: ``finetune(…, distill=0.5)``."""

from l0prune.doors import Feature

FEATURE = Feature(__name__, functions={"taught": "teacher"})
