"""A smaller network from its files, by as little of l0prune as possible, and is it the same?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import l0prune
from benchmarks.scramble import Example, like
from l0prune.capture.example_inputs import tensors_in
from l0prune.exporting.certify.difference import difference
from l0prune.files.cut_layers import OWN, SkippedModule


def reloaded(
    build: Callable[[], tuple[nn.Module, Example]], dense: l0prune.Export, folder: Path
) -> tuple[str, nn.Module]:
    """The smaller network from its files, and what has loaded it; as little as possible of ours."""
    if not dense.rebuilt:
        dense.save(folder / "small.pt2")
        return "torch.export.load", torch.export.load(folder / "small.pt2").module()
    said = dense.save_pretrained(folder / "small")
    kind: Any = type(dense.module)
    if f"{kind.__name__}.from_pretrained" in said:
        return "transformers", kind.from_pretrained(folder / "small").eval()
    if "l0prune.from_pretrained" in said:
        return "l0prune.from_pretrained", l0prune.from_pretrained(folder / "small")
    fresh, _ = build()
    return "l0prune.resize", l0prune.resize(fresh, folder / "small")


def loaded_again(
    build: Callable[[], tuple[nn.Module, Example]],
    dense: l0prune.Export,
    folder: Path,
    example: Example,
) -> tuple[str, float, nn.Module]:
    """What has loaded it, how far its outputs are off, and the network."""
    how, loaded = reloaded(build, dense, folder)
    found, expected = (answer(each, example) for each in (loaded, dense.module))
    return how, difference(expected, found), loaded


def kept_class(dense: l0prune.Export) -> str:
    """``yes`` for its own class, ``layers`` if some layers are cut ones, or ``graph``."""
    if not dense.rebuilt:
        return "graph"
    cut = any(isinstance(module, (*OWN, SkippedModule)) for module in dense.module.modules())
    return "layers" if cut else "yes"


def answer(model: nn.Module, example: Example) -> list[Tensor]:
    """Its tensors on other inputs than it was cut with."""
    torch.manual_seed(1)
    args, kwargs = like(example)
    with torch.no_grad():
        return tensors_in(model(*args, **kwargs))
