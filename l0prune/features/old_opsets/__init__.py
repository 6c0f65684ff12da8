"""ONNX files of opsets from 7 to 17: ``save_onnx(path, opset=13)``, ``l0prune export --opset``."""

from l0prune.doors import Feature

FEATURE = Feature(__name__, functions={"of_older_opset": "translation"})
