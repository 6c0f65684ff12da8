"""OpenVINO: a runtime that networks are timed on, and where installed a check of ONNX files."""

from l0prune.doors import Feature

FEATURE = Feature(
    __name__,
    needs=("latency",),
    runtimes={"openvino": "runtime", "openvino-int8": "runtime"},
    file_checks={"openvino": "check"},
)
