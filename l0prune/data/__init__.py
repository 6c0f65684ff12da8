"""Data sources: what a model is trained and tested on."""

from l0prune.data.dataset import Data, Loaded, Split, Tensors
from l0prune.data.sources import load_data

__all__ = ["Data", "Loaded", "Split", "Tensors", "load_data"]
