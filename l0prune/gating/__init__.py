"""Gates: put on a model in place and taken off, the bank, and the kinds of gates."""
