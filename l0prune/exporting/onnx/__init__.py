"""ONNX files: translation, comparison and timing."""
