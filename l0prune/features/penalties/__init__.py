"""Penalties on weights, in the place of gates that learn: ``finetune(model, data, penalty=…)``."""

from l0prune.doors import Feature

FEATURE = Feature(
    __name__,
    functions={"penalty_of": "elements", "shrinkage_of": "shrinkage", "gsm_defaults": "gsm"},
)
