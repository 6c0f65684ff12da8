"""Which slots stay: one-shot scores, and the choice that meets a budget."""
