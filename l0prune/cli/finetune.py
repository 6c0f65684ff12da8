"""``l0prune finetune``: learn weights and gates together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import l0prune
from l0prune.cli.edge import emit, say
from l0prune.cli.options import DataRoot, DataSpec, Json, TrustPickle, parse_setting, recorded_data
from l0prune.cli.project import defaults, newest, output_path
from l0prune.errors import UsageError

_SETTINGS_HELP = "Any further setting of l0prune.finetune as name=value, e.g. --set clip=1.0."


def finetune(
    file: Annotated[
        Path | None, typer.Argument(help="A gated model; default: the newest *.gated.pt here.")
    ] = None,
    data: DataSpec = None,
    data_root: DataRoot = None,
    lam: Annotated[
        str | None,
        typer.Option("--lambda", help="λ in N examples: 0.1/N, aic, bic, 'conv*=10/N,*=0.1/N'."),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            help="What the exported model may cost: macs=0.5, params=10k, 'layer3.*: params=0.3'. "
            "Several: give it again. Without --lambda nothing else closes gates."
        ),
    ] = None,
    round_to: Annotated[
        int | None, typer.Option(help="Widths come in multiples of this, within the budget [1].")
    ] = None,
    counting: Annotated[
        str | None, typer.Option(help="joint: exact E‖θ‖₀; groups: the paper's eq. 16.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data [10].")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples a step, of all processes [100].")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the weights [1e-3].")] = None,
    gate_lr: Annotated[
        float | None, typer.Option(help="Learning rate of the gates [chosen by the steps].")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="adam, adamw or sgd.")] = None,
    learn: Annotated[
        bool | None,
        typer.Option(help="Let gates learn, or leave them as `l0prune fit` set them [learn]."),
    ] = None,
    settle: Annotated[
        float | None, typer.Option(help="Epochs at the end with fixed gates [30 %].")
    ] = None,
    augment: Annotated[
        bool | None,
        typer.Option(help="Vary training images at random, in the data source's way [no-augment]."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of data order and noise [0].")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 … [auto].")] = None,
    distill: Annotated[
        float | None,
        typer.Option(help="Share of the loss, 0 to 1, for giving what the dense network gave [0]."),
    ] = None,
    autocast: Annotated[str | None, typer.Option(help="bf16 or fp16.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Work a step's examples through in so many parts [1].")
    ] = None,
    checkpointing: Annotated[
        bool | None, typer.Option(help="Less memory, a third more work: blocks computed twice.")
    ] = None,
    compile: Annotated[bool | None, typer.Option(help="Faster steps by torch.compile.")] = None,
    channels_last: Annotated[
        bool | None, typer.Option(help="Images channels last in memory: faster on GPUs in bf16.")
    ] = None,
    distributed: Annotated[
        str | None,
        typer.Option(help="Under torchrun: ddp, the whole model in each process; fsdp, a part."),
    ] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help=_SETTINGS_HELP)] = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder of checkpoints and metrics; default MODEL.run.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the run folder's checkpoint.")] = True,
    out: Annotated[Path | None, typer.Option(help="File to write; default MODEL.tuned.pt.")] = None,
    trust_pickle: TrustPickle = False,
    json: Json = False,
) -> None:
    """Fine-tune a gated model: weights and gates learn together, under a budget or a price λ.

    A run that was stopped goes on when the same command is given again. Examples:

        l0prune finetune --data mnist --budget macs=0.5

        l0prune finetune --data mnist --lambda 0.1/N

    On several GPUs, which share the examples of each step:

        torchrun --nproc-per-node 8 -m l0prune finetune --data imagefolder:DIR --batch-size 1024
    """
    given = {
        "lam": lam,
        "budget": budget or None,
        "round_to": round_to,
        "counting": counting,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "gate_lr": gate_lr,
        "optimizer": optimizer,
        "learn": learn,
        "settle": settle,
        "augment": augment,
        "seed": seed,
        "device": device,
        "autocast": autocast,
        "distill": distill,
        "accumulate": accumulate,
        "checkpointing": checkpointing,
        "compile": compile,
        "channels_last": channels_last,
        "distributed": distributed,
    }
    settings = dict(defaults().get("finetune", {}))
    settings |= {name: value for name, value in given.items() if value is not None}
    settings |= dict(map(parse_setting, setting or ()))
    path = file or newest("*.gated.pt", command="l0prune gate MODEL --input …")
    folder = run or output_path(None, str(path), ".run")
    target = output_path(out, str(path), ".tuned.pt")
    from l0prune.running.processes import joined  # loads torch

    with joined() as world:
        info = l0prune.read_info(path)
        spec, root = recorded_data(data, data_root, info, path, trust_pickle)
        if spec is None:
            raise UsageError(
                "no data is named: give --data mnist, imagefolder:DIR or file.py:function here, at "
                '`l0prune gate`, or as data = "…" in l0prune.toml.'
            )
        source = world.first_then_all(lambda: l0prune.load_data(spec, root))
        model = l0prune.load(path, trust_pickle=trust_pickle)
        history = l0prune.finetune(model, source, **settings, out=folder, resume=resume)
        info = {**info, "data": source.name, "history": history.last}
        world.first_alone(lambda: l0prune.save(model, target, info))
    if world.is_first:
        say(f"checkpoints and metrics are in {folder}")
        result = {"file": str(target), "run": str(folder), **history.last}
        emit({**result, "doctor": history.complaints}, json, f"{target} written")
