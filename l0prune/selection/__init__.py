"""Choice of slots: one-shot scores, and the fit that meets a budget."""
