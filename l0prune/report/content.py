"""Data of a report: the schema of ``report.json``.

All of it is plain JSON. A section that a run did not record is absent (``null`` or empty), and the
page leaves it out. Amounts are numbers in the unit that their name says; shares are from 0 to 1.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from l0prune.data.preprocessing import Preprocessing
from l0prune.files.checked_json import Strict, checked
from l0prune.selection.fitted import Observation

VERSION = 1  # raised when older versions cannot read what this one writes


class Section(Strict):
    """A part of the report."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Pair(Section):
    """An amount before and after; ``before`` is null where nobody took it."""

    before: float | None
    after: float

    @property
    def share(self) -> float | None:
        """After over before."""
        return self.after / self.before if self.before else None


class Time(Pair):
    """Milliseconds of one call: lower quartiles of turns that the two networks took alternately.

    Attributes:
        before, after: of the dense network's file and of the small one's.
        spread: how far the middle half of the turns lie apart, in shares of their median.
        threads: that a call may use.
        batch: examples in a call.
        runtime, processor: where.
    """

    before: float
    spread: float
    threads: int
    batch: int
    runtime: str
    processor: str

    @property
    def is_undecided(self) -> bool:
        """Return whether the two differ by less than repeated timings of one of them."""
        return abs(self.after - self.before) < self.spread * self.before


class Metric(Section):
    """A metric on the test data, before and after.

    Attributes:
        name: ``error``, ``accuracy``, ``test_loss``, …
        larger_is_better: of it.
        before: of the network before its gates, null where it was not tested.
        after: of the small network.
        of_file: of the ONNX file, null where it was not tested.
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
    """A budget.

    Attributes:
        text: as the user gave it, such as ``macs=0.5``.
        limit: the share of the dense amount that it allows.
        share: the share that is left; as observed of the export, where it was.
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

    @property
    def passed(self) -> bool:
        """Return whether the error is within the tolerance."""
        return self.error <= self.tolerance


class Axis(Section):
    """A set of slots that live or die together, wherever they occur.

    Attributes:
        name, kind: as the survey has them.
        before, after: slots.
        kept: of heads, the numbers of those that stayed.
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
        axes: numbers of the axes (in ``Content.axes``) that can take some away. Layers whose
            sides have the same one are cut together.
        reason: why all or some of it stays whole; empty where nothing has to.
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
    """Bits of a layer's weight and of its input, which a training has learned."""

    name: str
    weight: int
    input: int


class CostState(Section):
    """Amounts of one measure: expected under the gates' noise, of an export, dense."""

    expected: float
    actual: float
    dense: float


class BudgetState(Section):
    """A budget at the end of an epoch, in shares of the dense amount.

    Attributes:
        limit: what is asked for.
        target: what has come down to it so far.
        share: what an export would have.
        multiplier: Lagrange's λ.
    """

    limit: float
    target: float
    share: float
    multiplier: float


class Epoch(Section):
    """Measurements at the end of an epoch; see ``l0prune.History``.

    Attributes:
        gates: how many gates there are in each bin of P(z ≠ 0), of equal width, from 0 to 1.
        training_macs: the share of MACs that all steps so far had, of what they have at the whole
            size of the network.
        doctor: what was wrong, by what it is about.
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
        filling: by axis, how many slots stay only since its slots come in whole blocks.
        looks: in their order, at each choice of which something was observed.
    """

    filling: dict[str, int] = Field(default_factory=dict)
    looks: list[Observation] = Field(default_factory=list)


class Training(Section):
    """One stage of training.

    Attributes:
        name: ``dense``, ``finetune``, ``recover``, ``round-1/finetune``, …
        metric, larger_is_better: what was tested beside the loss.
        planned: epochs that it was to have; null where that was not recorded.
        steps, warmup, settle: all of its steps, and those of its first and last phase.
        before: what the test said before the first step, with all gates out of the way.
        epochs: those that are done.
        fit: how its widths were chosen when the gates began to stand.
        facts: settings, seed, device, command and versions of that time.
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
        """Return whether all epochs are done, as far as is known."""
        return self.planned is None or len(self.epochs) >= self.planned


class OwnerTime(Section):
    """Milliseconds of one module, or of what is no module's, as a latency table predicts them.

    Attributes:
        name: of the module.
        before, after: of the dense network and of the small one.
        filling: of ``after``, for positions that no score asked for: slots that only fill whole
            blocks, and those that the runtime computes beyond them.
    """

    name: str
    before: float
    after: float
    filling: float = 0.0


class TimeByLayer(Section):
    """Milliseconds of a layer, by a latency table.

    Attributes:
        setting: runtime, threads and batch that the table is of.
        measured: milliseconds of the dense network when the table was made.
        quality: how well the table predicts, in words.
        owners: every module's part; together the whole time.
        timed: the small network's time over the dense one's, where the export timed both in
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
        """Milliseconds of ``after`` spent on slots that only fill whole blocks."""
        return sum(of.filling for of in self.owners)


class Run(Section):
    """One of several runs that are compared.

    Attributes:
        name: of its folder.
        page: its own report, as a link from this one.
        metric: what it is worth.
        costs: what it costs: ``params``, ``macs``, ``time`` (milliseconds).
    """

    name: str
    page: str
    metric: Metric | None = None
    costs: dict[str, Pair] = Field(default_factory=dict)


class StoredFile(Section):
    """A file that came of it: its name without folders, its size in bytes, its SHA-256."""

    name: str
    bytes: int
    sha256: str


class Repeat(Section):
    """Commands, versions and seed that repeat the run.

    Attributes:
        commands: that came before, from ``gate`` on, with model and weights.
        command: as it was typed; empty where none was.
        versions: of Python and packages.
        machine, device: that it ran on.
        seed: of training; null where nothing was trained.
        preprocessing: of the images that it learned from and was tested on; null where unknown.
        recipe: the recipe of the run, where it had one.
        files: that were written.
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
    """All that a page is made from.

    Attributes:
        version: of this format.
        kind: what the file is.
        title: the recipe's or the model's name.
        made: when, in UTC, as ISO 8601.
        gain: what came of it.
        budgets: asked and met.
        certificate: every comparison; empty where nothing was exported.
        notes: what else has to be known of the export.
        axes: that had gates.
        layers: in network order.
        trainings: in the order in which they were done.
        bits: that were learned, by layer.
        time: by layer.
        fit: how widths were chosen in one shot; that of a training is with it.
        repeat: how to do it again.
        about: of a ``run``; of a ``survey``, where ``after`` is what gates can take away; or of a
            ``sweep``, which has ``runs`` and nothing else.
        runs: those that a sweep compares.
        stopped: why it did not come to its end; empty where it did, or goes on.
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
    """The content of a ``report.json``.

    Raises:
        FileError: it is none, or damaged, or of a newer version.
    """
    return checked(text, Content, VERSION, where, ", or no report of l0prune")
