"""Programs for phones: ExecuTorch (``.pte``) and LiteRT (``.tflite``), and times on them."""

from l0prune.doors import Feature

FEATURE = Feature(
    __name__,
    needs=("latency",),
    formats={".pte": "formats", ".tflite": "formats"},
    runtimes={"executorch": "runtimes", "litert": "runtimes"},
)
