"""Capture: a model as a graph of ATen operators, by torch.export; checks, copies."""
