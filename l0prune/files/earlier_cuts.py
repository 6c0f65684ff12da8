"""Memory of a cut in a smaller model, so that a model that is cut again has one manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from l0prune.capture.provenance import within
from l0prune.files.cut_layers import LAYERS, SKIPPED, tensors_held

_CUT = "l0prune_cut"  # attribute of a smaller model
_FACTS = ("shapes", "constants", "attributes", "layers", "dropped")

Facts = Mapping[str, Any]
"""Content of a manifest, as JSON data."""


def remember(model: nn.Module, facts: Facts) -> None:
    """Keep a manifest's sizes and changed modules in the model that has them now."""
    vars(model)[_CUT] = {name: facts[name] for name in _FACTS}


def remembered(model: nn.Module) -> dict[str, Any] | None:
    """Return the facts of the model's cut; None without one, or if its sizes changed since."""
    facts: dict[str, Any] | None = vars(model).get(_CUT)
    held = {} if facts is None else tensors_held(model)
    for name, sizes in {} if facts is None else {**facts["shapes"], **facts["constants"]}.items():
        if name not in held or list(held[name].shape) != sizes["new"]:
            return None
    return facts


def since_the_first(model: nn.Module, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a cut as those of all cuts of the model, for the one it was at first.

    ``model`` is the one before this cut. Unchanged if no manifest can say both in one.
    """
    first = remembered(model)
    if first is None or not all(_is_one_layer(*kinds) for kinds in _both(first, facts)):
        return facts
    layers = {**first["layers"], **facts["layers"]}
    attributes = {path: dict(of) for path, of in first["attributes"].items()}
    for path, kind in facts["layers"].items():
        for name in _gained(first["layers"].get(path)) - _gained(kind):
            attributes.get(path, {}).pop(name, None)
    for path, of in facts["attributes"].items():
        attributes[path] = {**attributes.get(path, {}), **of}
    indices = {within(path, "kept") for path in first["layers"]}
    dropped = {**first["dropped"], **facts["dropped"]}
    sizes = {
        kind: {
            name: {**now, "old": first[kind].get(name, now)["old"]}
            for name, now in {**first[kind], **facts[kind]}.items()
            if name not in indices and name not in dropped
        }
        for kind in ("shapes", "constants")
    }
    return {**facts, **sizes, "attributes": attributes, "layers": layers, "dropped": dropped}


def _both(first: Facts, second: Facts) -> Iterator[tuple[str, str]]:
    """Yield the two layers that a module became, for each that both cuts changed."""
    for path in first["layers"].keys() & second["layers"].keys():
        yield first["layers"][path], second["layers"][path]


def _is_one_layer(first: str, second: str) -> bool:
    return second == first or LAYERS[second] in SKIPPED


def _gained(kind: str | None) -> set[str]:
    """Return the names of the attributes that a module gains with a layer's class."""
    return set() if kind is None else set(LAYERS[kind].__annotations__)
