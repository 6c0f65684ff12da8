"""Reduction of a model's vocabulary: fewer rows of embeddings, and fewer logits."""
