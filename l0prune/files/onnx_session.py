"""Sessions of ONNX Runtime on the CPU."""

from __future__ import annotations

from typing import Any

_ERRORS_ALONE = 3  # severity of its log


def session_of(content: bytes | str, *, optimizes: bool = True, log: int = _ERRORS_ALONE) -> Any:
    """Load an ONNX model, its bytes or the path of its file, into ONNX Runtime.

    Args:
        content: bytes or path.
        optimizes: False to disable graph optimization.
        log: the lowest severity that is logged; 4 for fatal errors only.
    """
    import onnxruntime  # here, since it loads slowly, and only running a file needs it

    options = onnxruntime.SessionOptions()
    options.log_severity_level = log
    if not optimizes:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
