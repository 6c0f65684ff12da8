"""``l0prune finetune``: learn weights and gates together."""

from __future__ import annotations

from contextlib import nullcontext
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

import l0prune
from l0prune.cli import options
from l0prune.cli.evaluate import say_what_differs
from l0prune.cli.messages import announced, emit, err, say
from l0prune.cli.opening import (
    latency_table,
    load_data,
    recorded_data,
    recorded_tokenizer,
    with_commands,
    with_speed,
    with_step,
)
from l0prune.cli.options import key_values, with_settings
from l0prune.cli.project import defaults, newest, output_path
from l0prune.files.atomic import check_writable
from l0prune.plan.targets import TARGET
from l0prune.progress.display import shown

Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any further setting of l0prune.finetune as KEY=VALUE, e.g. --set clip=1.0.",
    ),
]
Run = Annotated[
    Path | None, typer.Option(help="Folder of checkpoints and metrics; default MODEL.run.")
]
Resume = Annotated[bool, typer.Option(help="Go on from the run folder's checkpoint.")]
Out = Annotated[Path | None, typer.Option(help="File to write; default MODEL.tuned.pt.")]


@with_settings(
    "loss", "metric", "lam", "budget", "measures", "round_to", "target", "counting", "penalty",
    "elements", "quantize", "bits", "epochs", "batch_size", "lr", "gate_lr", "optimizer", "learn",
    "start", "settle", "compact", "augment", "seed", "device", "distill", "autocast", "accumulate",
    "checkpointing", "compile", "channels_last", "distributed",
)  # fmt: skip
def finetune(
    file: options.GatedFile = None,
    data: options.DataSpec = None,
    data_root: options.DataRoot = None,
    tokenizer: options.Tokenizer = None,
    *,
    settings: dict[str, Any],
    faster: options.Faster = None,
    latency: options.Latency = None,
    setting: Setting = None,
    run: Run = None,
    resume: Resume = True,
    out: Out = None,
    report: options.WithReport = True,
    trust_pickle: options.TrustPickle = False,
    json: options.Json = False,
) -> None:
    """Fine-tune a gated model: weights and gates learn together, under a budget or a price λ.

    The same command resumes a stopped run. torchrun starts it on several GPUs.

    Examples:
        l0prune finetune --data imagefolder:DIR --budget macs=0.5 --epochs 20
        l0prune finetune --data prices.py:load --loss mse --budget latency=12ms
        torchrun --nproc-per-node 8 -m l0prune finetune --data mnist --lambda 0.1/N
    """
    given = {**settings, **key_values(setting, "clip=1.0")}
    of_project = defaults().get("finetune", {})
    inherited = {name: value for name, value in of_project.items() if name not in given}
    training_settings = {**inherited, **given}
    if faster is not None:
        training_settings["budget"] = with_speed(training_settings.get("budget"), faster)
    path = file or newest("*.gated.pt", command="l0prune gate MODEL")
    folder = run or output_path(None, str(path), ".run")
    target = output_path(out, str(path), ".tuned.pt")
    check_writable(target)
    from l0prune.report.live import live_page  # loads torch, as does the next one
    from l0prune.running.processes import process_group

    with process_group() as world:
        info = l0prune.read_info(path)
        spec, root = recorded_data(data, data_root, info, path, trust_pickle)
        model = l0prune.load(path, trust_pickle=trust_pickle)
        words = recorded_tokenizer(tokenizer, info, path, trust_pickle)
        needs = training_settings.get("learn") != "gates"  # gates alone learn the model's outputs
        named = spec, root, model, words
        source = world.first_then_all(lambda: load_data(*named, labelled=needs))
        known = source if hasattr(source, "train") else None
        if world.is_first and known is not None:
            say_what_differs(model, known, path)
        target_name = training_settings.get("target", TARGET)
        table = world.first_then_all(
            lambda: latency_table(
                latency, path, training_settings.get("budget"), model, target_name
            )
        )
        training_settings |= {} if table is None else {"latency": table}
        live = live_page(folder, path.name) if report else nullcontext()
        with shown(console=err), announced(say), live:
            history = l0prune.finetune(
                model, source, report=False, **training_settings, out=folder, resume=resume
            )
        more = [f"--set={name}={dumps(value)}" for name, value in inherited.items()]
        info = with_step(info, path, known, more, table, data=spec)
        info |= {"data": known.name if known else spec, "history": history.last}
        info |= {"tokenizer": words} if words else {}
        world.first_alone(lambda: l0prune.save(model, target, info))
    if world.is_first:
        say(f"checkpoints and metrics are in {folder}")
        if (share := history.last["training_macs"]) < 1:
            say(f"the steps had {share:.0%} of the MACs of steps at the whole size")
        result = {"file": str(target), "run": str(folder), **history.last}
        if report:
            made = with_commands(l0prune.Report.of(None, history, model=model, latency=table), info)
            page, _ = made.titled(path.name).save(folder / "report.html")
            result["page"] = str(page)
            say(f"the report is {page}")
        emit({**result, "doctor": history.complaints}, json, f"{target} written")
