"""Weights of a model's layers and their sizes, from its modules alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from l0prune.capture.compat import ConvolutionBase

_KINDS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.Linear, nn.Embedding, nn.EmbeddingBag),
)


@dataclass(frozen=True, slots=True)
class Weight:
    """Facts of a layer's weight before any analysis.

    ``tensors`` are its parameters, those first that are shaped like its weight. ``dims`` are the
    weight's input and output dims, None where only the graph can tell.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    dims: tuple[int, int] | None
    groups: int = 1


def weights_of(model: nn.Module) -> tuple[Weight, ...]:
    """Return every Linear, convolution and embedding of the model, and all other matrices."""
    found: list[Weight] = []
    claimed: set[str] = set()
    for name, module in model.named_modules():
        kind = next((kind for kind in _KINDS if isinstance(module, kind)), None)
        if kind is not None:
            weight = _weight(name, module, kind)
            claimed.update(weight.tensors)
            found.append(weight)
    for name, parameter in model.named_parameters():
        if name not in claimed and sum(size > 1 for size in parameter.shape) > 1:
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            found.append(Weight(name, f"weight of {owner}", tuple(parameter.shape), (name,), None))
    return tuple(found)


def _weight(name: str, module: nn.Module, kind: type[nn.Module]) -> Weight:
    """Return a module's weight; for one computed in forward, by the module's declared sizes."""
    if isinstance(module, ConvolutionBase):
        pair = (module.in_channels, module.out_channels)
        dims = (0, 1) if module.transposed else (1, 0)
        sizes = {dims[0]: pair[0], dims[1]: pair[1]}
        sizes[1] //= module.groups
        shape, groups = (sizes[0], sizes[1], *module.kernel_size), module.groups
    elif isinstance(module, nn.Linear):
        shape, dims, groups = (module.out_features, module.in_features), (1, 0), 1
    else:
        assert isinstance(module, nn.Embedding | nn.EmbeddingBag)
        shape, dims, groups = (module.num_embeddings, module.embedding_dim), (0, 1), 1
    path = f"{name}." if name else ""
    named = [(path + leaf, p) for leaf, p in module.named_parameters()]
    named.sort(key=lambda each: tuple(each[1].shape) != shape)
    return Weight(name, kind.__name__, shape, tuple(n for n, _ in named), dims, groups)
