"""What torch decides by the values of a tensor only to be quicker, decided without them.

torch.export stops at a branch on values. Some of torch's own layers have one that makes no
difference to what they compute: a mask is compared with the causal one, so that a kernel for
causal attention can be used. The graph is captured with the mask itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from torch import Tensor
from torch.nn.modules import transformer


def _is_said_to_be_causal(
    mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """Whether the caller says that the mask is causal; not what its values are."""
    return is_causal is True


# The module of torch, the function in it, and what stands in for it.
_HINTS: tuple[tuple[ModuleType, str, Any], ...] = (
    (transformer, "_detect_is_causal_mask", _is_said_to_be_causal),
)


@contextmanager
def without_hints() -> Iterator[None]:
    """Within the context, torch's layers take the general way, which computes the same."""
    with ExitStack() as stack:
        for module, name, instead in _HINTS:
            if hasattr(module, name):  # of a private function nothing is promised
                stack.enter_context(mock.patch.object(module, name, instead))
        yield
