"""Mixins that run a module's forward at sizes that its code does not know. Plain torch."""

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

GIVEN = "given_sizes"  # attribute of GivenSizes
PADDED = "whole_sizes"  # attribute of PaddedNorm
_mixed: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}

# Functions that take sizes: the position of that argument, and its names as a keyword.
_TAKE_SIZES: dict[str, tuple[int, tuple[str, ...]]] = {
    **dict.fromkeys(("view", "reshape", "expand", "broadcast_to"), (1, ("shape", "size"))),
    **dict.fromkeys(("new_ones", "new_zeros", "new_full", "new_empty"), (1, ("size",))),
    **dict.fromkeys(("ones", "zeros", "full", "empty"), (0, ("size",))),
    "unflatten": (2, ("sizes",)),
    "split": (1, ("split_size_or_sections", "split_size")),
}


# Functions that read a size from their inputs.
_AVERAGE, _ATTENTION, _NORM = "mean", "scaled_dot_product_attention", "layer_norm"
_PRODUCTS = ("mul", "mul_")  # with a number that is 1/√size


class OwnLayer(nn.Module):
    """Base of layers that torch lacks. A warning says so where one is pickled, not where copied."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as ever, by the name of the class, with a warning."""
        warnings.warn(
            "l0prune: this pickle holds layers that torch does not have, and loads only where "
            f"{__name__.partition('.')[0]} can be imported: save_pretrained(folder, code=True) of "
            "the export writes a folder that torch and safetensors alone load.",
            stacklevel=2,
        )
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy as ever, without the warning."""
        own: Any = getattr(super(), "__deepcopy__", None)
        if own is not None:
            result: nn.Module = own(memo)
            return result
        reduced: Any = super().__reduce_ex__(4)
        rebuild, arguments, state, *_ = reduced
        copied: Any = rebuild(*arguments)
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(state, memo))
        return copied  # type: ignore[no-any-return]


class MixedIn(OwnLayer):
    """Base of mixins that run the forward of a module's class in another way."""

    def run(self, kind: type[nn.Module], args: Any, kwargs: Any) -> Any:
        """Call the forward of the module's original class ``kind``."""
        raise NotImplementedError

    @classmethod
    def mixed_into(cls, kind: type[nn.Module]) -> type[nn.Module]:
        """Return the class ``kind`` with this mixin, cached, under the name of ``kind``."""
        if issubclass(kind, cls):
            return kind
        if (cls, kind) not in _mixed:

            @functools.wraps(kind.forward)
            def forward(self: MixedIn, *args: Any, **kwargs: Any) -> Any:
                return self.run(kind, args, kwargs)

            members = {name: getattr(kind, name) for name in ("__module__", "__doc__")}
            members |= {"__qualname__": kind.__qualname__, "forward": forward}
            metaclass: Any = type(kind)
            _mixed[cls, kind] = metaclass(kind.__name__, (cls, kind), members)
        return _mixed[cls, kind]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the original class: the mixed one cannot be imported."""
        reduced: Any = super().__reduce_ex__(protocol)
        rebuild, arguments, *state = reduced
        order = type(self).__mro__
        mixin = next(each for each in order if MixedIn in each.__bases__)
        own = order[order.index(OwnLayer) + 1]
        arguments = tuple(own if each is type(self) else each for each in arguments)
        return (_mixed_anew, (mixin, own, rebuild, arguments), *state)


def _mixed_anew(
    mixin: type[MixedIn], kind: type[nn.Module], rebuild: Callable[..., Any], arguments: Any
) -> nn.Module:
    module: nn.Module = rebuild(*arguments)
    module.__class__ = mixin.mixed_into(kind)
    return module


class GivenSizes(MixedIn):
    """Module whose calls get recorded sizes instead of those that its code would compute.

    Code may read a size from its input (``B, N, C = x.shape``) and reshape another tensor to it
    that was as wide; a mean divides by the number of its remaining inputs, although removed ones
    were zero, and so does a norm that is called as a function; attention without ``scale`` takes it
    from the remaining size of a head, and so does code that multiplies by ``(C // heads) ** -0.5``.

    Attributes:
        given_sizes: for such calls in order, the function's name, the number of sizes in the call,
            and the sizes to use: None for one that is right, -1 for one that follows from the
            others, such as batch × heads. For a mean or a norm they are the number of values after
            and before the cut, for attention and a product with a number the size of a head by
            which it scales. Calls of other functions, or with another number of sizes, are not
            among them.
    """

    given_sizes: list[Any]

    def run(self, kind: type[nn.Module], args: Any, kwargs: Any) -> Any:
        """Call the forward of ``kind``, whose calls take these sizes."""
        with _Sizes(self.given_sizes):
            return kind.forward(self, *args, **kwargs)


class PaddedNorm(MixedIn):
    """Module that averages over its inputs, after the removal of inputs that were all zero.

    Its code may compute averages in any way. It runs on inputs and parameters that are padded with
    zeros at the end of each cut dim, and its outputs there are left out.

    Attributes:
        whole_sizes: name of a parameter (empty: its input and output), dim, and the number of
            positions before the cut.
    """

    whole_sizes: list[Any]

    def run(self, kind: type[nn.Module], args: Any, kwargs: Any) -> Any:
        """Call the forward of ``kind`` on padded inputs. Shape: as its input."""
        inputs: list[Tensor] = list(args) + list(kwargs.values())
        (given,) = inputs
        tensors = {"": given, **{name: getattr(self, name) for name in self._parameters}}
        for name, dim, size in self.whole_sizes:
            tensors[name] = _padded(tensors[name], dim, size)
        padded = tensors.pop("")
        whole = kind.__new__(kind)
        whole.__dict__.update({**self.__dict__, "_parameters": tensors})
        result = kind.forward(whole, padded)
        for name, dim, _ in self.whole_sizes:
            result = result if name else result.narrow(dim, 0, given.shape[dim])
        return result


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """Pad ``x`` with zeros at the end of a dim, up to this size."""
    after = -dim - 1 if dim < 0 else x.ndim - 1 - dim
    return F.pad(x, [0, 0] * after + [0, size - x.shape[dim]])


def are_whole_sizes(data: Any) -> bool:
    """Return whether the data is valid as ``whole_sizes`` of a PaddedNorm."""
    return isinstance(data, (tuple, list)) and all(
        isinstance(each, (tuple, list))
        and [type(value) for value in each] == [str, int, int]
        and each[2] >= 0
        for each in data
    )


def are_sizes_of_calls(data: Any) -> bool:
    """Return whether the data is valid as ``given_sizes`` of a GivenSizes."""
    return isinstance(data, (tuple, list)) and all(
        isinstance(call, (tuple, list))
        and len(call) == 3
        and call[0] in (*_TAKE_SIZES, _AVERAGE, _ATTENTION, _NORM, _PRODUCTS[0])
        and type(call[1]) is int
        and isinstance(call[2], (tuple, list))
        and len(call[2]) > 0
        and call[1] in (1, len(call[2]))
        and all(size is None or (type(size) is int and -1 <= size < 2**31) for size in call[2])
        for call in data
    )


class _Sizes(TorchFunctionMode):
    """Mode that replaces the sizes in calls of functions by recorded ones."""

    def __init__(self, calls: Sequence[Any]) -> None:
        super().__init__()
        self.left: dict[tuple[str, int], list[Any]] = {}
        for name, count, sizes in calls:
            self.left.setdefault((name, count), []).append(sizes)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _TAKE_SIZES:
            args, kwargs = self._with_sizes(name, args, kwargs)
        elif name == _AVERAGE:
            left, *before = self._known(name, 1) or [None]
            result = func(*args, **kwargs)
            return result if left is None else result * (left / before[0])
        elif name == _NORM:
            left, *before = self._known(name, 1) or [None]
            return func(*args, **kwargs) if left is None else _normed(before[0], *args, **kwargs)
        elif name == _ATTENTION:
            size = (self._known(name, 1) or [None])[0]
            kwargs = kwargs if size is None else {**kwargs, "scale": size**-0.5}
        elif name in _PRODUCTS and len(args) == 2 and type(args[1]) is float:
            size = (self._known(_PRODUCTS[0], 1) or [None])[0]
            args = args if size is None else (args[0], size**-0.5)
        return func(*args, **kwargs)

    def _known(self, name: str, count: int) -> Any:
        """Return the recorded sizes of the next such call; None if none were recorded."""
        known = self.left.get((name, count))
        if known == []:
            raise RuntimeError(f"{name} is called more often than sizes are known for it")
        return None if known is None else known.pop(0)

    def _with_sizes(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of such a call with the recorded sizes."""
        place, keys = _TAKE_SIZES[name]
        key = next((each for each in keys if each in kwargs), None)
        given, after = (args[place] if key is None else kwargs[key]), args[place + 1 :]
        if not isinstance(given, (tuple, list)):  # one for all pieces; or an argument for each size
            given, after = ([given], after) if name == "split" else (args[place:], ())
        sizes = self._known(name, len(given))
        if sizes is None:
            return args, kwargs
        given = given * len(sizes) if len(given) == 1 else given
        new = [own if size is None else size for own, size in zip(given, sizes, strict=True)]
        if key is not None:
            return args, {**kwargs, key: new}
        return (*args[:place], new, *after), kwargs


def _normed(
    before: int,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return layer_norm(input, before, eps, weight, bias)


def layer_norm(
    x: Tensor, before: int, eps: float, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Normalise over the last dim as if it were padded with zeros to ``before`` values.

    One pass of the operator takes a fraction of the time of separate averages and arithmetic.
    """
    left = x.shape[-1]
    gone = [0, before - left]
    weight = weight if weight is None else F.pad(weight, gone)
    bias = bias if bias is None else F.pad(bias, gone)
    return F.layer_norm(F.pad(x, gone), [before], weight, bias, eps)[..., :left].contiguous()
