"""Loading of smaller models from folders and files, as modules of their original class."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from l0prune.capture.provenance import within
from l0prune.errors import FileError
from l0prune.files.atomic import PathLike
from l0prune.files.checked_json import read_text, sealed
from l0prune.files.cut_layers import (
    LAYERS,
    are_passed,
    are_windows,
    change,
    is_name,
    put_tensors,
    tensors_held,
)
from l0prune.files.earlier_cuts import remember, remembered, since_the_first
from l0prune.files.given_sizes import (
    GIVEN,
    PADDED,
    MixedIn,
    OwnLayer,
    are_sizes_of_calls,
    are_whole_sizes,
)
from l0prune.files.manifest import Manifest, Sizes, built, parsed, settled
from l0prune.files.pickles import check_exists, load_pickle
from l0prune.files.tensor_file import MANIFEST as TEXT
from l0prune.files.tensor_file import SAVE, is_tensor_file, read_tensors, read_texts
from l0prune.gating.attaching import check_ungated
from l0prune.plan.numbers import LARGEST, MOST, is_count, is_number

MANIFEST, WEIGHTS = "l0prune.json", "model.safetensors"  # in a folder


_FIRST, _HEAD = b"\x08\x00\x00\x00manifest", 64  # the key as pickled, and bytes to search


_PICKED = "kept"  # index tensor of layers that read a subset of their inputs


_DIMS = 64  # of a tensor; torch has no more. Nor has a module that is skipped more inputs


# Checks of gained attributes for which not every value of their type is valid.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    GIVEN: are_sizes_of_calls,
    PADDED: are_whole_sizes,
    "windows": are_windows,
    "passed": are_passed,
    "inputs": lambda value: is_count(value, MOST) and value > 0,
    "dim": lambda value: type(value) is int and abs(value) <= _DIMS,
    "scale": lambda value: type(value) is float and is_number(abs(value)),
    "name": is_name,
    **dict.fromkeys(("at", "depth"), lambda value: is_count(value, _DIMS)),
    **dict.fromkeys(("channels", "results"), lambda value: is_count(value, MOST)),
}


Model = TypeVar("Model", bound=nn.Module)


class Stored(NamedTuple):
    """Manifest and tensors of a smaller model; no tensors if only the manifest was given.

    Attributes:
        manifest: the sizes and changed modules.
        tensors: by all their names; tied ones are one object.
        where: name of the source in messages.
    """

    manifest: Manifest
    tensors: dict[str, Tensor] | None
    where: str


def from_pretrained(folder: PathLike, *, trust_pickle: bool = False) -> nn.Module:
    """Load the smaller model that ``Export.save_pretrained`` or ``Export.save`` wrote.

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
            "a new one, as it was before its gates, and give that the new sizes and weights: "
            f'l0prune.resize(new, "{folder}"), or on the command line --model file.py:factory '
            f"--weights {folder}"
        )
    _check_class(stored)
    model = built(manifest.origin, stored.where, trust=trust_pickle)
    put_on(model, manifest, stored.tensors, stored.where)
    return settled(model, folder)


def resize(model: Model, source: PathLike | Mapping[str, Any]) -> Model:
    """Give a model of the original sizes the sizes and weights of its smaller version, in place.

    For models that only your own code builds.

    Args:
        model: a fresh model, as it was before it was gated; its weights do not matter.
        source: a folder of ``Export.save_pretrained``, a file of ``Export.save``, or a manifest
            alone, as data or a file of JSON, with which weights are nan.

    Returns:
        The same object, in its mode, on its device and in the dtypes of the file.

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


def is_smaller_model(path: PathLike) -> bool:
    """Return whether ``Export`` wrote this folder or file; nothing is unpickled for that."""
    if Path(path).is_dir():
        return (Path(path) / MANIFEST).is_file()
    if is_tensor_file(path):
        return TEXT in read_texts(path)
    return Path(path).is_file() and _has_keys(path)


def _has_keys(path: PathLike) -> bool:
    """Return whether an archive's pickle begins with the key that ``Export.save`` writes first."""
    try:
        with zipfile.ZipFile(path) as archive:
            pickle = next(e for e in archive.infolist() if e.filename.endswith("data.pkl"))
            with archive.open(pickle) as file:
                return _FIRST in file.read(_HEAD)
    except (StopIteration, zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError):
        return False


def read(source: PathLike | Mapping[str, Any]) -> Stored:
    """Read the smaller model in a folder or a file, or a manifest alone.

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


def put_on(
    model: nn.Module, manifest: Manifest, tensors: Mapping[str, Tensor] | None, where: str
) -> None:
    """Resize the model by the manifest and load the tensors, in place.

    ``tensors`` has tied tensors as one object under all names; if None, weights become nan. The
    model may have been cut before, if the manifest is of that cut's result or of all cuts so far.

    Raises:
        FileError: something does not fit; the model is then as it was.
    """
    held = tensors_held(model)
    facts = _check_model(model, manifest, held, where)
    _check_modules(model, manifest, where)
    if tensors is None:
        tensors = {
            name: torch.full(sizes.new, _nothing(held[name]), dtype=held[name].dtype)
            for name, sizes in {**manifest.shapes, **manifest.constants}.items()
        }
        tensors |= {
            name: torch.zeros(weight.new[1], dtype=torch.int64) for name, weight in _picks(manifest)
        }
    elif any(tensor.is_meta for tensor in tensors.values()):
        raise FileError(f"{where} holds shapes without values.")
    else:
        _check_tensors(manifest, tensors, held, where)
        _check_ties(manifest, tensors, held, where)

    wanted = (*manifest.shapes, *manifest.constants)
    put_tensors(model, {name: (held[name], tensors[name]) for name in wanted})
    change(model, manifest.layers, manifest.attributes, tensors, manifest.dropped)
    remember(model, facts)


def _nothing(old: Tensor) -> float:
    return float("nan") if old.is_floating_point() or old.is_complex() else 0


def _check_model(
    model: nn.Module, manifest: Manifest, held: Mapping[str, Tensor], where: str
) -> dict[str, Any]:
    """Refuse a model whose tensors are not exactly the manifest's, at their old sizes.

    Returns the facts of all cuts that the model will have had.
    """
    wanted = {**manifest.shapes, **manifest.constants}
    facts, first = manifest.model_dump(), remembered(model)
    is_new = all(n in held and list(held[n].shape) == sizes.new for n, sizes in wanted.items())
    if is_new and any(sizes.old != sizes.new for sizes in wanted.values()):
        raise FileError(
            f"{where} is for a model at its old sizes, and this one has the new sizes already: "
            "model.load_state_dict loads weights alone."
        )
    state = {name for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    gone = {id(held.get(name)) for name in manifest.dropped}
    state -= {name for name, tensor in held.items() if id(tensor) in gone}
    was = {name: list(tensor.shape) for name, tensor in held.items()}
    if first is not None and _is_of_first(manifest, first):
        was |= {name: sizes["old"] for name, sizes in first["shapes"].items()}
        state -= dict(_picks(manifest)).keys()
    else:
        facts = since_the_first(model, facts)
    absent = [name for name in (*wanted, *manifest.dropped) if name not in held]
    absent = absent or sorted(state - wanted.keys())
    if absent and absent[0] in dict(_picks(manifest)):
        raise FileError(
            f"{where} is for a model that has been cut before: its layers read some of their "
            "inputs. Load the file of that cut into the model first, and then this one."
        )
    if absent:
        owner = "the model" if absent[0] in wanted else "the file"
        raise FileError(
            f"{where} is of another architecture, a {manifest.kind}: {owner} has no {absent[0]}."
        )
    for name, sizes in wanted.items():
        if was[name] != sizes.old:
            raise FileError(
                f"{where} does not fit a model of these sizes: {name} is "
                f"{_shown(was[name])} in it, and was {_shown(sizes.old)} before the "
                "cut."
            )
        if len(sizes.new) != len(sizes.old) or not all(
            0 <= new <= old for new, old in zip(sizes.new, sizes.old, strict=True)
        ):
            raise FileError(f"{where} is damaged: {name} does not become smaller.")
    return facts


def _is_of_first(manifest: Manifest, first: Mapping[str, Any]) -> bool:
    """Return whether the manifest is of the sizes that the model had at first, before any cut."""
    known = {name: sizes.old for name, sizes in manifest.shapes.items()}
    return all(known.get(name) == sizes["old"] for name, sizes in first["shapes"].items())


def _check_modules(model: nn.Module, manifest: Manifest, where: str) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, kind in manifest.layers.items():
        if kind not in LAYERS:
            raise FileError(f"{where} has a layer {kind!r}, which this version does not know.")
        own = (OwnLayer, MixedIn, *LAYERS.values())
        base = next(each for each in LAYERS[kind].__mro__ if each not in own)
        if not isinstance(modules.get(path), base):
            raise FileError(f"{where} is of another architecture: {path} is no {base.__name__}.")
    for path, attributes in manifest.attributes.items():
        module = modules.get(path)
        if module is None:
            raise FileError(f"{where} is of another architecture: the model has no {path}.")
        gained = _gained(manifest.layers.get(path))
        for name, value in attributes.items():
            is_there = name in vars(module) and _is_alike(value, vars(module)[name])
            is_gained = type(value) is gained.get(name)
            if name in gained and name in _CHECKS:
                is_gained = _CHECKS[name](value)
            if name.startswith("_") or not (is_there or is_gained):
                raise FileError(
                    f"{where} is of another architecture, or damaged: {within(path, name)} "
                    f"cannot be {value!r}."
                )


def _gained(kind: str | None) -> dict[str, Any]:
    """Return the types of the attributes that a module gains with a layer's class, by name."""
    own = () if kind is None else (k for k in LAYERS[kind].__mro__ if k in LAYERS.values())
    types = {name: what for each in own for name, what in each.__annotations__.items()}
    return {name: what for name, what in types.items() if name != _PICKED}


def _is_alike(new: Any, old: Any) -> bool:
    """Return whether a value may replace the old one: of its kind, single integers no larger."""
    if isinstance(new, list):
        return isinstance(old, tuple | list) and all(is_count(each, MOST) for each in new)
    if type(new) is bool or type(old) is bool:
        return type(new) is type(old)
    if isinstance(old, float):
        return is_number(new, -LARGEST)
    return type(new) is int and isinstance(old, int) and min(0, old) <= new <= max(0, old)


def _check_tensors(
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    held: Mapping[str, Tensor],
    where: str,
) -> None:
    wanted = {**manifest.shapes, **manifest.constants}
    picked = dict(_picks(manifest))
    absent = [name for name in (*wanted, *picked) if name not in tensors]
    if absent:
        more = f", and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise FileError(f"{where} is incomplete: it lacks {absent[0]}{more}.")
    extra = sorted(tensors.keys() - wanted.keys() - picked.keys())
    if extra:
        raise FileError(f"{where} does not fit its manifest: that knows no {extra[0]}.")
    for name, sizes in wanted.items():
        found, old = tensors[name], held[name]
        if list(found.shape) != sizes.new:
            raise FileError(
                f"{where} does not fit its manifest: {name} is {_shown(list(found.shape))}, and "
                f"should be {_shown(sizes.new)}."
            )
        is_float, was_float = (t.is_floating_point() or t.is_complex() for t in (found, old))
        if is_float != was_float or found.is_complex() != old.is_complex():
            raise FileError(f"{where} is damaged: {name} holds {found.dtype}, not {old.dtype}.")
    for name in picked:
        if not _is_index(tensors[name], picked[name], held.get(name)):
            raise FileError(f"{where} is damaged: {name} does not say which inputs are read.")


def _picks(manifest: Manifest) -> Iterator[tuple[str, Sizes]]:
    """Yield the names of index tensors that layers gain, with the sizes of their weights."""
    for path, kind in manifest.layers.items():
        weight = within(path, getattr(LAYERS[kind], "reads_by", ""))
        if weight in manifest.shapes:
            yield within(path, _PICKED), manifest.shapes[weight]


def _is_index(kept: Tensor, weight: Sizes, before: Tensor | None) -> bool:
    """Return whether ``kept`` has one valid input index for each column of the cut weight."""
    inputs = weight.old[1] if before is None else len(before) and int(before.max()) + 1
    if kept.dtype != torch.int64 or list(kept.shape) != weight.new[1:]:
        return False
    return not kept.numel() or (int(kept.min()) >= 0 and int(kept.max()) < inputs)


def _check_ties(
    manifest: Manifest, tensors: Mapping[str, Tensor], held: Mapping[str, Tensor], where: str
) -> None:
    """Refuse different tensors in the file for names that are one tensor in the model."""
    first: dict[int, str] = {}
    for name in {**manifest.shapes, **manifest.constants}:
        other = first.setdefault(id(held[name]), name)
        one, two = tensors[other], tensors[name]
        if one is not two and not (one.shape == two.shape and one.equal(two)):
            raise FileError(
                f"{where} is of another model: {other} and {name} are one tensor in this one, and "
                "two in the file."
            )


def _shown(shape: list[int]) -> str:
    return "×".join(map(str, shape)) or "a number"
