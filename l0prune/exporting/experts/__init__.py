"""Removal of experts from mixtures of experts."""
