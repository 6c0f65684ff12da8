"""``l0prune vocabulary``: cut a language model's vocabulary to the tokens that a text needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import l0prune
from l0prune.cli import options
from l0prune.cli.messages import emit, err, say
from l0prune.cli.opening import open_model
from l0prune.cli.project import output_path
from l0prune.errors import UsageError
from l0prune.progress.display import shown

Text = Annotated[
    list[Path] | None,
    typer.Option(help="A file or folder of text whose tokens stay; may be repeated."),
]
Ids = Annotated[
    Path | None, typer.Option(help="A file of ids that stay, in place of a text or beside it.")
]
Size = Annotated[
    int | None,
    typer.Option(min=1, help="Size of the new vocabulary [as many tokens as occur in the text]."),
]
Out = Annotated[Path | None, typer.Option(help="Folder to write; default MODEL.vocabulary.")]


def vocabulary(
    model: options.Model = None,
    model_option: options.ModelOption = None,
    weights: options.Weights = None,
    text: Text = None,
    ids: Ids = None,
    size: Size = None,
    tokenizer: options.Tokenizer = None,
    input_: options.Input = None,
    out: Out = None,
    trust_pickle: options.TrustPickle = False,
    json: options.Json = False,
) -> None:
    """Cut a language model's vocabulary, and its tokenizer with it, to what a text needs.

    Rows of the embedding and of the head are removed, with their logits; all other logits stay
    exactly the same.
    The folder has the model, the tokenizer, and the former ids of its tokens.

    Examples:
        l0prune vocabulary transformers:DIR --text corpus.txt --size 8192
        l0prune vocabulary transformers:DIR --text docs/ --out small
        l0prune vocabulary transformers:DIR --ids ids.txt --tokenizer DIR
    """
    if not text and ids is None:
        raise UsageError("say which tokens stay: --text FILE, or --ids FILE")
    spec, module = open_model(model, model_option, weights, trust_pickle)
    with shown(console=err):
        result = l0prune.shrink_vocabulary(
            module,
            tokenizer,
            text=text,
            ids=None if ids is None else _read(ids),
            size=size,
            inputs=None if input_ is None else _example(input_),
        )
        folder = output_path(out, spec, ".vocabulary")
        result.save(folder)
    emit({"folder": str(folder), **result.to_dict()}, json, str(result))
    if not json:
        say(f"written: {folder}")


def _read(path: Path) -> list[int]:
    """Return the ids in a file: numbers separated by spaces, newlines or commas.

    Raises:
        UsageError: the file cannot be read, or holds something else.
    """
    try:
        words = path.read_text(encoding="utf-8").replace(",", " ").strip("[] \n").split()
        return [int(word) for word in words]
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no file of ids, such as 5, 17, 301: {error}") from error


def _example(text: str) -> Any:
    from l0prune.files.model_sources import parse_input  # loads torch

    args, kwargs = parse_input(text)
    if args and kwargs:
        raise UsageError(f"--input {text}: give all inputs by name, or none")
    return kwargs or args
