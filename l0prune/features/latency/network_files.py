"""ONNX files of a gated model at any widths, in a folder or bundle, to be timed.

A model that was captured in parts has no single time, and is refused.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import ModelProto
from torch import Tensor, nn

from l0prune.capture.compat import pytree
from l0prune.capture.copying import copied
from l0prune.capture.example_inputs import examples_in
from l0prune.capture.sizes import ALL_FIXED, ANY, Inputs
from l0prune.errors import FileError, UsageError, first_line
from l0prune.exporting.certify.answers import Answer
from l0prune.exporting.certify.dtypes import cast, follow
from l0prune.exporting.onnx import collect
from l0prune.exporting.onnx.file import write_runnable
from l0prune.exporting.pieces import ExportedPart
from l0prune.exporting.slicing.program import reexport
from l0prune.features.latency.eager import CutGraphs
from l0prune.features.latency.facts import FACTS, plan_id
from l0prune.features.latency.normal_form import in_normal_form
from l0prune.features.latency.sizes import (
    Size,
    SizeFinder,
    Widths,
    all_slots,
    are_distinguishing,
    distinguishing_widths,
    kept_whole,
    sampled_widths,
    slots_of,
    unmistakable_widths,
)
from l0prune.features.latency.template import Count, NoTemplate, Resizer, as_dense, common_template
from l0prune.files.checked_json import read_json, read_text
from l0prune.files.onnx_session import session_of
from l0prune.gating.attaching import gates_of, holder, weights_of
from l0prune.plan.layout import Layout
from l0prune.plan.measures import Macs
from l0prune.plan.numbers import NETWORKS, SEEDS, check_whole
from l0prune.plan.plan import Plan
from l0prune.plan.switches import gone
from l0prune.progress.stages import counting, stage, steps

Convert = Callable[[ModelProto, dict[str, Any]], ModelProto]
"""Conversion of an ONNX model before it is timed, given example inputs of it."""

_LARGE = 5e8  # MACs of a call from which on the few nodes that a free batch needs take no time
_NOISE = 1e-3  # standard deviation of noise on weights, since exporters merge equal tensors


@dataclass(frozen=True)
class Network:
    """Exported network: its kept slots, its ONNX model and example inputs."""

    kept: Tensor
    model: onnx.ModelProto
    inputs: dict[str, Tensor]


class Exporter:
    """Exporter of a gated model at any widths; the model is not changed.

    The captured graph is cut and written without a proof: no file is handed out. A copy is
    exported, whose weights get a little noise, since files merge equal tensors. The batch of a
    large network is fixed, since its export takes half the time then.
    """

    def __init__(self, model: nn.Module, batch: int, convert: Convert | None = None) -> None:
        gated, _ = holder(model)
        self._batch, self._convert = batch, convert
        self._graphs = CutGraphs(_disturbed(copied(gated).cpu().eval()), batch)
        self._is_large = batch * Macs(self._graphs.plan).dense() >= _LARGE

    def networks(self, widths: Sequence[Widths]) -> list[Network]:
        """Export networks with these numbers of open slots of each axis."""
        found = []
        with stage("exporting networks of other widths, to learn their sizes"):
            for each in steps(widths):
                found.append(self.network_of(slots_of(self._graphs.plan, each)))
        return found

    def network_of(self, open_: Tensor) -> Network:
        """Export the network with these open gates, bool and flat."""
        piece = self._piece(open_)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            write_runnable(piece.single, path, Path(folder) / "weights", piece.sizes)
            model = in_normal_form(onnx.load(str(path)))
        inputs = dict(_inputs(model, piece, self._batch))
        if self._convert is not None:
            model = self._convert(model, {name: value.numpy() for name, value in inputs.items()})
        return Network(self._graphs.plan.kept(open_), model, inputs)

    def are_alike(self, one: Tensor, other: Tensor) -> bool:
        """Return whether networks with these open gates have the same operators."""
        return self._graphs.operators(one) == self._graphs.operators(other)

    def constants(self) -> set[int]:
        """Return integers that may be in a file whatever the widths are."""
        return self._graphs.constants()

    def _piece(self, open_: Tensor) -> ExportedPart:
        """Return the program of the network with these open gates, in float32."""
        cut, single = self._graphs.cut(open_), torch.float32
        captured = cut.captured.found[0].analysis.captured
        example = cast(cut.narrow(cut.example), single)
        graph, free, is_free = follow(cut.graphs[""], single), cut.free, captured.dynamic
        if is_free and captured.batches == ANY and self._is_large:
            example, free, is_free = _rows(example, self._batch), ALL_FIXED, False
        free = free.only(captured.free)
        made = reexport(graph, example, is_free, captured.batches, free)
        answers = (Answer(example, (), ()),)
        free = free.only(made.free)
        return ExportedPart(
            "", made.program, made.program, made.dynamic, answers, made.batches, free=free
        )


def _rows(example: Inputs, number: int) -> Inputs:
    """Return the inputs with so many rows of every tensor that has one row for each example."""
    size = examples_in(example)

    def sized(leaf: Tensor) -> Tensor:
        is_batched = leaf.ndim > 0 and leaf.shape[0] == size
        return leaf[torch.arange(number) % size] if is_batched else leaf

    args, kwargs = pytree.tree_map_only(Tensor, sized, example)
    return args, kwargs


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


_LEAST = 2  # exported networks that are compared
_PARTS = 3  # of the preparation: exports, the weights that all read, the dense network
DENSE, INPUTS = "dense.onnx", "inputs.npz"
_DENSE_WEIGHTS = "dense.bin"


class NetworkFiles:
    """Writer of networks of one model into a folder, in milliseconds each.

    The constructor finds the template by an export or some, and writes the dense network and its
    inputs.

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
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with counting(_PARTS) as counter:
            for compared in _comparisons(self._exporter, self._plan):
                counter.at(1, _PARTS)
                try:
                    self._write_shared(compared)
                except NoTemplate as error:
                    reason = error
                else:
                    counter.at(2, _PARTS)
                    self._write_dense(compared[0].kept)
                    return
        raise UsageError(
            f"no latency table can be made of this model: its ONNX files at other widths differ by "
            f"more than sizes ({reason}). Gate it with exclude=[…] (--exclude) for the axes there: "
            f"the survey lists them"
        ) from reason

    @stage("writing the weights that all networks read")
    def _write_shared(self, compared: Sequence[Network]) -> None:
        """Write what all networks read, and try a network of other widths.

        Raises:
            NoTemplate: the networks differ by more than sizes, or that one cannot run.
        """
        finder = SizeFinder(self._plan, [each.kept for each in compared])
        made = common_template([each.model for each in compared], finder)
        most, first = _counting(self._plan, all_slots(self._plan)), compared[0]
        self.facts = made.facts
        self._resizer = Resizer.write(made, first.model, most, self.folder)
        arrays: dict[str, Any] = {name: value.numpy() for name, value in first.inputs.items()}
        np.savez(self.folder / INPUTS, **arrays)
        self._written.clear()
        _, widths = islice(sampled_widths(self._plan), 2)
        trial = self.write("trial.onnx", self._plan.kept(slots_of(self._plan, widths)))
        try:
            session_of(str(trial), log=4).run(None, arrays)
        except Exception as error:
            raise NoTemplate(first_line(error)) from error
        trial.unlink()

    def _write_dense(self, cut: Tensor) -> None:
        """Write the dense network, which may have other operators than one that is cut."""
        whole = all_slots(self._plan)
        if self._exporter.are_alike(cut, whole):
            self.write(DENSE, whole)
            return
        with stage("exporting the dense network, which has other operators"):
            dense = self._exporter.network_of(whole).model
        (self.folder / _DENSE_WEIGHTS).unlink(missing_ok=True)
        path = str(self.folder / DENSE)
        onnx.save(dense, path, save_as_external_data=True, location=_DENSE_WEIGHTS)

    def write(self, name: str, kept: Tensor) -> Path:
        """Write the file of the network that keeps these slots, bool and flat.

        A network without some branch, or with one slot of two, has other nodes, and is exported
        instead.
        """
        path = self.folder / name
        if name in self._written and torch.equal(self._written[name], kept):
            return path
        if gone(self._plan, kept) or self._lacks_nodes(kept):
            made = self._exporter.network_of(kept).model
        else:
            made = self._resizer.model(_counting(self._plan, kept))
        path.write_bytes(made.SerializeToString())
        self._written[name] = kept.clone()
        return path

    def _lacks_nodes(self, kept: Tensor) -> bool:
        axes = self._plan.axes
        return any(not kept[axes[number].slice].all() for number in kept_whole(self._plan))


def _comparisons(exporter: Exporter, plan: Plan) -> Iterator[list[Network]]:
    """Yield networks to compare, those of the fewest exports first.

    The dense network, which may have other nodes, is exported only where the others tell too
    little.
    """
    constants = exporter.constants()
    widths = unmistakable_widths(plan, constants)
    if widths is not None:
        (cut,) = exporter.networks([widths])
        known = SizeFinder(plan, [cut.kept, all_slots(plan)]).known
        sizes = {each[0]: each[1] for each in known}
        with suppress(NoTemplate):
            wide = as_dense(cut.model, sizes, constants)
            yield [cut, Network(all_slots(plan), wide, cut.inputs)]
    chosen, others = (distinguishing_widths(plan, _LEAST, seed) for seed in (0, 1))
    if are_distinguishing(plan, chosen):
        found = exporter.networks(chosen)
        yield found
        yield [*found, *exporter.networks(others)]
        return
    found = exporter.networks([*chosen, *others])
    if are_distinguishing(plan, [*chosen, *others]):
        yield found
    yield [*found, *exporter.networks([[axis.size for axis in plan.axes]])]


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
) -> NetworkFiles | None:
    """Write networks of random widths, a script that times them, and a description.

    A folder that holds the same already is left as it is, and None returned.
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
        return None
    files = NetworkFiles(model, batch, folder, convert)
    with stage(f"writing {samples} networks of other widths"):
        names = [f"{number:03d}.onnx" for number in range(samples)]
        for name, widths in steps(list(zip(names, chosen, strict=True))):
            files.write(name, plan.kept(slots_of(plan, widths)))
        (folder / SCRIPT).write_text(read_text(collect.__file__), encoding="utf-8")
        facts = FACTS.dump_python(files.facts, mode="json")
        about = wanted | {"dense": DENSE, "samples": names, "nodes": facts}
        about["id"] = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")
    return files


def _known(folder: Path) -> dict[str, Any]:
    """Return the folder's description, empty if it has none."""
    try:
        known = read_json(folder / ABOUT)
    except FileError:
        return {}
    return known if isinstance(known, dict) else {}
