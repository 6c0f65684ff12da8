"""Data sources for training and testing a model."""

from l0prune.data.dataset import Data, Loaded, Split, Tensors

__all__ = ["Data", "Loaded", "Split", "Tensors"]
