"""A guess of a model's example inputs, for commands that are given none."""

from l0prune.doors import Feature

FEATURE = Feature(__name__, functions={"guess_example": "guess"})
