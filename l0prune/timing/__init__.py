"""Milliseconds: what a network of any widths takes on a runtime, and how that is found out."""
