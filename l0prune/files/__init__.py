"""Files: written whole, read as if somebody hostile had made them; models and user code by name."""
