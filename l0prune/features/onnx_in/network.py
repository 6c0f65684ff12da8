"""Networks converted from ONNX graphs: the steps of the graph, on layers of torch.nn."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.features.onnx_in.operators import Host, numbers, tensor
from l0prune.files.source_file import SourceFile


@dataclass(frozen=True)
class Step:
    """Node of the graph: an ``operation`` on values, by their names in the file.

    Attributes:
        operation: a function, or the path of a submodule.
        inputs, outputs: names; empty for those that are left out.
        takes_lists: whether the operation takes lists of sizes as lists, and not as tensors.
        label: operator and node, for messages.
    """

    operation: Callable[..., Any] | str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    label: str
    takes_lists: bool = False


class OnnxNetwork(nn.Module):
    """Network that computes the graph of an ONNX file.

    Its forward takes the file's inputs, by their names where Python allows them, and returns its
    output, or a tuple of several.

    Attributes:
        origin: the file.
        example_input_array: inputs of the shapes that the file declares.
        fixed_batch: the one batch size that the graph is for; 0 where the batch is free.
        free: names of the sizes beside the batch that the file leaves free, by input and dim.
        declared: the sizes beside the batch that the file declares, by input and dim.
    """

    origin: SourceFile
    example_input_array: tuple[Tensor, ...] = ()
    fixed_batch: int = 0

    def __init__(self, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        super().__init__()
        self._inputs, self._outputs = inputs, outputs
        self.free: dict[str, dict[int, str]] = {}
        self.declared: dict[str, dict[int, int]] = {}
        self._steps: list[Step] = []
        self._hosts: dict[str, Host] = {}
        self._places: dict[str, tuple[str, str]] = {}

    def computed(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for these inputs."""
        names = dict(zip(map(identifier, self._inputs), self._inputs, strict=True))
        values = dict(zip(self._inputs, args, strict=False))
        given = [each for each in (*args, *kwargs.values()) if each.ndim]
        if self.fixed_batch and any(len(each) != self.fixed_batch for each in given):
            raise UsageError(
                f"{self.origin.file} is for batches of {self.fixed_batch}: its graph has that "
                "number in it. Export the model anew with a free batch size, or give batches of "
                f"{self.fixed_batch}: batch_size={self.fixed_batch}, --batch-size "
                f"{self.fixed_batch}"
            )
        values |= {names[name]: value for name, value in kwargs.items()}
        self._check_repeated(values)
        last = {name: n for n, step in enumerate(self._steps) for name in step.inputs}
        for number, step in enumerate(self._steps):
            try:
                found = self._called(step, [self._value(name, values) for name in step.inputs])
            except Exception as error:
                error.add_note(f"{step.label} of {self.origin.file}")
                raise
            several = found if isinstance(found, tuple | list) else (found,)
            values.update(zip(step.outputs, several, strict=False))
            for name in step.inputs:
                if last[name] == number and name not in self._outputs:
                    values.pop(name, None)
        results = tuple(tensor(self._value(name, values)) for name in self._outputs)
        return results[0] if len(results) == 1 else results

    def _check_repeated(self, values: dict[str, Any]) -> None:
        """Refuse a size of 1 where the file declares more: an operator might repeat it in silence.

        Other sizes than the declared ones may be meant (larger images), or fail in an operator.
        """
        for name, sizes in self.declared.items():
            shape = values[name].shape if name in values else ()
            for dim, size in sizes.items():
                if dim < len(shape) and shape[dim] == 1 != size:
                    raise UsageError(
                        f"{self.origin.file} declares {size} for dim {dim} of {name}, and the 1 "
                        "that was given would be repeated"
                    )

    def _value(self, name: str, values: dict[str, Any]) -> Any:
        if not name:
            return None
        if name in values:
            return values[name]
        if name in self._hosts:
            return self._hosts[name]
        path, leaf = self._places[name]
        return getattr(self.get_submodule(path), leaf)

    def _called(self, step: Step, given: list[Any]) -> Any:
        if not isinstance(step.operation, str):
            return step.operation(*given)
        like = next((each for each in given if isinstance(each, Tensor)), None)
        given = [_plain(each, like, step.takes_lists) for each in given]
        return self.get_submodule(step.operation)(*given)


def _plain(value: Any, like: Tensor | None, as_list: bool) -> Any:
    """Convert a list of sizes to a module's argument: a list, a number or a tensor."""
    if not isinstance(value, np.ndarray):
        return value
    if value.ndim == 1 and as_list:
        return numbers(value)
    return numbers(value)[0] if value.size == 1 else tensor(value, like)


def class_of(inputs: Sequence[str]) -> type[OnnxNetwork]:
    """Return a subclass of OnnxNetwork whose forward has these inputs as parameters."""

    def forward(self: OnnxNetwork, *args: Any, **kwargs: Any) -> Any:
        return self.computed(*args, **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ["self", *map(identifier, inputs)]
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return type("OnnxNetwork", (OnnxNetwork,), {"forward": forward})


def identifier(name: str) -> str:
    """Convert a name to a valid name of a Python parameter."""
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    return plain if plain.isidentifier() and plain not in ("self", "None") else f"input_{plain}"
