"""Lists in which a module keeps its own parameters: gated to read, plain to keep.

``nn.LSTM`` and its like hand their weights to torch in one list, which they make anew whenever a
weight is another tensor than before. With gates it is, in each forward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn


class KeptList:
    """One such list.

    Attributes:
        names: for each entry the name of the parameter that it is; None where it is none.
        given: the list that the module has put there itself, of gated tensors; never copied or
            saved, since those belong to one forward.
    """

    def __init__(self, names: Sequence[str | None]) -> None:
        self.names = tuple(names)
        self.given: list[Any] | None = None

    def __getstate__(self) -> Mapping[str, Any]:
        return {"names": self.names, "given": None}

    def plain(self, module: nn.Module, values: Sequence[Any]) -> list[Any]:
        """The list as the module keeps it: parameters in the place of what was made of them."""
        if len(values) != len(self.names):
            return list(values)
        pairs = zip(self.names, values, strict=True)
        return [value if name is None else module._parameters[name] for name, value in pairs]


def kept_lists(module: nn.Module, names: Collection[str]) -> dict[str, KeptList]:
    """Return the module's lists that hold one of its parameters of these names, by attribute."""
    known = {id(parameter): name for name, parameter in module._parameters.items()}
    found = {}
    for attribute, value in vars(module).items():
        if type(value) is list and any(isinstance(entry, Tensor) for entry in value):
            entries = [known.get(id(entry)) for entry in value]
            if any(name in names for name in entries):
                found[attribute] = KeptList(entries)
    return found
