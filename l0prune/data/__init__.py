"""Data sources: what a model is trained and tested on."""

from l0prune.data.dataset import Data, Loaded, Split, Tensors

__all__ = ["Data", "Loaded", "Split", "Tensors"]
