"""Files for llama.cpp: ``small.save("small.gguf")``, ``l0prune.save_gguf(small, path)``."""

from l0prune.doors import Feature

FEATURE = Feature(__name__, names={"save_gguf": "file"})
