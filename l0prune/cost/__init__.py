"""Costs in params and MACs: dense, actual, and expected under gates; what a budget may ask."""
