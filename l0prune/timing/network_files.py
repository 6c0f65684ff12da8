"""A folder of ONNX files: the dense network, and any others that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import ModelProto
from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.gating.attaching import gates_of
from l0prune.plan.layout import Layout
from l0prune.plan.plan import Plan
from l0prune.plan.switches import gone
from l0prune.running.stages import stage
from l0prune.timing.networks import Exporter, Network
from l0prune.timing.resized import Count, Resizer
from l0prune.timing.sampling import all_slots, telling_widths
from l0prune.timing.sizes import Size, SizeFinder
from l0prune.timing.template import NoTemplate, Template, template

_LEAST = 2  # networks beside the dense one that are compared
DENSE, INPUTS = "dense.onnx", "inputs.npz"
_DENSE_WEIGHTS = "dense.bin"


class NetworkFiles:
    """Writes networks of one model into a folder, in milliseconds each.

    It takes some exports to learn how; the dense network and its inputs are written then.

    Attributes:
        folder: where.
        facts: of the nodes of those that are cut.

    Args:
        model: a gated model, which stays as it is.
        batch: examples in a call.
        folder: where; it is made.

    Raises:
        NotGated: the model carries no gates.
        UsageError: it becomes several ONNX files, or its files differ by more than
            sizes; says where.
    """

    def __init__(self, model: nn.Module, batch: int, folder: Path) -> None:
        self._plan = gates_of(model).plan
        self._exporter = Exporter(model, batch)
        self._written: dict[str, Tensor] = {}
        dense, values, made = _template(self._exporter, self._plan)
        self.folder, self.facts = folder, made.facts
        with stage("writing the weights that all networks read"):
            folder.mkdir(parents=True, exist_ok=True)
            most = _counting(self._plan, all_slots(self._plan))
            self._resizer = Resizer.write(made, values, most, folder)
            arrays: dict[str, Any] = {name: value.numpy() for name, value in dense.inputs.items()}
            np.savez(folder / INPUTS, **arrays)
            (folder / _DENSE_WEIGHTS).unlink(missing_ok=True)
            onnx.save(
                dense.model,
                str(folder / DENSE),
                save_as_external_data=True,
                location=_DENSE_WEIGHTS,
            )

    def write(self, name: str, kept: Tensor) -> Path:
        """The file of the network that keeps these slots, bool and flat.

        One without some branch has other nodes, and is exported.
        """
        path = self.folder / name
        if name in self._written and torch.equal(self._written[name], kept):
            return path  # a look at what was looked at before
        if gone(self._plan, kept):
            made = self._exporter.network_of(kept).model
        else:
            made = self._resizer.model(_counting(self._plan, kept))
        path.write_bytes(made.SerializeToString())
        self._written[name] = kept.clone()
        return path


def _template(exporter: Exporter, plan: Plan) -> tuple[Network, ModelProto, Template]:
    """The dense network, a file whose weights to take, and what files of all widths are made of.

    The dense network may have other nodes than one that is cut; then a third one that is cut is
    compared in its place.
    """
    found = []
    compared = [[axis.size for axis in plan.axes], *telling_widths(plan, _LEAST)]
    for number, widths in enumerate(compared):
        with stage(f"exporting network {number + 1} of {len(compared)}, to learn its sizes"):
            found.append(exporter.network(widths))
    try:
        return found[0], found[0].model, _common(plan, found)
    except NoTemplate:
        with stage("exporting another network, since the dense one has other nodes"):
            another, *_ = telling_widths(plan, 1, seed=1)
            cut = [*found[1:], exporter.network(another)]
    try:
        return found[0], cut[0].model, _common(plan, cut)
    except NoTemplate as error:
        raise UsageError(
            f"no latency table can be made of this model: its ONNX files at other widths differ by "
            f"more than sizes ({error}). Gate it with exclude=[…] (--exclude) for the axes there: "
            f"the survey lists them"
        ) from error


def _common(plan: Plan, found: Sequence[Network]) -> Template:
    finder = SizeFinder(plan, [each.kept for each in found])
    return template([each.model for each in found], finder)


def _counting(plan: Plan, kept: Tensor) -> Count:
    """Counts sizes in a network that keeps these slots."""
    open_: dict[Layout, int] = {}

    def count(size: Size) -> int:
        if size.is_constant:
            return size.offset
        if size.layout not in open_:
            open_[size.layout] = int(plan.mask(size.layout, kept).sum())
        return size.at(open_[size.layout])

    return count
