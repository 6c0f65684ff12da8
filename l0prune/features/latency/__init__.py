"""Milliseconds: tables of the times of a network at any widths, and budgets in them."""

from l0prune.doors import Feature

_RUNTIMES = ("onnxruntime", "onnxruntime-int8", "eager", "compile", "cuda-graph", "torch-cuda-bf16")

FEATURE = Feature(
    __name__,
    names={"LatencyTable": "table", "measure": "measure"},
    commands={"measure": "command"},
    most_used={"measure": ("runtime", "threads", "batch", "out")},
    options={
        "Machine": ("batch", "runtime", "provider", "samples", "results"),
        "Output": ("bundle",),
    },
    functions={
        "latency_table": "measure",
        "known_table": "measure",
        "width_times": "width_probe",
        "add_time": "report",
        "table_of_files": "command",
    },
    runtimes=dict.fromkeys(_RUNTIMES, "runtimes"),
)
