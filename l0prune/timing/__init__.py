"""Latency of a network at any widths on a runtime: its measurement and its model."""
