"""``l0prune survey`` and ``l0prune gate``: list the possible cuts, and add gates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import l0prune
from l0prune.cli import options
from l0prune.cli.messages import emit, say
from l0prune.cli.more import Extras
from l0prune.cli.opening import (
    example_inputs,
    free_dims,
    load_data,
    open_model,
    say_of_lengths,
    with_step,
)
from l0prune.cli.options import key_values
from l0prune.cli.project import chosen, output_path
from l0prune.errors import UsageError
from l0prune.files.consent import remember_root
from l0prune.gating import defaults

Html = Annotated[
    Path | None, typer.Option(help="Write the survey as this page, and its data as JSON beside it.")
]
Include = Annotated[list[str] | None, typer.Option(help="Globs of axes and branches to gate.")]
KeepLayers = Annotated[
    list[str] | None,
    typer.Option("--keep", help="Paths or globs of layers to leave whole: inputs and outputs."),
]
OpenProbability = Annotated[float, typer.Option(help="Initial probability that a gate is open.")]
Jitter = Annotated[
    float, typer.Option(help="Standard deviation of the noise on the initial log α.")
]
Kind = Annotated[
    str,
    typer.Option("--gate", help="hard-concrete, continuous-sparsification or binary-concrete."),
]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of the gate as KEY=VALUE, e.g. --set estimator=median."),
]
Keep = Annotated[
    Literal["yes", "native", "no"],
    typer.Option(
        help="Keep the model's own class in the export: yes; native, with layers of torch only; "
        "or no."
    ),
]
Branches = Annotated[
    list[str] | None,
    typer.Option(
        help="Globs of the branches that get a gate of their own, so that whole blocks can be "
        "removed; by default all that `survey` finds and --include and --exclude leave."
    ),
]
NoBranches = Annotated[
    bool, typer.Option("--no-branches", help="Gates on widths only: no whole block is removed.")
]
Out = Annotated[Path | None, typer.Option(help="File to write; default MODEL.gated.pt.")]


def survey(
    model: options.Model = None,
    model_option: options.ModelOption = None,
    weights: options.Weights = None,
    input: options.Input = None,
    dynamic: options.Dynamic = None,
    data: options.DataSpec = None,
    data_root: options.DataRoot = None,
    tokenizer: options.Tokenizer = None,
    html: Html = None,
    trust_pickle: options.TrustPickle = False,
    json: options.Json = False,
) -> None:
    """Show what can be cut out of each layer of a model, and why the rest cannot.

    The model stays as it is.

    Examples:
        l0prune survey model.pt
        l0prune survey net.py:build --weights net.pt --input 2x16:int64
        l0prune survey model.pt --data imagefolder:DIR --html survey.html
    """
    spec_of_model, module = open_model(model, model_option, weights, trust_pickle)
    spec = chosen(data, "data") if input is None else None
    named = spec, chosen(data_root, "data_root"), module, chosen(tokenizer, "tokenizer")
    source = load_data(*named, labelled=False)
    shapes = free_dims(dynamic, None if input else module)
    _, example = example_inputs(input, source, module)
    found = l0prune.survey(module, *example, dynamic_shapes=shapes)
    result = found.to_dict()
    if html is not None:
        page, _ = l0prune.Report.of_survey(found).titled(spec_of_model).save(html)
        result["page"] = str(page)
        say(f"the report is {page}")
    emit(result, json, found)


def gate(
    model: options.Model = None,
    model_option: options.ModelOption = None,
    weights: options.Weights = None,
    input: options.Input = None,
    dynamic: options.Dynamic = None,
    data: options.DataSpec = None,
    data_root: options.DataRoot = None,
    tokenizer: options.Tokenizer = None,
    include: Include = None,
    exclude: options.Exclude = None,
    keep: KeepLayers = None,
    open_probability: OpenProbability = defaults.OPEN_PROBABILITY,
    jitter: Jitter = defaults.JITTER,
    kind: Kind = defaults.KIND,
    setting: Setting = None,
    seed: options.Seed = defaults.SEED,
    keep_class: Keep = "yes",
    branches: Branches = None,
    no_branches: NoBranches = False,
    uniform: options.Uniform = defaults.UNIFORM,
    loadable_by: options.LoadableBy = defaults.LOADABLE_BY,
    outputs: options.Outputs = None,
    extras: Extras = (),
    out: Out = None,
    trust_pickle: options.TrustPickle = False,
    json: options.Json = False,
) -> None:
    """Put a gate on every channel, neuron, head and branch that can be cut, and save the model.

    The gates start open: the gated model gives the same answers as before.

    Examples:
        l0prune gate model.pt
        l0prune gate net.py:build --weights net.pt --data imagefolder:DIR
        l0prune gate model.pt --input 1x3x224x224 --exclude 'layer1.*' --no-branches
    """
    spec, module = open_model(model, model_option, weights, trust_pickle)
    if branches and no_branches:
        raise UsageError("--branches and --no-branches contradict each other: give one of them")
    chosen_gate = _gate(kind, setting)
    data_spec, root = chosen(data, "data"), chosen(data_root, "data_root")
    source = load_data(data_spec, root, module, chosen(tokenizer, "tokenizer"), labelled=False)
    text, example = example_inputs(input, source, module)
    for extra in extras:
        module = extra(module, example)
    shapes = free_dims(dynamic, None if input else module)
    if shapes is None:
        say_of_lengths(module, example)
    found = l0prune.survey(module, *example, own_class=False)
    l0prune.gate(
        module,
        *example,
        dynamic_shapes=shapes,
        include=include or defaults.INCLUDE,
        exclude=exclude or defaults.EXCLUDE,
        keep=keep or defaults.KEEP,
        open_probability=open_probability,
        jitter=jitter,
        seed=seed,
        keep_class="native" if keep_class == "native" else keep_class == "yes",
        branches=False if no_branches else branches or defaults.BRANCHES,
        uniform=uniform,
        loadable_by=loadable_by,
        outputs=outputs or defaults.OUTPUTS,
        gate=chosen_gate,
        survey=found,
    )
    given = {"model": spec, "data": data_spec, "data_root": root, "input": text}
    named = {"data": data_spec, "data_root": data_root, "input": text, "tokenizer": tokenizer}
    target = output_path(out, spec, ".gated.pt")
    l0prune.save(module, target, with_step(_origin(spec, named), source=source, **given))
    result = {"file": str(target)} | ({"input": text} if text else {}) | _summary(module, found)
    emit(result, json, _said(result))


def _gate(kind: str, settings: list[str] | None) -> Any:
    from l0prune.gating.kinds.base import gate_of  # loads torch

    return gate_of(kind, key_values(settings, "estimator=median"))


def _origin(spec: str, named: dict[str, Any]) -> dict[str, str]:
    """Return the model's spec and the names of its data, to be stored in its file."""
    from l0prune.files.user_code import is_rebuildable  # loads torch

    if named["data_root"]:
        remember_root(named["data_root"])
    found = {name: str(value) for name, value in named.items() if value}
    return found | ({"model": spec} if is_rebuildable(spec) else {})


def _said(result: dict[str, Any]) -> str:
    branches = f", {result['branches']} of them whole branches" if result["branches"] else ""
    return (
        f"{result['file']}: {result['gates']:,} gates, factors that training can close, on "
        f"{result['axes']} axes{branches}; next: l0prune finetune"
    )


def _summary(model: Any, found: l0prune.Survey) -> dict[str, Any]:
    """Return the kind and counts of a model's gates, and the model's size before any closes."""
    from l0prune.gating.kinds.base import gate_to_dict
    from l0prune.plan.branch import KIND

    gates = l0prune.gates(model)
    return {
        "kind": gate_to_dict(gates.gate),
        "gates": gates.plan.size,
        "axes": len(gates.plan.axes),
        "branches": sum(axis.kind == KIND for axis in gates.plan.axes),
        "params": found.params,
        "macs": found.macs,
    }
