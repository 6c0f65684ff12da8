"""A captured graph in the place of the part of a model that it was captured from."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import GraphModule
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY as PRESERVED
from torch.utils import _pytree as pytree


def replace_part(model: nn.Module, path: str, graph: GraphModule) -> None:
    """Put the graph wherever the model holds the submodule at ``path``, in place.

    The code around it finds the plain attributes of the submodule (``self.backbone.out_channels``)
    on the graph, too.
    """
    part = model.get_submodule(path)
    carried = {n: value for n, value in _data_of(part).items() if not hasattr(graph, n)}
    graph.meta[PRESERVED] = carried  # else a copy of the graph would be without them
    for name, value in carried.items():
        setattr(graph, name, value)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is part:
            model.set_submodule(name, graph)


def _data_of(module: nn.Module) -> dict[str, Any]:
    """The user's own public data on the module and its class: neither code nor modules."""
    own = [kind for kind in type(module).__mro__ if not issubclass(nn.Module, kind)]
    every: dict[str, Any] = {}
    for kind in reversed(own):
        every |= vars(kind)
    every |= vars(module)
    return {n: value for n, value in every.items() if not n.startswith("_") and _is_data(value)}


def _is_data(value: Any) -> bool:
    code = (nn.Module, property, classmethod, staticmethod)
    leaves = pytree.tree_leaves(value)
    return not any(callable(leaf) or isinstance(leaf, code) for leaf in leaves)
