"""Eight bits: ONNX files, training for them, and bits that are learned (``quantize=``)."""

from l0prune.doors import Feature

FEATURE = Feature(
    __name__,
    more={"export": "options", "shrink": "options"},
    options={"Output": ("int8", "compensate_rounding", "fastest", "int8_tolerance")},
    most_used={"export": ("int8",)},
    derived=dict.fromkeys(("int8", "compensate", "fastest", "tolerance", "judge"), "file"),
    functions={
        "Quantizing": "training",
        "check_menu": "bits",
        "int8_for_times": "quantizer",
        "rounded_again": "learned_bits",
    },
)
