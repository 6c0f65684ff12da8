"""Data of a report: the schema of ``report.json``.

The data is plain JSON. A section that a run did not record is absent (``null`` or empty), and the
page leaves it out. Amounts are numbers in the unit that their name states; shares are from 0 to 1.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from l0prune.data.preprocessing import Preprocessing
from l0prune.files.checked_json import Strict, checked
from l0prune.selection.fitted import Observation

VERSION = 1  # raised when older versions cannot read what this one writes


class Section(Strict):
    """Base class of the report's parts, which are strict and without nan or inf."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Pair(Section):
    """Amount before and after; ``before`` is null if it was not measured."""

    before: float | None
    after: float

    @property
    def share(self) -> float | None:
        """After over before."""
        return self.after / self.before if self.before else None


class Time(Pair):
    """Milliseconds of one call: lower quartiles of alternating timings of the two networks.

    Attributes:
        before, after: of the dense network's file and of the small one's.
        spread: interquartile range of the timings' ratios, as a share of their median.
        threads: threads that a call may use.
        batch: examples in a call.
        runtime, processor: setting of the timings.
        asked: the budgets that the gates met, as text.
        ideal: the speedup by MACs; null if unknown.
        losses: the layers that lose most, in words, where it is less than 0.8 of the ideal.
        advice: what can help then.
    """

    before: float
    spread: float
    threads: int
    batch: int
    runtime: str
    processor: str
    asked: list[str] = Field(default_factory=list)
    ideal: float | None = None
    losses: list[str] = Field(default_factory=list)
    advice: list[str] = Field(default_factory=list)

    @property
    def is_undecided(self) -> bool:
        """Return whether the two differ by less than repeated timings of one of them."""
        return abs(self.after - self.before) < self.spread * self.before


class Metric(Section):
    """A metric on the test data, before and after.

    Attributes:
        name: ``error``, ``accuracy``, ``test_loss``, …
        larger_is_better: whether larger values of the metric are better.
        before: value of the network before it was gated; null if not tested.
        after: value of the small network.
        of_file: value of the ONNX file; null if not tested.
    """

    name: str
    larger_is_better: bool = False
    before: float | None = None
    after: float
    of_file: float | None = None


class Gain(Section):
    """Gains and costs of a run; null where not recorded.

    Attributes:
        params: parameters.
        macs: multiply-accumulates of one example (1 MAC = 2 FLOPs).
        bytes: of the ONNX file, with its weights.
        time: of a call.
        metric: on the test data.
        seconds: of training, all stages together.
    """

    params: Pair | None = None
    macs: Pair | None = None
    bytes: Pair | None = None
    time: Time | None = None
    metric: Metric | None = None
    seconds: float | None = None


class BudgetResult(Section):
    """Budget and the share that was reached.

    Attributes:
        text: as the user gave it, such as ``macs=0.5``.
        limit: the share of the dense amount that the budget allows.
        share: the share that is left; observed of the export if it was, else predicted.
    """

    text: str
    limit: float
    share: float

    @property
    def met(self) -> bool:
        """Return whether the budget is met."""
        return self.share <= self.limit * (1 + 1e-9)


class Comparison(Section):
    """One comparison of the certificate: see ``l0prune.Certificate``."""

    what: str
    dtype: str
    batch: int
    error: float
    tolerance: float
    part: str = ""
    inputs: list[list[int]] = Field(default_factory=list)
    outputs: dict[str, float] = Field(default_factory=dict)
    against: str = "gated"
    rounding: float | None = None

    @property
    def passed(self) -> bool:
        """Return whether the error is within the tolerance."""
        return self.error <= self.tolerance


class Axis(Section):
    """Axis of slots that had gates.

    Attributes:
        name, kind: as in the survey.
        before, after: numbers of slots.
        kept: indices of the kept slots, if these are heads.
    """

    name: str
    kind: str
    before: int
    after: int
    kept: list[int] | None = None


class SideChange(Section):
    """The input or the output side of a layer.

    Attributes:
        before, after: neurons or channels.
        axes: indices in ``Content.axes`` of the axes by which the side can be cut. Sides of layers
            with the same axis are cut together.
        reason: why all or some of the side stays whole; empty if none has to.
    """

    before: int
    after: int
    axes: list[int] = Field(default_factory=list)
    reason: str = ""


class LayerChange(Section):
    """A Linear, a convolution, an embedding, or a parameter that acts as one."""

    name: str
    kind: str
    input: SideChange
    output: SideChange
    params: Pair
    macs: Pair


class LayerBits(Section):
    """Learned bits of a layer's weight and of its input."""

    name: str
    weight: int
    input: int


class CostState(Section):
    """Amounts of one measure: expected under the gates' noise, after an export, dense."""

    expected: float
    actual: float
    dense: float


class BudgetState(Section):
    """A budget at the end of an epoch, in shares of the dense amount.

    Attributes:
        limit: the share that the budget allows.
        target: the current target, which decreases to ``limit``.
        share: the share of an export.
        multiplier: Lagrange multiplier λ.
    """

    limit: float
    target: float
    share: float
    multiplier: float


class Epoch(Section):
    """Measurements at the end of an epoch; see ``l0prune.History``.

    Attributes:
        gates: number of gates in each bin of P(z ≠ 0), of equal width, from 0 to 1.
        training_macs: MACs of all steps so far over those at the network's full size.
        doctor: the doctor's remarks, by subject.
    """

    epoch: int
    step: int
    phase: str
    seconds: float | None = None
    lr: float | None = None
    train_loss: float | None = None
    penalty: float | None = None
    test_loss: float | None = None
    metric: float | None = None
    amounts: dict[str, CostState] = Field(default_factory=dict)
    budgets: dict[str, BudgetState] = Field(default_factory=dict)
    gates: list[int] = Field(default_factory=list)
    training_macs: float | None = None
    doctor: dict[str, str] = Field(default_factory=dict)


class Fit(Section):
    """Choice of widths by ``fit``.

    Attributes:
        filling: number of slots kept only to fill whole blocks, by axis.
        looks: observations of tried choices of widths, in order.
    """

    filling: dict[str, int] = Field(default_factory=dict)
    looks: list[Observation] = Field(default_factory=list)


class Training(Section):
    """One stage of training.

    Attributes:
        name: ``dense``, ``finetune``, ``recover``, ``round-1/finetune``, …
        metric, larger_is_better: the metric that was tested beside the loss.
        planned: planned number of epochs; null if not recorded.
        steps, warmup, settle: numbers of all steps, and of those of the first and last phase.
        before: test results before the first step, without gates.
        epochs: the finished epochs.
        fit: choice of the widths at the time when gates were fixed.
        facts: settings, seed, device, command and versions of the training.
    """

    name: str
    metric: str = ""
    larger_is_better: bool = False
    planned: int | None = None
    steps: int | None = None
    warmup: int | None = None
    settle: int | None = None
    before: dict[str, float] = Field(default_factory=dict)
    epochs: list[Epoch]
    fit: Fit | None = None
    facts: dict[str, Any] = Field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Return whether all planned epochs are done; True if their number is unknown."""
        return self.planned is None or len(self.epochs) >= self.planned


class OwnerTime(Section):
    """Milliseconds of one module, or of the runtime itself, as predicted by a latency table.

    Attributes:
        name: path of the module.
        before, after: milliseconds in the dense network and in the small one.
        filling: part of ``after`` for positions that no score asked for: slots that only fill
            whole blocks, and those that the runtime computes beyond them.
    """

    name: str
    before: float
    after: float
    filling: float = 0.0


class TimeByLayer(Section):
    """Milliseconds of each layer, by a latency table.

    Attributes:
        setting: runtime, threads and batch of the table.
        measured: milliseconds of the dense network when the table was made.
        quality: errors of the table's prediction, in words.
        owners: part of every module; the sum is the whole time.
        timed: the small network's time over the dense one's, if the export timed both in
            this setting.
    """

    setting: str
    measured: float
    quality: str
    owners: list[OwnerTime]
    timed: float | None = None

    @property
    def before(self) -> float:
        """Milliseconds of the dense network, as predicted."""
        return sum(of.before for of in self.owners)

    @property
    def after(self) -> float:
        """Milliseconds of the small network, as predicted."""
        return sum(of.after for of in self.owners)

    @property
    def filling(self) -> float:
        """Milliseconds of ``after`` spent on positions that only fill whole blocks."""
        return sum(of.filling for of in self.owners)


class Run(Section):
    """Run in a comparison of several.

    Attributes:
        name: path of the run's folder.
        page: link from this report to that of the run.
        metric: test metric of the run.
        costs: amounts by name: ``params``, ``macs``, ``time`` (milliseconds).
    """

    name: str
    page: str
    metric: Metric | None = None
    costs: dict[str, Pair] = Field(default_factory=dict)


class StoredFile(Section):
    """File that was written: its name without folders, its size in bytes, its SHA-256."""

    name: str
    bytes: int
    sha256: str


class Repeat(Section):
    """Commands, versions and seed that repeat the run.

    Attributes:
        commands: earlier commands, from ``gate`` on, with model and weights.
        command: command of the run as typed; empty if there was none.
        versions: versions of Python and packages.
        machine, device: machine and device of the run.
        seed: seed of training; null if nothing was trained.
        preprocessing: preprocessing of training and test images; null if unknown.
        recipe: recipe of the run, if any.
        files: files that were written.
    """

    commands: list[str] = Field(default_factory=list)
    command: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    machine: str = ""
    device: str = ""
    seed: int | None = None
    preprocessing: Preprocessing | None = None
    recipe: dict[str, Any] | None = None
    files: list[StoredFile] = Field(default_factory=list)


class Content(Section):
    """Whole data of a report, from which its page is made.

    Attributes:
        version: version of this format.
        kind: mark of the file's format.
        title: the recipe's or the model's name.
        made: time of writing, in UTC, as ISO 8601.
        gain: gains and costs.
        budgets: requested and reached budgets.
        certificate: every comparison; empty if nothing was exported.
        notes: remarks on the export.
        axes: axes that had gates.
        layers: layers in network order.
        trainings: trainings in the order of their execution.
        bits: learned bits by layer.
        time: time by layer.
        fit: choice of the widths in one shot; that of a training is in ``trainings``.
        repeat: instructions to repeat the run.
        about: a ``run``; a ``survey``, where ``after`` is what gates can remove; or a ``sweep``,
            which has ``runs`` and nothing else.
        runs: the runs that a sweep compares.
        stopped: why the run failed; empty if it ended or still goes on.
    """

    version: int = VERSION
    kind: Literal["l0prune report"] = "l0prune report"
    title: str
    made: str
    gain: Gain = Field(default_factory=Gain)
    budgets: list[BudgetResult] = Field(default_factory=list)
    certificate: list[Comparison] = Field(default_factory=list)
    notes: str = ""
    axes: list[Axis] = Field(default_factory=list)
    layers: list[LayerChange] = Field(default_factory=list)
    trainings: list[Training] = Field(default_factory=list)
    bits: list[LayerBits] = Field(default_factory=list)
    time: TimeByLayer | None = None
    fit: Fit | None = None
    repeat: Repeat = Field(default_factory=Repeat)
    about: Literal["run", "survey", "sweep"] = "run"
    runs: list[Run] = Field(default_factory=list)
    stopped: str = ""


def parsed(text: str | bytes, where: object) -> Content:
    """Parse the content of a ``report.json``.

    Raises:
        FileError: the text is no report, or damaged, or of a newer version.
    """
    return checked(text, Content, VERSION, where, ", or no report of l0prune")
