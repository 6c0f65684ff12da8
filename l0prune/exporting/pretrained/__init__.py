"""A smaller model as a folder that can be loaded, by l0prune and by transformers."""
