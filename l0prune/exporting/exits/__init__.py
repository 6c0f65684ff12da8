"""Early exits of an export: thresholds, and ONNX files that skip what need not be computed."""
