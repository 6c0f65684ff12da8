"""Budgets in bytes: stored tensors, the cache of keys and values, and activations."""

from l0prune.doors import Feature

FEATURE = Feature(__name__, measures={"memory": "memory"})
