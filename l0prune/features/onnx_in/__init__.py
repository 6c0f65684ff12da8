"""ONNX files as models: read, compared with ONNX Runtime, and gated as any other."""

from l0prune.doors import Feature

FEATURE = Feature(__name__, sources={".onnx": "source"})
