"""ONNX files of a gated model at any widths, in a folder or bundle, to be timed.

A model that was captured in parts has no single time, and is refused.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import ModelProto
from torch import Tensor, nn

from l0prune.capture.copying import copied
from l0prune.errors import FileError, UsageError
from l0prune.exporting.export import export
from l0prune.exporting.onnx import collect
from l0prune.exporting.pieces import ExportedPart
from l0prune.files.checked_json import read_json, read_text
from l0prune.gating.attaching import gates_of, holder, weights_of
from l0prune.plan.layout import Layout
from l0prune.plan.numbers import NETWORKS, SEEDS, check_whole
from l0prune.plan.plan import Plan
from l0prune.plan.switches import gone
from l0prune.running.stages import stage
from l0prune.timing.facts import FACTS, plan_id
from l0prune.timing.sizes import (
    Size,
    SizeFinder,
    Widths,
    all_slots,
    check_single_network,
    distinguishing_widths,
    sampled_widths,
    slots_of,
)
from l0prune.timing.template import Count, NoTemplate, Resizer, Template, common_template

Convert = Callable[[ModelProto, dict[str, Any]], ModelProto]
"""Conversion of an ONNX model before it is timed, given example inputs of it."""

_NOISE = 1e-3  # standard deviation of noise on weights, since exporters merge equal tensors


@dataclass(frozen=True)
class Network:
    """Exported network: its kept slots, its ONNX model and example inputs."""

    kept: Tensor
    model: onnx.ModelProto
    inputs: dict[str, Tensor]


class Exporter:
    """Exporter of a gated model at any widths; the model is not changed.

    A copy is exported, whose weights get a little noise, since files merge equal tensors.
    """

    def __init__(self, model: nn.Module, batch: int, convert: Convert | None = None) -> None:
        gated, _ = holder(model)
        self._model = _disturbed(copied(gated).cpu().eval())
        self._gates, self._batch, self._convert = gates_of(self._model), batch, convert

    def network(self, widths: Widths) -> Network:
        """Export the network with this many open slots of each axis."""
        return self.network_of(slots_of(self._gates.plan, widths))

    def network_of(self, open_: Tensor) -> Network:
        """Export the network with these open gates, bool and flat."""
        self._gates.set_open(open_)
        small = export(self._model)
        check_single_network([piece.path for piece in small.pieces])
        with tempfile.TemporaryDirectory() as folder:
            small.save_onnx(Path(folder) / "model.onnx", time=False)
            model = onnx.load(str(Path(folder) / "model.onnx"))
        inputs = dict(_inputs(model, small.pieces[0], self._batch))
        if self._convert is not None:
            model = self._convert(model, {name: value.numpy() for name, value in inputs.items()})
        return Network(self._gates.plan.kept(open_), model, inputs)


def _disturbed(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in weights_of(model).values():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_((_NOISE * noise).to(parameter.dtype))
    return model


def _inputs(
    model: onnx.ModelProto, piece: ExportedPart, batch: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and example of each input of the file, of size ``batch`` where that is free."""
    leaves: Sequence[Any] = piece.read(piece.answers[0].inputs)
    for given, leaf, sizes in zip(model.graph.input, leaves, piece.sizes, strict=True):
        value = leaf if isinstance(leaf, Tensor) else torch.tensor(leaf)
        if sizes.get(0) == "batch":
            value = value[torch.arange(batch) % len(value)]
        elif value.ndim and len(value) != batch and not piece.dynamic:
            raise UsageError(
                f"this model takes a batch of {piece.takes}, not {batch}: gate it with an example "
                f"of that batch size, or measure with batch={len(value)}"
            )
        yield given.name, value.float() if value.is_floating_point() else value


_LEAST = 2  # networks beside the dense one that are compared
DENSE, INPUTS = "dense.onnx", "inputs.npz"
_DENSE_WEIGHTS = "dense.bin"


class NetworkFiles:
    """Writer of networks of one model into a folder, in milliseconds each.

    The constructor finds the template by some exports, and writes the dense network and its inputs.

    Raises:
        NotGated: the model carries no gates.
        UsageError: it becomes several ONNX files, or its files differ by more than
            sizes; says where.
    """

    def __init__(
        self, model: nn.Module, batch: int, folder: Path, convert: Convert | None = None
    ) -> None:
        self._plan = gates_of(model).plan
        self._exporter = Exporter(model, batch, convert)
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
        """Write the file of the network that keeps these slots, bool and flat.

        A network without some branch has other nodes, and is exported instead.
        """
        path = self.folder / name
        if name in self._written and torch.equal(self._written[name], kept):
            return path
        if gone(self._plan, kept):
            made = self._exporter.network_of(kept).model
        else:
            made = self._resizer.model(_counting(self._plan, kept))
        path.write_bytes(made.SerializeToString())
        self._written[name] = kept.clone()
        return path


def _template(exporter: Exporter, plan: Plan) -> tuple[Network, ModelProto, Template]:
    """Return the dense network, a model to take weights from, and the common template.

    The dense network may have other nodes than one that is cut; then another one that is cut is
    compared instead.
    """
    found = []
    compared = [[axis.size for axis in plan.axes], *distinguishing_widths(plan, _LEAST)]
    for number, widths in enumerate(compared):
        with stage(f"exporting network {number + 1} of {len(compared)}, to learn its sizes"):
            found.append(exporter.network(widths))
    try:
        return found[0], found[0].model, _common(plan, found)
    except NoTemplate:
        with stage("exporting another network, since the dense one has other nodes"):
            another, *_ = distinguishing_widths(plan, 1, seed=1)
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
    return common_template([each.model for each in found], finder)


def _counting(plan: Plan, kept: Tensor) -> Count:
    """Return the function that evaluates sizes in the network that keeps these slots."""
    open_: dict[Layout, int] = {}

    def count(size: Size) -> int:
        if size.is_constant:
            return size.offset
        if size.layout not in open_:
            open_[size.layout] = int(plan.mask(size.layout, kept).sum())
        return size.at(open_[size.layout])

    return count


ABOUT, SCRIPT = "bundle.json", "run.py"


def write_bundle(
    model: nn.Module,
    folder: Path,
    *,
    batch: int,
    samples: int,
    seed: int = 0,
    runtime: str = collect.NAME,
    convert: Convert | None = None,
) -> None:
    """Write networks of random widths, a script that times them, and a description.

    A folder that holds the same already is left as it is.
    """
    check_whole("batch", batch)
    check_whole("samples", samples, most=NETWORKS)
    check_whole("seed", seed, 0, SEEDS)
    plan = gates_of(model).plan
    chosen = list(islice(sampled_widths(plan, seed), samples))
    wanted = {
        "format": collect.FORMAT,
        "runtime": runtime,
        "plan": plan_id(plan),
        "batch": batch,
        "seed": seed,
        "widths": chosen,
    }
    known = _known(folder)
    if known | wanted == known:
        return
    files = NetworkFiles(model, batch, folder, convert)
    with stage(f"writing {samples} networks of other widths"):
        names = [f"{number:03d}.onnx" for number in range(samples)]
        for name, widths in zip(names, chosen, strict=True):
            files.write(name, plan.kept(slots_of(plan, widths)))
        (folder / SCRIPT).write_text(read_text(collect.__file__), encoding="utf-8")
        facts = FACTS.dump_python(files.facts, mode="json")
        about = wanted | {"dense": DENSE, "samples": names, "nodes": facts}
        about["id"] = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")


def _known(folder: Path) -> dict[str, Any]:
    """Return the folder's description, empty if it has none."""
    try:
        known = read_json(folder / ABOUT)
    except FileError:
        return {}
    return known if isinstance(known, dict) else {}
