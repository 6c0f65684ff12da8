"""ONNX Runtime on the CPU."""

from __future__ import annotations

from typing import Any

_ERRORS_ALONE = 3  # of its log


def session_of(content: bytes | str, *, optimizes: bool = True, log: int = _ERRORS_ALONE) -> Any:
    """Load an ONNX model, its bytes or the path of its file, into ONNX Runtime.

    Args:
        content: bytes or path.
        optimizes: False to compute the model as it stands.
        log: the least severity of what it logs; 4 for nothing but what is fatal.
    """
    import onnxruntime  # here, since only who runs a file need wait for it to load

    options = onnxruntime.SessionOptions()
    options.log_severity_level = log
    if not optimizes:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
