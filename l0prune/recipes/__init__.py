"""Recipes: one TOML file that says how to get from data to a small ONNX file, and its run."""
