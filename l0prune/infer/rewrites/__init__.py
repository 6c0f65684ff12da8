"""The captured graph at the sizes that are left: one rewrite per operator, and without branches."""
