"""Features: a folder each with all about it, which the core finds by ``l0prune.doors``."""
