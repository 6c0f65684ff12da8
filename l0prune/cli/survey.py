"""``l0prune survey``: what could be cut, without changing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import l0prune
from l0prune.cli.edge import emit, say
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
)
from l0prune.cli.project import chosen


def survey(
    model: Model = None,
    model_option: ModelOption = None,
    weights: Weights = None,
    input: Input = None,
    dynamic: Dynamic = None,
    data: DataSpec = None,
    data_root: DataRoot = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the survey as this page, and its data as JSON beside it."),
    ] = None,
    trust_pickle: TrustPickle = False,
    json: Json = False,
) -> None:
    """Show what can be cut out of each layer of a model, and why the rest cannot.

    The model stays as it is. Example:

        l0prune survey torchvision:resnet18 --input 1x3x224x224
    """
    spec_of_model, module = open_model(model, model_option, weights, trust_pickle)
    spec = chosen(data, "data") if input is None else None
    source = load_data(spec, chosen(data_root, "data_root"))
    example, shapes = example_inputs(input, source), free_dims(dynamic)
    found = l0prune.survey(module, *example, dynamic_shapes=shapes)
    result = found.to_dict()
    if html is not None:
        page, _ = l0prune.Report.of_survey(found).titled(spec_of_model).save(html)
        result["page"] = str(page)
        say(f"the report is {page}")
    emit(result, json, found)
