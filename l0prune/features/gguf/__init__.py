"""Files for llama.cpp: ``small.save("small.gguf")``, ``gate(…, loadable_by="gguf")``."""

from l0prune.doors import Feature

FEATURE = Feature(
    __name__,
    needs=("loadable",),
    names={"save_gguf": "file"},
    writers={".gguf": "file"},
    programs={"gguf": "program"},
)
