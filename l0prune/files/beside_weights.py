"""Files that lie beside a transformers model's weights: of its tokenizer, processor, generation."""

from __future__ import annotations

import importlib
import shutil
from fnmatch import fnmatch
from pathlib import Path

from torch import nn

from l0prune.errors import FileError

_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("*.model", "*.tiktoken", "*.spm", "normalizer.json", "chat_template*"),
    *("*processor_config.json", "generation_config.json"),
)


def bring_along(model: nn.Module, folder: Path) -> str:
    """Copy the files beside the model's source into a folder; return a sentence about them.

    The sentence is empty where the model does not say where it came from.

    What is there already stays. Nothing is downloaded: of a model from the hub, these are the
    files that are in its cache.

    Raises:
        FileError: a file cannot be read.
    """
    source = str(getattr(model, "name_or_path", None) or "")
    place = source_folder(source)
    paths = sorted(place.iterdir()) if place is not None else []
    found = [path for path in paths if path.is_file() and _is_wanted(path.name)]
    for path in found:
        if not (folder / path.name).exists():
            try:
                shutil.copyfile(path, folder / path.name)
            except OSError as error:
                raise FileError(f"{path} cannot be read: {error.strerror or error}.") from error
    if any(path.name != "generation_config.json" for path in found):
        return f"The tokenizer's and processor's files are those of {source}."
    return source and (
        f"It has no files of a tokenizer or processor, as none are here for {source}: put those of "
        "the original beside it (tokenizer.save_pretrained), or its texts may be read wrongly."
    )


def source_folder(source: str) -> Path | None:
    """Return the folder of a model by its name, in the hub's cache for one of the hub."""
    if not source:
        return None
    if Path(source).is_dir():
        return Path(source)
    if Path(source).exists():  # a file that holds all, as .gguf does
        return None
    try:
        hub = importlib.import_module("huggingface_hub")
        cached = hub.try_to_load_from_cache(source, "config.json")
    except (ImportError, ValueError):  # or no name that the hub could have
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _FILES)
