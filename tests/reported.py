"""A report as data, with something in every section."""

from l0prune.report.content import (
    Axis,
    BudgetResult,
    BudgetState,
    Comparison,
    Content,
    CostState,
    Epoch,
    Fit,
    Gain,
    LayerChange,
    Metric,
    OwnerTime,
    Pair,
    Repeat,
    SideChange,
    StoredFile,
    Time,
    TimeByLayer,
    Training,
)
from l0prune.selection.fitted import Observation


def layer(name, before=8, after=3, axes=(0,), reason=""):
    side = SideChange(before=before, after=after, axes=list(axes), reason=reason)
    return LayerChange(
        name=name,
        kind="Conv2d",
        input=SideChange(before=4, after=4, reason="it is the model's input"),
        output=side,
        params=Pair(before=100, after=40),
        macs=Pair(before=1000, after=400),
    )


def owner(name, before, after, filling=0.0):
    return OwnerTime(name=name, before=before, after=after, filling=filling)


def look(predicted, observed, chosen=False):
    return Observation(
        budget="latency=0.5",
        dense=8.0,
        allowed=4.0,
        predicted=predicted,
        observed=observed,
        chosen=chosen,
    )


def epoch(number, phase="prune", **more):
    return Epoch(
        epoch=number,
        step=10 * number,
        phase=phase,
        seconds=1.5,
        train_loss=1 / number,
        test_loss=2 / number,
        metric=0.5 / number,
        amounts={"macs": CostState(expected=700, actual=650, dense=1000)},
        budgets={"macs=0.5": BudgetState(limit=0.5, target=0.6, share=0.65, multiplier=2.5)},
        gates=[5, 0, 1, *[0] * 16, 4],
        **more,
    )


def content(name="conv1", **changes):
    """The report of a run, in which all that has a name is called this."""
    checks = [
        Comparison(what=what, dtype="float32", batch=batch, error=error, tolerance=1e-5, part=part)
        for what, part in (("class", ""), ("onnx", name))
        for batch, error in ((1, 0.0), (2, 3e-7))
    ]
    training = Training(
        name=name,
        metric="error",
        planned=3,
        steps=30,
        warmup=5,
        settle=10,
        before={"error": 0.125},
        epochs=[epoch(1, "warm-up"), epoch(2, doctor={"stuck": name}), epoch(3, "settle")],
        fit=Fit(filling={name: 2}, looks=[look(4.0, 4.4), look(3.7, 3.9, chosen=True)]),
        facts={"settings": {"data": name}},
    )
    made = {
        "title": name,
        "made": "2026-01-02T03:04:05+00:00",
        "gain": Gain(
            params=Pair(before=1234567, after=345678),
            macs=Pair(before=1000, after=400),
            bytes=Pair(before=5_000_000, after=1_250_000),
            time=Time(before=8.0, after=2.5, spread=0.02, threads=1, batch=1, runtime=name,
                      processor=name),
            metric=Metric(name="error", before=0.125, after=0.16667, of_file=0.16667),
            seconds=4.5,
        ),
        "budgets": [BudgetResult(text="macs=0.5", limit=0.5, share=0.4)],
        "certificate": checks,
        "notes": name,
        "axes": [
            Axis(name=name, kind="channel", before=8, after=3),
            Axis(name=name, kind="head", before=4, after=2, kept=[0, 3]),
        ],
        "layers": [layer(name), layer(name + ".b"), layer("last", 10, 10, (), "it feeds " + name)],
        "trainings": [training],
        "time": TimeByLayer(
            setting=name,
            measured=8.1,
            quality="predicts well",
            owners=[owner(name, 5, 1, 0.25), owner("b", 3, 1.5)],
            timed=0.3125,
        ),
        "repeat": Repeat(
            command=f"l0prune run {name}",
            versions={"torch": "2.15.0"},
            seed=7,
            recipe={"name": name},
            files=[StoredFile(name=name, bytes=1_250_000, sha256="ab" * 32)],
        ),
    }  # fmt: skip
    return Content(**{**made, **changes})
