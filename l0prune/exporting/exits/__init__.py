"""Early exits of an export: when each answers, and one file that computes no further."""
