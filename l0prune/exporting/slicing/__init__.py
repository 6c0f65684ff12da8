"""Slicing of tensors and captured graphs to the new sizes that the gates leave."""
