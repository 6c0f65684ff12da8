"""Layers that torch lacks, and functions that change a model's modules into them.

Plain torch and safetensors: the code is copied beside the weights of a cut model, after that of
``given_sizes``. TorchScript reads its annotations, which therefore must not be strings.
"""

import json
import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, fx, nn
from torch.nn import functional as F

from l0prune.files.given_sizes import GivenSizes, MixedIn, OwnLayer, PaddedNorm, layer_norm

# Kernel, stride, padding and dilation of a convolution or pool, with a number for each dim.
Window = tuple[tuple[int, ...], ...]


class CutLayerNorm(OwnLayer, nn.LayerNorm):
    """LayerNorm after the removal of inputs that were all zero.

    Attributes:
        normalized_shape: of the remaining inputs.
        inputs: number of values averaged over before the cut.
        dim: the first of the dims that are averaged over, counted from the last one; 1 for
            channels that come before positions.
    """

    inputs: int
    dim: int

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the averages over all inputs. Shape: as the input."""
        if self.dim == -1:
            return layer_norm(input, self.inputs, self.eps, self.weight, self.bias)
        dims = [1] if self.dim == 1 else list(range(self.dim, 0))
        return _normalised(input, dims, self.inputs, self.eps, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Add the sizes before the cut."""
        return f"{super().extra_repr()}, inputs={self.inputs}, dim={self.dim}"


class CutGroupNorm(OwnLayer, nn.GroupNorm):
    """GroupNorm with one group, after the removal of channels that were all zero.

    Attributes:
        num_channels: number of remaining channels.
        inputs: number of channels before the cut.
    """

    inputs: int

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the averages over all channels. Shape: as the input."""
        values = self.inputs * input[0, 0].numel()
        dims = list(range(1, input.ndim))
        return _normalised(input, dims, values, self.eps, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Add the number of channels before the cut."""
        return f"{super().extra_repr()}, inputs={self.inputs}"


class PickedLinear(OwnLayer, nn.Linear):
    """Linear layer that reads a subset of its input features.

    Attributes:
        in_features: number of features that it reads.
        kept: their indices, int64, shape ``(in_features,)``.
    """

    kept: Tensor
    reads_by = "weight"  # name of the parameter that multiplies them

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to the kept inputs. Shape: ``(…, inputs)`` to ``(…, out_features)``."""
        return F.linear(input.index_select(-1, self.kept), self.weight, self.bias)


class CutAttention(OwnLayer, nn.MultiheadAttention):
    """MultiheadAttention with fewer or smaller heads; the head size of values may differ.

    Attributes:
        num_heads: number of remaining heads.
        head_dim: remaining head size of queries and keys.
        scale: factor of the products of queries and keys, as before the cut.
    """

    scale: float

    @property
    def _qkv_same_embed_dim(self) -> bool:
        return False  # else an encoder layer around it takes its fast path

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as ``nn.MultiheadAttention`` does; ``is_causal`` needs ``attn_mask`` as well."""
        given = [self._read(each) for each in (query, key, value)]
        is_single = query.ndim == 2
        if is_single:
            given = [each.unsqueeze(0 if self.batch_first else 1) for each in given]
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        if not self.batch_first:
            given = [each.transpose(0, 1) for each in given]
        q, k, v = (
            F.linear(each, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each, weight, bias in zip(given, *self._projections(), strict=True)
        )
        mask = self._mask(q, attn_mask, key_padding_mask)
        dropout, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = (q * self.scale) @ k.transpose(-2, -1)
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            weights = F.dropout(weights, dropout, self.training)
            result = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights[0] if is_single else weights
        else:
            result = F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=self.scale)
        result = self.out_proj(result.transpose(1, 2).flatten(2))
        if not self.batch_first:
            result = result.transpose(0, 1)
        return result.squeeze(0 if self.batch_first else 1) if is_single else result, weights

    def _read(self, given: Tensor) -> Tensor:
        return given

    def _projections(self) -> tuple[list[Tensor], list[Tensor | None]]:
        keys = self.num_heads * self.head_dim
        sizes = [keys, keys, self.out_proj.in_features]
        if self.in_proj_weight is not None:
            weights = list(self.in_proj_weight.split(sizes))
        else:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        if self.in_proj_bias is None:
            return weights, [None, None, None]
        return weights, list(self.in_proj_bias.split(sizes))

    @staticmethod
    def _mask(q: Tensor, attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """Return both masks as one additive mask of (batch, heads, queries, keys) scores."""
        added: list[Tensor] = []
        for mask, heads in ((attn_mask, q.shape[1]), (padding, 0)):
            if mask is None:
                continue
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, float("-inf"))
            mask = mask.to(q.dtype)
            if not heads:
                mask = mask[:, None, None]
            elif mask.ndim == 3:
                mask = mask.unflatten(0, (-1, heads))
            added.append(mask)
        return added[0] if len(added) == 1 else added[0] + added[1] if added else None


class PickedAttention(CutAttention):
    """CutAttention that reads the same subset of features of queries, keys and values.

    Attributes:
        kept: their indices, int64.
    """

    kept: Tensor
    reads_by = "in_proj_weight"

    def _read(self, given: Tensor) -> Tensor:
        return given.index_select(-1, self.kept)


class SkippedModule(OwnLayer):
    """Placeholder for a removed module, which a pickle stores as plain torch.

    Attributes:
        gives: ``input`` for an unchanged input; ``zeros`` of its shape, but for ``windows`` and
            ``dim``; ``zero`` for a scalar; or ``nothing``, an empty vector that torch.cat omits.
        at: position of that input.
        name: of that input, for calls by keyword.
        depth: number of lists around the tensor in that input.
        windows: of the convolutions and pools that changed the sizes of positions.
        dim, channels: a dim of the result and its size; dim 0 keeps the input's size.
        results: length of the tuple it returned; 0 for no tuple.
        passed: further results that are inputs, handed on: number of the result, position and name
            of the input. All others are None now.
    """

    gives: str
    at: int
    name: str
    depth: int
    windows: tuple[Window, ...]
    dim: int
    channels: int
    results: int
    passed: tuple[tuple[int, int, str], ...] = ()

    def forward(self, *args: object, **kwargs: object) -> object:
        """Return the input or the zeros that ``gives`` names. Shape: see the class."""

        def given(at: int, name: str) -> Any:
            return kwargs[name] if name in kwargs else args[at]

        return self._results(given)

    def _results(self, given: Callable[[int, str], Any]) -> Any:
        """Return what the module returns, of inputs by position and name."""
        first = self._made_from(given(self.at, self.name))
        if not self.results:
            return first
        others = {number: given(at, name) for number, at, name in self.passed}
        return (first, *(others.get(number) for number in range(1, self.results)))

    def _made_from(self, first: Any) -> Any:
        if self.gives == "input":
            return first
        for _ in range(self.depth):
            first = first[0]
        if self.gives != "zeros":
            return first.new_zeros((0,) if self.gives == "nothing" else ())
        sizes = sizes_after(first.shape, self.windows)
        if self.dim:
            # Sizes that torch.fx traces do not unpack.
            sizes = sizes[: self.dim] + (self.channels,) + sizes[self.dim + 1 :]  # noqa: RUF005
        return first.new_zeros(sizes)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ``nn.Module`` with the same content and a graph of torch.fx as forward."""
        inputs = {at: name for _, at, name in self.passed} | {self.at: self.name}
        for name in inputs.values():
            if not is_name(name):
                raise ValueError(f"{name!r} is no name of an input")
        own = SkippedModule.__annotations__
        state = {name: value for name, value in vars(self).items() if name not in own}
        graph = fx.Graph()
        names = [inputs.get(number, f"_{number}") for number in range(max(inputs) + 1)]
        taken = [fx.Proxy(graph.placeholder(name, default_value=None)) for name in names]
        graph.placeholder("*args")
        graph.placeholder("**kwargs")
        made = self._results(lambda at, _: taken[at])
        graph.output(fx.node.map_aggregate(made, lambda a: getattr(a, "node", a)))
        return nn.Module, (), {**state, "forward": fx.GraphModule({}, graph)}

    def extra_repr(self) -> str:
        """Name the kind of result."""
        return self.gives


def is_name(value: object) -> bool:
    """Return whether the value is valid as ``name`` of a SkippedModule."""
    return isinstance(value, str) and value.isidentifier() and not keyword.iskeyword(value)


def are_passed(value: object) -> bool:
    """Return whether the value is valid as ``passed`` of a SkippedModule."""
    return isinstance(value, list | tuple) and all(
        isinstance(each, list | tuple)
        and len(each) == 3
        and all(type(number) is int and 0 <= number < _MOST_INPUTS for number in each[:2])
        and is_name(each[2])
        for each in value
    )


_MOST_INPUTS = 64


def are_windows(value: object) -> bool:
    """Return whether the value is valid as ``windows`` of a SkippedModule."""
    return isinstance(value, list | tuple) and all(map(_is_window, value))


def _is_window(value: object) -> bool:
    # Four numbers for every dim that the window slides over, and at least one such dim.
    if not isinstance(value, list | tuple) or len(value) != 4:
        return False
    if not all(isinstance(each, list | tuple) and len(each) == len(value[0]) for each in value):
        return False
    kernel, stride, padding, dilation = value
    if not all(type(number) is int for each in value for number in each):
        return False
    return min((*kernel, *stride, *dilation), default=0) >= 1 and min(padding) >= 0


def sizes_after(sizes: Any, windows: Sequence[Window]) -> Any:
    """Return the sizes of a tensor, a tuple, after windows have slid over its last dims."""
    for kernel, stride, padding, dilation in windows:
        dims = len(kernel)
        last = [
            (sizes[i - dims] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
            for i in range(dims)
        ]
        sizes = sizes[:-dims] + tuple(last)
    return sizes


def _normalised(
    x: Tensor,
    dims: list[int],
    before: int,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Return ``(x − mean) / √(variance + ε)`` over ``before`` values; those not in x are zero.

    With a share s of them in x, ``mean = s·avg(x)``, and each of the others deviates by ``mean``:
    ``variance = s·avg((x − mean)²) + (1 − s)·mean²``. In half precision the statistics are
    computed in float32.
    """
    whole = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    left = 1
    for dim in dims:
        left *= x.shape[dim]
    share = left / before
    mean = share * whole.mean(dims, keepdim=True)
    centred = whole - mean
    variance = share * (centred * centred).mean(dims, keepdim=True) + (1 - share) * mean * mean
    scale = torch.rsqrt(variance + eps)
    after = 0 if dims[0] < 0 else x.ndim - 2  # dims behind the channels
    if weight is not None:
        scale = scale * _before(weight, after)
    result = centred * scale
    if bias is not None:
        result = result + _before(bias, after)
    return result.to(x.dtype)


def _before(tensor: Tensor, dims: int) -> Tensor:  # without sizes: see GivenSizes
    for _ in range(dims):
        tensor = tensor.unsqueeze(-1)
    return tensor


# Layers that a pickle names, and those in the place of modules with nothing left to compute.
OWN = (
    CutLayerNorm,
    CutGroupNorm,
    PickedLinear,
    CutAttention,
    PickedAttention,
    GivenSizes,
    PaddedNorm,
)
SKIPPED = (SkippedModule, nn.Identity)
LAYERS: dict[str, type[nn.Module]] = {each.__name__: each for each in (*OWN, *SKIPPED)}


def become(module: nn.Module, name: str) -> None:
    """Change a module's class to the named layer, in place; the caller sets new attributes."""
    kind = LAYERS[name]
    module.__class__ = kind.mixed_into(type(module)) if issubclass(kind, MixedIn) else kind


def change(
    model: nn.Module,
    layers: Mapping[str, str],
    attributes: Mapping[str, Mapping[str, Any]],
    tensors: Mapping[str, Tensor],
    dropped: Mapping[str, Sequence[int]],
) -> None:
    """Apply a manifest's layers, attributes and dropped parameters to a model, in place.

    The model's tensors have the new sizes already; ``tensors`` holds by name, among others, those
    that layers gain. The ``dropped`` parameters become zeros.
    """
    drop(model, dropped)
    for path, name in layers.items():
        module = model.get_submodule(path)
        become(module, name)
        kept = tensors.get(f"{path}.kept" if path else "kept")
        if kept is not None and hasattr(LAYERS[name], "reads_by"):
            module.register_buffer("kept", kept.to(next(module.parameters()).device))
    for path, changed in attributes.items():
        module = model.get_submodule(path)
        for name, value in changed.items():
            setattr(module, name, tuple(value) if isinstance(value, list) else value)


def drop(model: nn.Module, sizes: Mapping[str, Sequence[int]]) -> None:
    """Replace parameters by buffers of one zero, which are neither trained nor saved.

    Args:
        model: holds the parameters, perhaps under several names.
        sizes: of each buffer, by name; the zero is expanded to them.
    """
    held = dict(model.named_parameters(remove_duplicate=False))
    gone = {id(held[name]): shape for name, shape in sizes.items()}
    for name, old in held.items():
        if id(old) in gone:
            path, _, leaf = name.rpartition(".")
            module, zero = model.get_submodule(path), old.detach().new_zeros([1] * old.ndim)
            zero = zero.expand(*gone[id(old)])
            delattr(module, leaf)
            module.register_buffer(leaf, zero, persistent=False)


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among a module's parameters, buffers and attributes, not submodules'."""
    for table in (module._parameters, module._buffers, vars(module)):
        for leaf, value in table.items():
            if isinstance(value, Tensor):
                yield leaf, value


def tensors_held(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter, buffer and plain attribute that is a tensor, under all its names."""
    return {
        f"{path}.{leaf}" if path else leaf: tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for leaf, tensor in tensors_of(module)
    }


def put_tensors(model: nn.Module, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Replace old tensors by new ones, on the old ones' devices; parameters stay parameters."""
    put: dict[int, Tensor] = {}
    for old, new in pairs.values():
        tensor = _laid_out(old, new if old.is_meta else new.to(old.device))
        if isinstance(old, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=old.requires_grad)
        put.setdefault(id(old), tensor)
    for module in model.modules():
        for leaf, old in list(tensors_of(module)):
            if id(old) in put:
                setattr(module, leaf, put[id(old)])


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _laid_out(old: Tensor, new: Tensor) -> Tensor:
    """Return the new tensor in channels-last memory format if the old one has it."""
    memory = _FORMATS.get(old.dim())
    if memory is None or old.layout != torch.strided:
        return new
    plain, last = (
        torch.empty(old.shape, device="meta", memory_format=each)
        for each in (torch.contiguous_format, memory)
    )
    if plain.stride() == old.stride() or last.stride() != old.stride():
        return new
    return torch.empty_like(new, memory_format=memory).copy_(new)


Model = TypeVar("Model", bound=nn.Module)


def resize(model: Model, folder: str | Path) -> Model:
    """Give a model the sizes and weights in the folder, in place.

    Raises:
        ValueError: the folder is of another model, or from a newer version; the model is then as
            it was.
    """
    manifest = json.loads((Path(folder) / "l0prune.json").read_text(encoding="utf-8"))
    if manifest["version"] != 1:
        raise ValueError(f"{folder} was written by a newer l0prune")
    tensors = load_file(Path(folder) / "model.safetensors")
    tensors |= {name: tensors[first] for name, first in manifest["tied"].items()}
    held = tensors_held(model)
    for name, sizes in {**manifest["shapes"], **manifest["constants"]}.items():
        if name not in held or list(held[name].shape) != sizes["old"]:
            raise ValueError(f"{folder} is of another model: {name} is not {sizes['old']} in this")
    wanted = (*manifest["shapes"], *manifest["constants"])
    put_tensors(model, {name: (held[name], tensors[name]) for name in wanted})
    change(model, manifest["layers"], manifest["attributes"], tensors, manifest["dropped"])
    return model
