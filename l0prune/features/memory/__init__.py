"""Budgets in bytes: stored tensors, the cache of keys and values, and activations."""

from l0prune.doors import Feature

BYTES = {
    "B": 1.0,
    **{f"{k}B": 1e3**n for n, k in enumerate("kMGT", 1)},
    **{f"{k}iB": 1024.0**n for n, k in enumerate("KMGT", 1)},
}

FEATURE = Feature(__name__, measures={"memory": "memory"}, units={"memory": BYTES})
