"""Does a decoder of its own class go on as it should from what it remembers of earlier tokens?

The comparison of outputs runs it on whole sequences. When it generates it is given one token at a
time and a cache, which its layers fill: a layer that is gone fills nothing.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from l0prune.capture.free_sizes import Inputs
from l0prune.capture.quiet import quietly
from l0prune.errors import first_line
from l0prune.exporting.certify.difference import difference
from l0prune.exporting.certify.lending import lent
from l0prune.exporting.certify.one_dtype import InOneDtype
from l0prune.exporting.slicing.dtypes import cast

# In float64; a step with a cache adds up in another order than one without.
_ROUNDING = 1e-6
_CACHES = ("cache", "past_key_values")  # one name or the other, by the version of transformers
_MASK = "attention_mask"
_TOKENS = ("decoder_input_ids", "input_ids")  # the first of them that a forward takes
SOMETHING_ELSE = "with a cache it goes on as another model would"


@dataclass(frozen=True)
class CachedStep:
    """The last token of an example, after those before it were given: what comes out.

    Attributes:
        inputs: the example.
        output: of the reference.
    """

    inputs: Inputs
    output: Tensor

    @classmethod
    def of(cls, module: nn.Module, inputs: Inputs) -> CachedStep | None:
        """None where it keeps no cache, or makes no numbers of such an example."""
        with suppress(Exception):
            output = _stepped(module, inputs)
            return cls(inputs, output) if bool(output.isfinite().all()) else None
        return None

    def fault_of(self, module: nn.Module) -> str:
        """Why a module is not the same there; empty if it is."""
        try:
            found = _stepped(module, self.inputs)
        except Exception as error:
            first = first_line(error)
            return f"with a cache it does not go on: {type(error).__name__}: {first}"
        return "" if difference(self.output, found) <= _ROUNDING else SOMETHING_ELSE


def _stepped(module: nn.Module, inputs: Inputs) -> Tensor:
    """What the model makes of the last token.

    The first token of the first example is masked, as padding is, where the tokens are all that
    there is to mask: then the model has to know how many there were.

    Raises:
        Exception: it keeps no cache, or takes no such inputs.
    """
    signature = inspect.signature(module.forward)
    cache = next((name for name in _CACHES if name in signature.parameters), "")
    if not cache:
        raise TypeError("this model keeps no cache")
    args, kwargs = cast(inputs, torch.float64)
    given = dict(zip(signature.parameters, args, strict=False)) | kwargs
    name = next(each for each in _TOKENS if each in signature.parameters)
    tokens = given.pop(name)
    first, last = given | {name: tokens[:, :-1]}, given | {name: tokens[:, -1:]}
    if name == _TOKENS[1] and _MASK in signature.parameters:
        mask = given.get(_MASK, torch.ones_like(tokens)).clone()
        mask[0, 0] = 0
        first[_MASK], last[_MASK] = mask[:, :-1], mask
    model, told = lent(module, torch.float64).eval(), {"use_cache": True, "return_dict": True}
    with quietly(), torch.no_grad(), InOneDtype(torch.float64):
        before = model(**(first | told))
        after = model(**(last | told | {cache: before[cache]}))
    result = after[0]
    assert isinstance(result, Tensor)
    return result
