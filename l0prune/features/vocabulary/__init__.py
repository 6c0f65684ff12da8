"""Smaller vocabularies: ``l0prune.shrink_vocabulary`` and ``l0prune vocabulary``."""

from l0prune.doors import Feature

FEATURE = Feature(
    __name__,
    names={"SmallerVocabulary": "result", "shrink_vocabulary": "cut"},
    commands={"vocabulary": "command"},
    most_used={"vocabulary": ("text", "size", "tokenizer", "out")},
)
