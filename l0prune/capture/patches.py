"""Shortcuts that torch's layers take by the values of a tensor, switched off for a capture.

torch.export stops at a branch on values. Some of torch's own layers have one: a mask is compared
with the causal one, so that a kernel for causal attention can be used, which makes no difference
to what is computed. An encoder whose padding comes last packs its tokens, which makes one at the
padding: there it leaves zeros. The graph is captured with the mask itself, and with those zeros.

Names that torch cannot write into code: those of modules called as Python's keywords are.

``nn.ModuleDict({"in": …})`` is a model like any other, but the code that torch makes of its graph
would say ``self.in.weight``. In a captured program such a module is called ``in_``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from keyword import iskeyword
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from l0prune.capture.compat import CAUSAL_MASK, replaced


def _is_said_to_be_causal(
    mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """Return whether the caller says that the mask is causal, whatever its values."""
    return is_causal is True


def _with_zeros_at_padding(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of ``nn.TransformerEncoder`` as it is in eval mode without gradients.

    Where it may pack its tokens, it does so if the padding of every row comes last. The others are
    zero after it, before the last norm. A captured graph has the layers of the general way.
    """

    @functools.wraps(forward)
    def padded(
        self: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        if src_key_padding_mask is None or mask is not None or not _may_pack(self, src):
            return forward(self, src, mask, src_key_padding_mask, is_causal)
        norm, self.norm = self.norm, None
        try:
            output = forward(self, src, mask, src_key_padding_mask, is_causal)
        finally:
            self.norm = norm
        padding = src_key_padding_mask != 0
        is_last = (padding[:, :-1] & ~padding[:, 1:]).any().logical_not()
        output = output.masked_fill((padding & is_last).unsqueeze(-1), 0)
        return output if norm is None else norm(output)

    return padded


def _may_pack(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Return whether torch would look at the values of the mask."""
    return (
        torch.backends.mha.get_fastpath_enabled()
        and getattr(encoder, "use_nested_tensor", False)
        and getattr(encoder, "mask_check", True)
        and not encoder.layers[0].training
        and src.dim() == 3
        and not torch.is_autocast_enabled()
    )


# The module or class of torch, the function in it, and what stands in for it.
_HINTS: tuple[tuple[ModuleType | type, str, Any], ...] = (
    (*CAUSAL_MASK, _is_said_to_be_causal),
    (nn.TransformerEncoder, "forward", _with_zeros_at_padding(nn.TransformerEncoder.forward)),
)


@contextmanager
def without_hints() -> Iterator[None]:
    """Within the context, torch's layers take the general way, which computes the same."""
    with ExitStack() as stack:
        for owner, name, instead in _HINTS:
            stack.enter_context(replaced(owner, name, instead))
        yield


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
