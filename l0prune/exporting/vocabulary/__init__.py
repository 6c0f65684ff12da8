"""A model whose vocabulary is cut: fewer rows for ids that come in, fewer logits that go out."""
