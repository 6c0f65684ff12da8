"""The survey and its tables."""
