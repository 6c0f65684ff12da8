"""What a forward writes into its modules' attributes, which tracing would leave there.

Detectors keep the anchors of the last size that they saw, attention its last mask. Traced, such a
tensor is a fake one without values, and the next call of the user's model would find it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from l0prune.capture.any_size import AnySize
from l0prune.capture.quiet import alone
from l0prune.capture.recurrent import as_torchs_own
from l0prune.capture.transforms import write_out_transforms

_CONTAINERS = (dict, list, set)


def exported(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
) -> ExportedProgram:
    """``torch.export.export`` for any size, after which the module holds what it held before.

    The program has no transforms of torch.func, but what they amount to.

    Raises:
        CaptureError: the program would not compute what the module does.
    """
    with alone():
        with as_it_was(module), AnySize():
            program = torch.export.export(module, args, kwargs, **options)
        as_torchs_own(program)
        write_out_transforms(program)
    return program


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Afterwards every attribute of every module, and every plain container, holds the same."""
    before = [(vars(module), _held(module)) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, held in before:
            for name in attributes.keys() - held.keys():
                del attributes[name]
            for name, (value, contents) in held.items():
                attributes[name] = value
                if type(value) in _CONTAINERS and _items(value) != _items(contents):
                    value.clear()
                    (value.extend if isinstance(value, list) else value.update)(contents)


def _held(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each attribute's value, and of a container a copy."""
    return {
        name: (value, value.copy() if type(value) in _CONTAINERS else None)
        for name, value in vars(module).items()
    }


def _items(container: Any) -> list[Hashable]:
    """What tells two containers apart; tensors are compared by who they are."""
    if isinstance(container, dict):
        return [(key, id(value)) for key, value in container.items()]
    return [id(value) for value in container]
