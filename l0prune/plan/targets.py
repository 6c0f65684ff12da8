"""Names of the runtimes that a network can be made for; ``timing/runtimes.py`` runs them."""

from __future__ import annotations

from l0prune.errors import UsageError, meant

TARGET = "onnxruntime"  # where nothing else is said
TARGETS = (
    TARGET,
    "onnxruntime-int8",
    "openvino",
    "openvino-int8",
    "eager",
    "compile",
    "executorch",
    "litert",
    "cuda-graph",
    "torch-cuda-bf16",
)


def check_target(name: str) -> str:
    """Return the name of a runtime; raise UsageError if there is none of this name."""
    if name not in TARGETS:
        raise UsageError(
            f"target is one of {', '.join(TARGETS)}, not {name!r}{meant(name, TARGETS)}"
        )
    return name
