"""The ONNX file: made, run and written."""
