"""``l0prune gate``: put gates on a model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

import l0prune
from l0prune.cli.edge import emit
from l0prune.cli.options import (
    DataRoot,
    DataSpec,
    Dynamic,
    Input,
    Json,
    Model,
    ModelOption,
    TrustPickle,
    Weights,
    example_inputs,
    free_dims,
    load_data,
    open_model,
    parse_setting,
    with_step,
)
from l0prune.cli.project import chosen, output_path
from l0prune.errors import UsageError
from l0prune.files.consent import remember_root
from l0prune.gating import defaults


class KeepClass(StrEnum):
    """What ``--keep-class`` may be."""

    YES = "yes"
    NATIVE = "native"
    NO = "no"

    @property
    def setting(self) -> bool | Literal["native"]:
        """The argument of ``l0prune.gate``."""
        return "native" if self is KeepClass.NATIVE else self is KeepClass.YES


def gate(
    model: Model = None,
    model_option: ModelOption = None,
    weights: Weights = None,
    input: Input = None,
    dynamic: Dynamic = None,
    data: DataSpec = None,
    data_root: DataRoot = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Globs of axes and branches to gate.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Globs of those to leave whole.")
    ] = None,
    open_probability: Annotated[
        float, typer.Option(help="How likely a gate is open at first.")
    ] = defaults.OPEN_PROBABILITY,
    jitter: Annotated[
        float, typer.Option(help="Deviation of the noise on the gates' log α at first.")
    ] = defaults.JITTER,
    kind: Annotated[
        str,
        typer.Option("--gate", help="hard-concrete, continuous-sparsification or binary-concrete."),
    ] = defaults.KIND,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A setting of the gate as name=value, e.g. --set estimator=median."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the noise (--jitter).")] = defaults.SEED,
    keep_class: Annotated[
        KeepClass,
        typer.Option(
            help="Whether the export should be of the model's own class: yes; native, with no "
            "layers that torch does not have; or no."
        ),
    ] = KeepClass.YES,
    branches: Annotated[
        list[str] | None,
        typer.Option(
            help="Globs of the branches that get a gate of their own, so that all of a block can "
            "go; by default all that `survey` finds and --include and --exclude leave."
        ),
    ] = None,
    no_branches: Annotated[
        bool, typer.Option("--no-branches", help="Gates on widths alone: no whole block can go.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="File to write; default MODEL.gated.pt.")] = None,
    trust_pickle: TrustPickle = False,
    json: Json = False,
) -> None:
    """Put a gate on every channel, neuron, head and branch that can be cut, and save the model.

    Freshly gated the model gives the same answers as before. Example:

        l0prune gate model.pt --input 1x1x28x28
    """
    spec, module = open_model(model, model_option, weights, trust_pickle)
    from l0prune.files.user_code import is_rebuildable  # loads torch, as do the next ones
    from l0prune.gating.kinds.base import gate_of, gate_to_dict
    from l0prune.plan.branch import KIND

    if branches and no_branches:
        raise UsageError("--branches and --no-branches contradict each other: give one of them")
    chosen_gate = gate_of(kind, dict(map(parse_setting, setting or ())))
    data_spec = chosen(data, "data")
    root = chosen(data_root, "data_root")
    source = load_data(data_spec, root)
    example = example_inputs(input, source)
    found = l0prune.survey(module, *example, own_class=False)
    l0prune.gate(
        module,
        *example,
        dynamic_shapes=free_dims(dynamic),
        include=include or defaults.INCLUDE,
        exclude=exclude or defaults.EXCLUDE,
        open_probability=open_probability,
        jitter=jitter,
        seed=seed,
        keep_class=keep_class.setting,
        branches=False if no_branches else branches or defaults.BRANCHES,
        gate=chosen_gate,
        survey=found,
    )
    target = output_path(out, spec, ".gated.pt")
    given = {"model": spec, "data": data_spec, "data_root": root, "input": chosen(input, "input")}
    info = {"model": spec if is_rebuildable(spec) else None, "data": data_spec}
    info = with_step(info, source=source, **given)
    if data_root:
        info["data_root"] = str(data_root)
        remember_root(data_root)
    l0prune.save(module, target, {k: v for k, v in info.items() if v is not None})
    gates = l0prune.gates(module)
    branches_gated = sum(axis.kind == KIND for axis in gates.plan.axes)
    result = {
        "file": str(target),
        "kind": gate_to_dict(gates.gate),
        "gates": gates.plan.size,
        "axes": len(gates.plan.axes),
        "branches": branches_gated,
        "params": found.params,
        "macs": found.macs,
    }
    whole = f", {branches_gated} of them whole branches" if branches_gated else ""
    emit(result, json, f"{target}: {gates.plan.size:,} gates on {len(gates.plan.axes)} axes{whole}")
