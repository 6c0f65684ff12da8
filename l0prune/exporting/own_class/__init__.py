"""The user's own class at the new sizes, where it is shown to be right."""
