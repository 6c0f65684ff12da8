"""``l0prune fit``: close gates by a score, without learning, until a budget is met."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import l0prune
from l0prune.cli import options
from l0prune.cli.messages import emit, err, say
from l0prune.cli.opening import (
    NO_DATA,
    latency_table,
    load_data,
    recorded_data,
    recorded_tokenizer,
    with_speed,
    with_step,
)
from l0prune.cli.options import with_settings
from l0prune.cli.project import newest, output_path
from l0prune.errors import L0pruneError, UsageError
from l0prune.progress.display import shown
from l0prune.progress.stages import stage
from l0prune.selection import fitted
from l0prune.training.gate_settings import GateSettings

_GATES, _AUTO = "gates", "auto"
_TESTED = 10_000  # largest number of test examples, as for ``auto``


Budget = Annotated[
    list[str] | None,
    typer.Option(help="macs=0.5, latency=12ms, 'layer3.*: params=0.3', 'conv1: width=0.5', …"),
]
Score = Annotated[
    str,
    typer.Option(
        help="Importance of a slot: magnitude, group-magnitude, bn-scale, taylor, fisher, "
        "outputs, ablation, random; gates, as learned; or auto: with data fisher for slots and "
        "ablation and the loss for branches, else magnitude."
    ),
]
Kind = Annotated[
    list[str] | None,
    typer.Option(
        help="Close gates of this kind of axis alone: channel, neuron, head, head_dim, group, "
        "input or branch (whole layers)."
    ),
]
Batches = Annotated[
    int | None,
    typer.Option(help="Batches of data, for scores that need data [all; auto: 100]."),
]
Compensate = Annotated[
    bool,
    typer.Option(
        "--compensate",
        help="Refit the remaining weights on the inputs of --data; without --score the slots are "
        "chosen by that, too. Without --budget all gates stay as they are.",
    ),
]
Out = Annotated[Path | None, typer.Option(help="File to write; default MODEL.fit.pt.")]


@with_settings("loss", "metric", "round_to", "target", "measures")
def fit(
    file: options.GatedFile = None,
    budget: Budget = None,
    score: Score = _AUTO,
    kind: Kind = None,
    faster: options.Faster = None,
    latency: options.Latency = None,
    data: options.DataSpec = None,
    data_root: options.DataRoot = None,
    tokenizer: options.Tokenizer = None,
    *,
    settings: dict[str, Any],
    compensate: Compensate = False,
    batches: Batches = None,
    seed: options.Seed = 0,
    out: Out = None,
    trust_pickle: options.TrustPickle = False,
    json: options.Json = False,
) -> None:
    """Close the gates of lowest score until an export just meets a budget; nothing is learned.

    This is one-shot pruning, after which the weights usually need training:
    `l0prune finetune MODEL.fit.pt --no-learn` keeps the gates as they are. With data, the model is
    tested before and after.

    Examples:
        l0prune fit --data mnist --budget macs=0.5
        l0prune fit --data mnist --kind branch --score ablation --budget macs=0.7
        l0prune fit MODEL.tuned.pt --data mnist --compensate
    """
    path = file or newest("*.gated.pt", command="l0prune gate MODEL")
    from l0prune.selection.fit import check_request  # loads torch

    info = l0prune.read_info(path)
    of_data = {name: settings.pop(name, None) for name in ("loss", "metric")}
    asked = GateSettings.of(settings)
    budget = with_speed(budget, faster)
    if not (budget or asked.rounds or latency is not None or compensate):
        raise UsageError("there is nothing to fit to: give --budget macs=0.5, or --round-to 8")
    missing = NO_DATA if compensate else None
    spec, root = recorded_data(data, data_root, info, path, trust_pickle, missing)
    model = l0prune.load(path, trust_pickle=trust_pickle)
    table = latency_table(latency, path, budget, model, asked.target)
    divides = compensate and score == _AUTO
    tells = score == _AUTO and spec is not None and bool(budget) and not (kind or compensate)
    request: dict[str, Any] = {"round_to": asked.round_to, "target": asked.target}
    request |= {"latency": table, "kinds": kind or ()}
    check_request(model, budget or None, **request, scored=score != _GATES, data=tells)
    words = recorded_tokenizer(tokenizer, info, path, trust_pickle)
    source = _labelled(model, load_data(spec, root, model, words, labelled=False), compensate)
    found: list[fitted.Fitted] = []
    with shown(console=err), fitted.watched(found.append):
        before = _tested(model, source, **of_data)
        how = _GATES if divides else score
        scores = _scores(model, how, source, batches, seed, of_data["loss"])
        by_data: dict[str, Any] = {"data": source, "compensate": True} if compensate else {}
        if tells:  # the data decides which branches are removed
            by_data = {"data": source, "loss": of_data["loss"]}
        counts = l0prune.fit(model, budget or None, scores, **request, **by_data)
        after = _tested(model, source, **of_data) if before else {}
    target = output_path(out, str(path), ".fit.pt")
    info = with_step(info, path, source, table=table, data=spec if source is not None else None)
    info |= {"tokenizer": words} if words else {}
    l0prune.save(model, target, {**info, "fitted": found[-1].to_dict()})
    axes = {axis.name: int(axis.open.sum()) for axis in l0prune.gates(model).axes}
    met = (f"{limit}: {_shown(limit, count)}" for limit, count in counts.items())
    said = "; ".join(filter(None, (f"{target} written", ", ".join(met))))
    result = {"file": str(target), "counts": counts, "open": axes, "before": before, "after": after}
    emit(result, json, f"{said}\n{_change(before, after)}" if after else said)


def _labelled(model: Any, source: Any, compensates: bool) -> Any:
    """Return the data; inputs alone with the model's own answers, unless they only compensate."""
    from l0prune.gating.attaching import bypass  # loads torch

    if source is None or hasattr(source, "train") or compensates:
        return source
    with bypass(model), stage("answering the inputs"):
        return l0prune.with_pseudo_labels(source, model)


def _scores(
    model: Any, how: str, source: Any, batches: int | None, seed: int, loss: str | None
) -> Any:
    """Return the scores of this name; None for the state that the gates have learned."""
    if how == _GATES:
        return None
    if how == _AUTO and source is None:
        say(f"no data is named (--data), so that {_AUTO} is magnitude")
        how = "magnitude"
    return l0prune.score(model, how, source, batches=batches, seed=seed, loss=loss)


def _tested(model: Any, source: Any, loss: str | None, metric: str | None) -> dict[str, float]:
    """Return loss, metric and number of test examples; empty without test data or on errors."""
    from l0prune.data.dataset import sampled  # loads torch, as do the next ones
    from l0prune.running.evaluate import evaluate_task
    from l0prune.running.task import Task, is_split

    task = Task.of(source, loss, metric) if hasattr(source, "train") else None
    if task is None or task.test is None:
        return {}
    if is_split(task.test):
        task = replace(task, test=sampled(task.test, _TESTED))
    try:
        with stage("testing the model"):
            found, examples = evaluate_task(model, task)
    except L0pruneError as error:
        say(f"warning: the model is not tested: {error}")
        return {}
    return {"examples": examples, **found}


def _change(before: dict[str, float], after: dict[str, float]) -> str:
    """Describe the change of the metric by a fit, or of the loss if there is none."""
    from l0prune.training.history import measured  # loads torch

    was, now = (", ".join(measured(found)) for found in (before, after))
    return f"on {after['examples']:,} test examples: {was} before, {now} after"


def _shown(limit: str, amount: float) -> str:
    """Format an amount in the unit of its measure."""
    from l0prune.plan.limits import limits  # loads torch
    from l0prune.plan.measures import kind_of

    (given,) = limits(limit)
    return kind_of(given.measure).show(amount)
