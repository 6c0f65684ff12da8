"""Text files: for language models cut into windows of equal length, else line by line."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from l0prune.capture.copying import copied
from l0prune.capture.model_checks import same_draws
from l0prune.capture.threads import muted
from l0prune.capture.undisturbed import trying
from l0prune.errors import DataError, UsageError, first_line

WINDOW = 1024
SUFFIX = ".txt"
_HELD_OUT = 8  # for the test: every eighth file, or the last eighth of the windows of fewer files
_BETWEEN = "\n\n"  # separator of two texts
_PROBE = "a"  # text that is tokenized to find the special tokens around every text

Tokenizer = Callable[..., Any]


def windows(texts: Sequence[str], tokenizer: Tokenizer, length: int = WINDOW) -> Tensor:
    """Tokenize the concatenated texts and cut them into windows.

    Every window begins and ends with the tokens that the tokenizer by default puts around a text
    (such as BOS, or [CLS] and [SEP]) and is full, so that there is no padding: the remainder at the
    end is dropped. A blank line separates texts.

    Shape: ``(windows, length)``, int64; a single shorter window if the text does not fill one.
    """
    before, after = _around(tokenizer)
    inner = length - len(before) - len(after)
    if inner < 2:
        raise UsageError(
            f"windows of {length} tokens have no place for text: give at least {length - inner + 2}"
        )
    joined = _BETWEEN.join(texts)
    ids = torch.tensor(_ids(tokenizer, joined, add_special_tokens=False), dtype=torch.int64)
    if len(ids) < 2:
        raise DataError("the text is empty: it has fewer than two tokens")
    rows = ids[: len(ids) // inner * inner].view(-1, inner) if len(ids) >= inner else ids[None]
    ends = (torch.tensor(each, dtype=torch.int64).expand(len(rows), -1) for each in (before, after))
    first, last = ends
    return torch.cat([first, rows, last], 1)


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer puts before and after a text by default."""
    whole, plain = _ids(tokenizer, _PROBE), _ids(tokenizer, _PROBE, add_special_tokens=False)
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []


def _ids(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
    with muted():  # it warns of texts longer than the model takes at once
        return list(tokenizer(text, **options)["input_ids"])


def source_of(spec: str) -> tuple[list[Path], int] | None:
    """Return the paths and window length of a text source; None if the spec is none.

    A text source is ``text:PATH``, or a path alone if it ends in ``.txt`` or is a folder with such
    files; or two of them with a comma; each followed by ``:512`` for windows of 512 tokens.
    """
    named, _, size = spec.rpartition(":")
    rest, length = (named, int(size)) if named and size.isdecimal() else (spec, WINDOW)
    is_named = rest.startswith("text:")
    paths = [Path(each) for each in rest.removeprefix("text:").split(",") if each]
    if len(paths) not in (1, 2):
        return None
    return (paths, length) if is_named or all(map(_is_text, paths)) else None


def _is_text(path: Path) -> bool:
    return path.suffix == SUFFIX or (path.is_dir() and any(path.rglob(f"*{SUFFIX}")))


def load_windows(
    paths: Sequence[Path], tokenizer: Any, length: int, model: torch.nn.Module | None = None
) -> tuple[Tensor, Tensor]:
    """Return the training windows and the test windows.

    Args:
        paths: two files or folders, one for each part; or one: a folder with ``train`` and
            ``test`` or ``val`` inside, or one whose every eighth file is for the test; or a file
            or fewer files than that, whose last eighth of windows is.
        tokenizer: see ``tokenizer_of``.
        length: tokens of a window; fewer where the model takes fewer.
        model: which takes the windows, if it is known.

    Raises:
        DataError: there is too little text, or none.
        UsageError: there is no tokenizer, or the windows are too short.
    """
    texts = [_read(each) for each in _parts(paths) if each]
    known, places = tokenizer_of(tokenizer), _places(model)
    parts = [windows(each, known, min(length, places or length)) for each in texts]
    if model is not None and parts[0].shape[1] == places:
        taken = _taken(model, {"input_ids": parts[0][0].tolist()})
        parts = parts if taken == places else [windows(each, known, taken) for each in texts]
    return (parts[0], parts[1]) if len(parts) == 2 else _held_out(parts[0])


def reads_whole_texts(model: Any) -> bool:
    """Return whether a model reads texts with a mask and gives no scores of tokens.

    Classifiers and encoders of transformers do; language models have output embeddings.
    """
    heads = getattr(model, "get_output_embeddings", None)
    return heads is not None and heads() is None and "attention_mask" in _forward_names(model)


def _places(model: Any) -> int | None:
    """Return the number of positions in a model's configuration, an upper bound of its tokens."""
    found = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None  # -1 where there is no limit


def _taken(model: torch.nn.Module, text: Mapping[str, Sequence[int]]) -> int:
    """Return how many of a text's tokens the model takes: all, or the most on which it runs.

    Its configuration does not say it: where positions are counted from the padding token's number,
    514 positions are for 512 tokens. The model runs on the CPU, where one position too many is an
    error that can be caught, and on one token repeated, so that a token it does not know is none.
    """
    whole = len(text["input_ids"])
    on_cpu = all(each.device.type == "cpu" for each in (*model.parameters(), *model.buffers()))
    model = model if on_cpu else copied(model).cpu()

    def fails(count: int) -> bool:
        given = {name: torch.tensor([[values[0]] * count]) for name, values in text.items()}
        try:
            model(**given)
        except Exception:  # whatever a model raises of too many tokens
            return True
        return False

    with trying(model), same_draws(model), muted():
        if not fails(whole) or fails(1):  # of another cause, which is told where the model is used
            return whole
        return bisect_left(range(1, whole + 1), True, key=fails)


def _forward_names(model: torch.nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


def load_lines(
    paths: Sequence[Path], tokenizer: Any, length: int, model: torch.nn.Module
) -> dict[str, Tensor]:
    """Return the inputs of a model that reads whole texts, one for each line that is not empty.

    Shorter texts are padded by the tokenizer, with its mask; texts of one length have no mask.

    Args:
        paths: see ``load_windows``; the training part is read.
        tokenizer: see ``tokenizer_of``.
        length: the most tokens of a text; fewer where the tokenizer or the model takes fewer,
            which is tried on the longest text.
        model: which takes the inputs.

    Raises:
        DataError: there is no text.
        UsageError: there is no tokenizer, or texts have to be padded and it has no padding token.
    """
    known: Any = tokenizer_of(tokenizer)
    lines = [line for text in _read(_parts(paths)[0]) for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError("the text is empty: there is no line in it")
    limits = (length, _places(model), getattr(known, "model_max_length", None))
    most = min(int(each) for each in limits if each)
    found = known(lines, truncation=True, max_length=most)
    names = _forward_names(model)
    longest = max(range(len(lines)), key=lambda number: len(found["input_ids"][number]))
    text = {name: ids[longest] for name, ids in found.items() if name in names}
    if (taken := _taken(model, text)) < len(text["input_ids"]):
        found = known(lines, truncation=True, max_length=taken)
    if len({len(ids) for ids in found["input_ids"]}) == 1:
        mask = {"attention_mask"}
    elif getattr(known, "pad_token", None) is None:
        raise UsageError(
            "the texts have unequal lengths, and their tokenizer has no padding token: set its "
            "pad_token, save it, and name its folder (tokenizer=…, --tokenizer …)"
        )
    else:
        found, mask = known.pad(found), set()
    return {name: torch.tensor(ids) for name, ids in found.items() if name in names - mask}


def _parts(paths: Sequence[Path]) -> list[list[Path]]:
    """Return the files of the training and of the test part; the latter may be empty."""
    if len(paths) == 2:
        return [_files(path) for path in paths]
    (path,) = paths
    tests = [path / name for name in ("test", "val") if (path / name).is_dir()]
    if (path / "train").is_dir() and tests:
        return [_files(path / "train"), _files(tests[0])]
    files = _files(path)
    test = files[_HELD_OUT - 1 :: _HELD_OUT]
    return [[file for file in files if file not in test], test]


def _files(path: Path) -> list[Path]:
    """Return a file, or the text files below a folder, sorted by name."""
    if path.is_file():
        return [path]
    if not path.exists():
        raise DataError(f"{path} does not exist: give a text file, or a folder of text files")
    found = sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else []
    if not found:
        raise DataError(
            f"{path} holds no text: give a file, or a folder with files whose names end in {SUFFIX}"
        )
    return found


def texts_in(path: Path) -> list[str]:
    """Return the text of a file, or those of the text files below a folder.

    Raises:
        DataError: there are none, or they are no text in UTF-8.
    """
    return _read(_files(path))


def _read(files: Sequence[Path]) -> list[str]:
    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file} cannot be read as text in UTF-8: {error}") from error
    return texts


def _held_out(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split windows into all but the last eighth, and the last eighth."""
    if len(rows) < 2:
        raise DataError(
            f"the text fills only one window of {rows.shape[1]} tokens, so that none is left to "
            "test on: give more text, shorter windows (notes.txt:128), or two files"
        )
    count = -(-len(rows) // _HELD_OUT)
    return rows[:-count], rows[-count:]


def tokenizer_of(given: Any) -> Tokenizer:
    """Return a tokenizer, given itself, a folder or name, or the model that it belongs to.

    Args:
        given: a tokenizer; a folder, a ``.gguf`` file or a name, as transformers'
            ``AutoTokenizer`` takes it; or a model that came from one of these.
    """
    is_model = isinstance(given, torch.nn.Module)
    if is_model:
        given = getattr(given, "name_or_path", None)
    if given is None or given == "":
        raise UsageError(
            "text has to be tokenized, and the model does not say where its tokenizer is: name the "
            "folder or model that has it (tokenizer=…, --tokenizer …)"
        )
    if callable(given):
        return cast(Tokenizer, given)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError(
            "text is tokenized by transformers: pip install 'l0prune[transformers]'"
        ) from error
    path = Path(given)
    is_gguf = path.suffix == ".gguf"
    name, more = (path.parent, {"gguf_file": path.name}) if is_gguf else (given, {})
    options = {"trust_remote_code": False, **more}
    options["local_files_only"] = is_model  # a model's file must not decide what is downloaded
    try:
        found: Tokenizer = AutoTokenizer.from_pretrained(str(name), **options)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise UsageError(
            f"there is no tokenizer in {given}: {first_line(error)}. Name the folder or model that "
            "has it (tokenizer=…, --tokenizer …)"
        ) from error
    own = {*found.get_vocab()} - {*found.all_special_tokens}  # type: ignore[attr-defined]
    if len(own) < 2:  # made from a configuration alone, to which every word is unknown
        raise UsageError(
            f"there is no tokenizer in {given}: its files are missing, so that no word is known. "
            "Save it there (tokenizer.save_pretrained), or name the folder or model that has it "
            "(tokenizer=…, --tokenizer …)"
        )
    return found
