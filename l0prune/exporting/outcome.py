"""Outcome of an export: its values, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from l0prune.capture.weights import Weight
from l0prune.data.preprocessing import Preprocessing
from l0prune.exporting.certify.certificate import Certificate
from l0prune.exporting.handed_out import HandedOut, parameters_of
from l0prune.exporting.notes import CHANGED, note_on_pickles, notes_on_files
from l0prune.exporting.onnx.derived import InFewerBits
from l0prune.exporting.onnx.speedup import Speedup
from l0prune.exporting.onnx.times import DenseNetwork, Times
from l0prune.exporting.pieces import InParts, Whole
from l0prune.files.source_file import SourceFile
from l0prune.plan.globs import listed
from l0prune.plan.plan import Plan
from l0prune.plan.switches import gone
from l0prune.plan.targets import TARGET
from l0prune.plan.width_times import are_in_blocks
from l0prune.running.environment import as_html
from l0prune.selection.fitting import times_on

PRECISIONS = ("float64", "float32")


class Nearness(Protocol):
    """Nearness of a network's outputs to those of another one, on held-out inputs."""

    @property
    def agreement(self) -> float | None:
        """Share of examples that get the same class; None without classes."""

    @property
    def error(self) -> float:
        """Part of the outputs' variance that is error."""


class Tried(Protocol):
    """A network that ``shrink`` tried for a tolerance: a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def share(self) -> float:
        """The requested share of the measure."""

    @property
    def measure(self) -> str:
        """Name of the measure of which a share was requested."""

    @property
    def fidelity(self) -> Nearness:
        """Nearness of its outputs to the original's."""

    @property
    def observed(self) -> float | None:
        """The measured share; None where it was not measured."""


@dataclass
class Outcome:
    """A smaller model that computes what the gated one does in eval mode.

    Attributes:
        module: the small network, on the device and in the dtypes of the model. It is of the
            model's own class at the new sizes, and may be trained on, where the class allows them;
            else it is the captured graph, for evaluation. Programs and files are made on the CPU.
        rebuilt: the module, or for a model captured in parts every part of it, is of its own class.
        certificate: the measured errors.
        macs: of the small network, for one example.
        params_before, macs_before: of the network before the cut.
        widths: for each axis (kept slots, all slots).
        fidelity: nearness of outputs to those of the network that ``shrink`` was given, on inputs
            that weights were not fitted to; None where something else made it.
        curve: the sizes that ``shrink`` tried for a tolerance, ascending.
        asked: the budgets that the gates met, or were trained for, as text; empty without any.
        speedup: of the ONNX file beside the dense network's, and beside the ideal by MACs, once
            ``save_onnx`` took the times.
        in_fewer_bits: what fewer bits change, for each file of fewer bits that ``save_onnx`` wrote
            last: by ``int8``, ``float16`` or ``bfloat16``.
        files: what ``save_onnx`` wrote last: the ONNX files, and those with their weights.
        changed: the module was found to compute something else than when it was exported, since it
            has learned on: programs and files are of what it is now.
        plan: of the network before the cut: where its gates acted, and what stayed whole and why.
        kept: which slots of its axes stayed; bool, flat, shape ``(plan.size,)``.
        weights: the layers of the network before the cut.
        source: the ONNX file that the network was made from, if it was; the files that are written
            have its names of inputs and outputs.
        ranges: in eight bits, which ``finetune(quantize="int8")`` trained with; None without it. An
            int8 file has them.
        preprocessing: of the images that the network takes, as ``load_data`` says it of a data
            source: of those that ``finetune`` learned from; None where unknown. It is written into
            the files, and can be set before.
    """

    module: nn.Module
    rebuilt: bool
    certificate: Certificate
    macs: int
    params_before: int
    macs_before: int
    widths: dict[str, tuple[int, int]]
    plan: Plan = field(repr=False)
    kept: Tensor = field(repr=False)
    weights: tuple[Weight, ...] = field(repr=False)
    _made: Whole | InParts = field(repr=False)
    _note: str = field(repr=False)
    _state: Mapping[str, Tensor] = field(repr=False)
    _manifest: dict[str, Any] = field(repr=False)
    _handed_out: HandedOut = field(repr=False)
    _unused: frozenset[str] = field(repr=False)
    _dense: DenseNetwork = field(repr=False)
    asked: tuple[str, ...] = ()
    speedup: Speedup | None = None
    in_fewer_bits: dict[str, InFewerBits] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    preprocessing: Preprocessing | None = None
    source: SourceFile | None = None
    ranges: Any = field(default=None, repr=False)
    fidelity: Nearness | None = None
    curve: tuple[Tried, ...] = ()
    changed: bool = False
    _untimed: str = field(default="", repr=False)

    @property
    def int8(self) -> Any:
        """Comparison of the int8 file with the one in float32; None if there is no such file."""
        return self.in_fewer_bits.get("int8")

    @property
    def half(self) -> Any:
        """Comparison of the file in 16 bits with the one in float32; None if there is none."""
        return self.in_fewer_bits.get("float16", self.in_fewer_bits.get("bfloat16"))

    @property
    def times(self) -> Times | None:
        """Milliseconds of the ONNX file and of the dense network's, once they were taken."""
        return None if self.speedup is None else self.speedup.times

    @property
    def params(self) -> int:
        """Number of parameters of ``module``, without those that eval mode does not use.

        The ``note`` gives the number of the latter.
        """
        return parameters_of(self.module, self._unused)

    @property
    def note(self) -> str:
        """Note for the user: why the module is not of its own class, and what files take."""
        notes = [self._note, *notes_on_files(self._made, self.module), CHANGED * self.changed]
        notes.append(self._untimed)
        return "\n".join(filter(None, notes))

    @property
    def in_parts(self) -> bool:
        """True if the model could only be captured in parts."""
        return isinstance(self._made, InParts)

    @property
    def dynamic(self) -> bool:
        """True if the batch size is free."""
        return all(piece.dynamic for piece in self._made.pieces)

    @property
    def gone(self) -> tuple[str, ...]:
        """The removed branches, by name: see ``gate``."""
        return tuple(gone(self.plan, self.kept))

    def to_dict(self) -> dict[str, Any]:
        """Sizes and certificate as plain data."""
        return {
            "params": self.params,
            "params_before": self.params_before,
            "macs": self.macs,
            "macs_before": self.macs_before,
            "dynamic_batch": self.dynamic,
            "batches": list(dict.fromkeys(piece.takes for piece in self._made.pieces)),
            "own_class": self.rebuilt,
            "note": self.note,
            "parts": list(dict.fromkeys(piece.path for piece in self._made.pieces)),
            "widths": {name: list(width) for name, width in self.widths.items()},
            "gone": list(self.gone),
            "certificate": self.certificate.to_dict(),
            "asked": list(self.asked),
            "speedup": None if self.speedup is None else self.speedup.to_dict(),
            **{
                name: None if (value := getattr(self, name)) is None else asdict(value)
                for name in ("times", "int8", "half", "fidelity")
            },
            "curve": [asdict(step) for step in self.curve],
            "changed": self.changed,
        }

    def __repr__(self) -> str:
        errors = [
            f"{error:.0e} in {dtype}"
            for dtype in PRECISIONS
            if (error := self.certificate.worst(("class", "graph", "program"), dtype)) is not None
        ]
        params = _share(self.params, self.params_before, "params")
        macs = _share(self.macs, self.macs_before, "MACs")
        name = type(self.module).__name__
        return f"Export({name}: {params}, {macs}; largest error {', '.join(errors)})"

    def __str__(self) -> str:
        """Sizes and largest error, times of files that were timed, and who loads a pickle."""
        timed = (f"{name}: {each}" for name, each in self._timed())
        lines = (repr(self), *timed, *self._in_blocks(), note_on_pickles(self.module))
        return "\n".join(filter(None, lines))

    def _in_blocks(self) -> list[str]:
        """Return a sentence on the blocks of the widths, if they come in those of the target."""
        times = times_on(TARGET)
        blocks = times.blocks(self.plan)
        if max(blocks, default=1) == 1 or not are_in_blocks(self.plan, self.kept, blocks):
            return []
        return [f"Widths: {times.describe(blocks)}."]

    def _timed(self) -> list[tuple[str, Any]]:
        """Return what is known of the times of each file, by a name for it."""
        beside = [(f"In {name}", each) for name, each in self.in_fewer_bits.items()]
        return beside if self.speedup is None else [("Time", self.speedup), *beside]

    def _repr_html_(self) -> str:
        return as_html(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Tables of sizes before and after and of the certificate, with the notes."""
        sizes = Table("", "before", "after", "kept", title="Cut")
        params, macs = (self.params_before, self.params), (self.macs_before, self.macs)
        for name, (before, after) in {"params": params, "MACs": macs}.items():
            sizes.add_row(name, f"{before:,}", f"{after:,}", f"{after / before:.1%}")
        yield sizes
        if self.gone:
            yield Text(f"Branches that are gone: {listed(self.gone)}.")
        numbers = "error", "rounding", "allowed"
        proof = Table("compared", "precision", "batch", *numbers, title="Certificate")
        for c, batches in self.certificate.summary():
            what = f"{c.against} and {c.what}" + (f" of {c.part}" if c.part else "")
            alone = "" if c.rounding is None else f"{c.rounding:.1e}"
            errors = f"{c.error:.1e}", alone, f"{c.tolerance:.1e}"
            proof.add_row(Text(what), c.dtype, ", ".join(map(str, batches)), *errors)
        yield proof
        if self.curve:
            columns = "asked", "measured", "the same", "error"
            curve = Table(*columns, title="Tried, on held-out inputs")
            for step in self.curve:
                asked, near = f"{step.measure}={step.share:.3f}", step.fidelity
                real = "" if step.observed is None else f"{step.observed:.3f}"
                same = "" if near.agreement is None else f"{near.agreement:.1%}"
                curve.add_row(asked, real, same, f"{near.error:.2%}")
            yield curve
        if self.fidelity is not None:
            yield Text(f"Beside the original, on held-out inputs: {self.fidelity}.")
        for name, each in self._timed():
            yield Text(f"{name}: {each}")
        yield from map(Text, self._in_blocks())
        if self.note:
            yield Text(self.note)


def _share(after: int, before: int, unit: str) -> str:
    return f"{after:,} of {before:,} {unit}" + (f" ({after / before:.1%})" if before else "")
