"""Objective of the gates: the penalty with its terms, and budgets as constraints."""
