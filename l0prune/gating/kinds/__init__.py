"""The kinds of gates: how a slot's parameter becomes its multiplier."""

from l0prune.gating.kinds import (  # noqa: F401
    binary_concrete,
    continuous_sparsification,
    hard_concrete,
)
