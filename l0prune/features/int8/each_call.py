"""Eight bits of products whose inputs get their range in each call.

A MatMul by a constant is computed on integers: its input is quantized between its own least and
largest value (DynamicQuantizeLinear), all other operators stay in float32. That takes no ranges
from examples, costs a pass over each input, and spares the conversions of all values between. In
transformers, most of whose operators ONNX Runtime has in float32 only, it is often faster.

The range is that of all examples of a call, so that the rounding of an example's answer depends on
those beside it.
"""

from __future__ import annotations

from collections.abc import Collection

from onnx import ModelProto

from l0prune.exporting.onnx.times import Given
from l0prune.features.int8.fastest import WORTH, Speed, ms_of
from l0prune.features.int8.quantizer import RECURRENT, Quantizer, with_ranges_of_each_call
from l0prune.features.int8.search import Search

EACH_CALL = "ranges of each call"
_PRODUCTS = ("MatMul", "Gemm")
_OWN, _OTHER = "own", "other"


class EachCall(Quantizer):
    """Quantizer of products by constants, for ranges of each call."""

    @classmethod
    def beside(cls, other: Quantizer) -> EachCall:
        """Return that of the file of a static quantizer."""
        tensors = {each.name for each in other.model.graph.initializer}
        nodes = {kind: names for kind, names in other.nodes.items() if kind == RECURRENT}
        for node in other.model.graph.node:
            if node.op_type in _PRODUCTS and node.input[1] in tensors:
                nodes.setdefault(node.op_type, []).append(node.name)
        return cls(
            other.model, nodes, {EACH_CALL: None}, is_joined=other.is_joined, paths=other.paths
        )

    def quantized(self, method: str = EACH_CALL, kept: Collection[str] = ()) -> ModelProto:
        """See ``Quantizer``."""
        names = [name for every in self.nodes.values() for name in every if name not in kept]
        return with_ranges_of_each_call(self.model, names)


class EachCallSearch(Search):
    """Search for the layers in float32 beside others with ranges of each call."""

    method = EACH_CALL

    def gains(self, other: Search, given: Given, threads: int) -> bool:
        """Return whether the present file is faster than that of another search; keep its times."""
        if not self._quantizer.nodes:
            return False
        models = {_OWN: self.made(), _OTHER: other.made()}
        ms = ms_of(self._quantizer.model, models, given, threads, self._path.parent)
        self.speed = Speed(ms.float32, ms.of[_OWN], ms.of[_OWN])
        return ms.of[_OWN] <= WORTH * min(ms.float32, ms.of[_OTHER])
