"""Programs for phones: ExecuTorch and LiteRT."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from l0prune.capture.compat import pytree
from l0prune.capture.sizes import Inputs
from l0prune.exporting.programs import FORMATS, Run


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


class ExecuTorch:
    """Programs of ExecuTorch, with the operators that XNNPACK supports delegated to it."""

    name = "executorch"
    label = "ExecuTorch"
    packages = ("executorch",)

    def version(self) -> str:
        """See ``Format``."""
        return str(import_module("executorch.version").__version__)

    def made(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """See ``Format``."""
        lower = import_module("executorch.exir").to_edge_transform_and_lower
        xnnpack = import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
        with torch.no_grad():
            exported = torch.export.export(network, args, kwargs)
        lowered = lower(exported, partitioner=[xnnpack.XnnpackPartitioner()])
        return bytes(lowered.to_executorch().buffer)

    def loaded(self, content: bytes, threads: int) -> Run:
        """See ``Format``."""
        bindings = import_module("executorch.extension.pybindings.portable_lib")
        bindings._unsafe_reset_threadpool(threads)
        program = import_module("executorch.runtime").Runtime.get().load_program(content)
        method = program.load_method("forward")

        def run(inputs: Inputs) -> list[Tensor]:
            assert program is not None  # captured, since it has to outlive its method
            return _tensors(method.execute([each.contiguous() for each in _tensors(inputs)]))

        return run


class LiteRt:
    """Programs of LiteRT, which was called TensorFlow Lite."""

    name = "litert"
    label = "LiteRT"
    packages = ("litert_torch", "ai_edge_litert")

    def version(self) -> str:
        """See ``Format``."""
        return str(import_module("importlib.metadata").version("ai-edge-litert"))

    def made(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """See ``Format``."""
        made = import_module("litert_torch").convert(network, args, kwargs or None)
        return bytes(made.model_content())

    def loaded(self, content: bytes, threads: int) -> Run:
        """See ``Format``."""
        kind = import_module("ai_edge_litert.interpreter").Interpreter
        interpreter = kind(model_content=content, num_threads=threads)
        runner = interpreter.get_signature_runner()
        # Names of outputs are sorted, those of a mapping are its keys.
        places = [each["index"] for each in interpreter.get_output_details()]
        taken, details = runner.get_input_details(), runner.get_output_details()
        names = sorted(details, key=lambda name: places.index(details[name]["index"]))

        def run(inputs: Inputs) -> list[Tensor]:
            args, kwargs = inputs
            named = {f"args_{number}": value for number, value in enumerate(args)} | kwargs
            # Whole numbers of 64 bits become such of 32.
            arrays = {n: value.numpy().astype(taken[n]["dtype"]) for n, value in named.items()}
            found = runner(**arrays)
            return [torch.from_numpy(np.asarray(found[name])) for name in names]

        return run


FORMATS[".pte"] = ExecuTorch()
FORMATS[".tflite"] = LiteRt()
