"""Names that torch cannot write into code: those of modules called as Python's keywords are.

``nn.ModuleDict({"in": …})`` is a model like any other, but the code that torch makes of its graph
would say ``self.in.weight``. In a captured program such a module is called ``in_``.
"""

from __future__ import annotations

from dataclasses import replace
from keyword import iskeyword
from typing import Any

from torch.export import ExportedProgram


def respell(program: ExportedProgram) -> dict[str, str]:
    """Call the program's tensors by names that code can say, in place.

    Returns:
        By each name that is new, the model's own.
    """
    signature = program.graph_signature
    targets = {spec.target for spec in signature.input_specs if spec.target}
    tail = "_"
    while any(_speakable(old, tail) in targets - {old} for old in targets):
        tail += "_"
    new = {old: _speakable(old, tail) for old in targets if _speakable(old, tail) != old}
    if not new:
        return {}
    for specs in (signature.input_specs, signature.output_specs):
        for number, spec in enumerate(specs):
            if spec.target in new:
                specs[number] = replace(spec, target=new[spec.target])  # type: ignore[call-overload]
    for tensors in (program._state_dict, program._constants):
        _rename(tensors, new)
    return {to: old for old, to in new.items()}


def _speakable(name: str, tail: str) -> str:
    return ".".join(part + tail if iskeyword(part) else part for part in name.split("."))


def _rename(tensors: dict[str, Any], new: dict[str, str]) -> None:
    """Rename keys in place; their order stays."""
    items = [(new.get(name, name), value) for name, value in tensors.items()]
    tensors.clear()
    tensors.update(items)
