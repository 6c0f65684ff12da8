"""ONNX files in float16 and bfloat16: ``save_onnx(path, dtype="float16")``."""

from l0prune.doors import Feature

FEATURE = Feature(
    __name__,
    more={"export": "options"},
    options={"Output": ("dtype", "half_io")},
    derived={"dtype": "file", "half_io": "file"},
)
