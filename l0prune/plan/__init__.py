"""Plain data: layouts, axes and plans, globs over axis names. No tensors of a model."""
