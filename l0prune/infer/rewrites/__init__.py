"""Rewrites of the captured graph for the cut sizes, one per operator, and without branches."""
