"""The public way back to a smaller model: of its own class, with its tensors.

Where a smaller model lies: a folder, or a file with its manifest in it.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from l0prune.errors import FileError
from l0prune.files.atomic import PathLike
from l0prune.files.checked_json import read_text, sealed
from l0prune.files.loading import check_exists, load_pickle
from l0prune.files.pretrained.manifest import Manifest, parsed
from l0prune.files.pretrained.origin import built, settled
from l0prune.files.pretrained.resizing import put_on
from l0prune.files.tensor_file import MANIFEST as TEXT
from l0prune.files.tensor_file import SAVE, is_tensor_file, read_tensors, read_texts
from l0prune.gating.attaching import check_ungated

MANIFEST, WEIGHTS = "l0prune.json", "model.safetensors"  # in a folder
_FIRST, _HEAD = b"\x08\x00\x00\x00manifest", 64  # as a pickle writes that key


class Stored(NamedTuple):
    """A smaller model as it was read; no tensors where only its manifest was given.

    Attributes:
        manifest: its sizes.
        tensors: by all their names; tied ones are one object.
        where: what messages call it.
    """

    manifest: Manifest
    tensors: dict[str, Tensor] | None
    where: str


def is_smaller_model(path: PathLike) -> bool:
    """Is it a folder or a file that ``Export`` wrote? Nothing is unpickled to see that."""
    if Path(path).is_dir():
        return (Path(path) / MANIFEST).is_file()
    if is_tensor_file(path):
        return TEXT in read_texts(path)
    return Path(path).is_file() and _has_keys(path)


def _has_keys(path: PathLike) -> bool:
    """Does the pickle in an archive of torch begin with what ``Export.save`` puts there?"""
    try:
        with zipfile.ZipFile(path) as archive:
            pickle = next(e for e in archive.infolist() if e.filename.endswith("data.pkl"))
            with archive.open(pickle) as file:
                return _FIRST in file.read(_HEAD)
    except (StopIteration, zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError):
        return False


def read(source: PathLike | Mapping[str, Any]) -> Stored:
    """The smaller model in a folder or a file, or a manifest alone.

    Args:
        source: a folder of ``Export.save_pretrained``, a file of ``Export.save``, a manifest as
            data or as a file of JSON.

    Raises:
        FileError: it is none of these, or damaged, or from a newer version.
    """
    if isinstance(source, Mapping):
        return Stored(parsed(dict(source), "the manifest"), None, "the manifest")
    path = Path(source)
    where = str(path)
    if path.is_dir():
        return _folder(path)
    check_exists(path)
    if path.suffix == ".json":
        return Stored(parsed(read_text(path), where), None, where)
    if is_tensor_file(path):
        texts = read_texts(path)
        if TEXT not in texts:
            raise FileError(f"{path} holds tensors, but no manifest of a smaller model.")
        return _with_ties(parsed(texts[TEXT], where), read_tensors(path), where)
    found = load_pickle(path)
    if not isinstance(found, Mapping) or not {"state_dict", TEXT} <= found.keys():
        raise FileError(f"{path} holds no smaller model: it was not written by Export.save.")
    state, apart = found["state_dict"], found.get("constants", {})
    if not isinstance(state, Mapping) or not isinstance(apart, Mapping):
        raise FileError(f"{path} is damaged: its state_dict is none.")
    state = {**state, **apart}
    if not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise FileError(f"{path} is damaged: its state_dict holds more than tensors.")
    return Stored(parsed(found[TEXT], where), state, where)


def _folder(path: Path) -> Stored:
    if not (path / MANIFEST).is_file():
        raise FileError(
            f"{path} is no folder of l0prune: it has no {MANIFEST}. Export.save_pretrained(folder) "
            "writes one."
        )
    manifest = parsed(read_text(path / MANIFEST), path / MANIFEST)
    weights = path / WEIGHTS
    check_exists(weights)
    if read_texts(weights).get(SAVE, "") != manifest.save:
        raise FileError(
            f"{path} holds files of two saves, the last of which was interrupted: save the model "
            "again."
        )
    return _with_ties(manifest, read_tensors(weights), str(weights))


def _with_ties(manifest: Manifest, tensors: dict[str, Tensor], where: str) -> Stored:
    absent = [first for first in manifest.tied.values() if first not in tensors]
    if absent:
        raise FileError(f"{where} is incomplete: it lacks {absent[0]}.")
    tied = {name: tensors[first] for name, first in manifest.tied.items()}
    return Stored(manifest, {**tensors, **tied}, where)


def as_text(manifest: Manifest, *, indent: int | None = None) -> str:
    """Return the manifest as JSON, with its digest."""
    return json.dumps(sealed(manifest.model_dump()), indent=indent)


Model = TypeVar("Model", bound=nn.Module)


def from_pretrained(folder: PathLike, *, trust_pickle: bool = False) -> nn.Module:
    """The smaller model that ``Export.save_pretrained`` or ``Export.save`` wrote.

    It is of its own class, on the CPU, in eval mode. Nothing is unpickled from a folder. A model
    of transformers is built by its configuration, another by the code that its folder names:
    ``timm:NAME``, or a Python file that the user has named before on this machine.

    Args:
        folder: the folder; or a file of ``Export.save`` (a state, not a ``.pt2``).
        trust_pickle: run any code and fetch any network that the folder names.

    Raises:
        FileError: it is missing, damaged, from a newer version, or needs code that it may not
            run; or only the user's own code can build the model: see ``resize``.
        UsageError: the package that builds it is not installed.
    """
    stored = read(folder)
    manifest = stored.manifest
    if not manifest.origin.is_known:
        raise FileError(
            f"{stored.where} holds a {manifest.kind}, and only your own code can build one. Build "
            "it as it was before the cut, and give it the new sizes and weights: "
            f'l0prune.resize(model, "{folder}"), or on the command line --model file.py:factory '
            f"--weights {folder}"
        )
    _check_class(stored)
    model = built(manifest.origin, stored.where, trust=trust_pickle)
    put_on(model, manifest, stored.tensors, stored.where)
    return settled(model, folder)


def resize(model: Model, source: PathLike | Mapping[str, Any]) -> Model:
    """Give a model at its old sizes the new sizes and weights of its smaller self, in place.

    For those who build their model by code of their own.

    Args:
        model: a fresh model, as it was before it was gated; its weights do not matter.
        source: a folder of ``Export.save_pretrained``, a file of ``Export.save``, or a manifest
            alone, as data or a file of JSON. Of the latter the model has only the sizes, and
            nan for weights, until ``model.load_state_dict``.

    Returns:
        The same object, in the mode that it was in, its tensors on its device and in the dtypes
        of the file.

    Raises:
        AlreadyGated: the model carries gates.
        FileError: the source is damaged or from a newer version, or of another model or of other
            sizes. The model is then as it was.
    """
    check_ungated(model)
    stored = read(source)
    _check_class(stored)
    put_on(model, stored.manifest, stored.tensors, stored.where)
    return model


def _check_class(stored: Stored) -> None:
    rebuild = stored.manifest.rebuild
    if not rebuild.verified:
        raise FileError(
            f"{stored.where} cannot be put on {stored.manifest.kind}: {rebuild.reason}. What was "
            "exported is the captured graph, which is kept in a .pt2 or ONNX file."
        )
