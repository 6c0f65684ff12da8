"""ONNX files: translation, fewer bits, comparison and timing."""
