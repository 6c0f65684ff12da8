"""What gates are learned under: the penalty and its terms, and budgets as constraints."""
