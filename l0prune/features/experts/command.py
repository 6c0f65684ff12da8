"""``l0prune experts``: reduce the number of experts in mixtures of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import l0prune
from l0prune.cli import options
from l0prune.cli.messages import emit, err, say
from l0prune.cli.opening import load_data, open_model, recorded_data
from l0prune.cli.project import output_path
from l0prune.progress.display import shown

Experts = Annotated[int, typer.Option(min=1, help="Experts that each mixture keeps.")]
Score = Annotated[
    str,
    typer.Option(help="output (change of outputs), reap (share times output) or load (inputs)."),
]
Out = Annotated[Path | None, typer.Option(help="Folder to write; default MODEL.experts.")]


def experts(
    model: options.Model = None,
    model_option: options.ModelOption = None,
    weights: options.Weights = None,
    data: options.DataSpec = None,
    data_root: options.DataRoot = None,
    tokenizer: options.Tokenizer = None,
    experts: Experts = ...,  # type: ignore[assignment]
    score: Score = "output",
    samples: options.Samples = 64,
    batch_size: options.Batch = 8,
    seed: options.Seed = 0,
    out: Out = None,
    trust_pickle: options.TrustPickle = False,
    json: options.Json = False,
) -> None:
    """Reduce every mixture of experts in a model to fewer experts, by some inputs alone.

    Rows of the router and experts are removed; the result is proven to compute what the model
    computes if the removed experts are never chosen. The folder has the model and the former
    numbers of experts.

    Examples:
        l0prune experts transformers:DIR --data a.txt:512 --experts 6
        l0prune experts model.pt --data file.py:data --experts 4 --score reap
        l0prune experts model.pt --data file.py:data --experts 4 --out small
    """
    spec, module = open_model(model, model_option, weights, trust_pickle)
    named = recorded_data(data, data_root, {}, Path(spec), trust_pickle)
    source = load_data(*named, module, tokenizer, labelled=False)
    with shown(console=err):
        result = l0prune.shrink_experts(
            module,
            source,
            experts,
            score=score,
            samples=samples,
            batch_size=batch_size,
            seed=seed,
        )
        folder = output_path(out, spec, ".experts")
        result.save(folder)
    emit({"folder": str(folder), **result.to_dict()}, json, str(result))
    if not json:
        say(f"written: {folder}")
