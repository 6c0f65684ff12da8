"""Inference of axes: which dimensions of which tensors live or die together."""
