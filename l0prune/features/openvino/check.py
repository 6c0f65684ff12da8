"""Check of ONNX files in OpenVINO, where that is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from l0prune.errors import first_line, warn
from l0prune.exporting.certify.certificate import Check, compare_file
from l0prune.exporting.pieces import ExportedPart
from l0prune.exporting.state import Carrying
from l0prune.progress.stages import stage


def openvino(path: Path, piece: ExportedPart) -> list[Check]:
    """Run a file in OpenVINO if installed; return the checks that agree with the gated model.

    Failures and differences only give a warning: ONNX Runtime has shown by then that the file is
    right.
    """
    if find_spec("openvino") is None:
        return []
    try:
        with stage("trying the ONNX file in OpenVINO"):
            run = Carrying(_OpenVino(path), piece.state)
            checks = compare_file("openvino", piece.answers[:1], run, piece.path, piece.read)
    except Exception as error:  # of OpenVINO's classes
        warn(f"OpenVINO, which is installed here, cannot run this file: {first_line(error)}")
        return []
    for check in checks:
        if not check.passed:
            warn(
                "OpenVINO, which is installed here, computes something else from this file: it "
                f"differs by {check.error:.1e} of the output, where {check.tolerance:.0e} is "
                "rounding. ONNX Runtime computes what the model does"
            )
    return [check for check in checks if check.passed]


class _OpenVino:
    """A file in OpenVINO on the CPU, in float32."""

    def __init__(self, path: Path) -> None:
        import openvino

        settings = {"INFERENCE_PRECISION_HINT": "f32"}
        self._run = openvino.Core().compile_model(str(path), "CPU", settings)

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        found = self._run([each.numpy() for each in inputs])
        return [torch.from_numpy(np.array(found[number])) for number in range(len(found))]
