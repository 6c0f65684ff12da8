"""Contents of the working folder: defaults in ``l0prune.toml``, models, images, recipes, names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from l0prune.cli.options import key_and_value, toml_value
from l0prune.errors import UsageError, meant, unknown
from l0prune.files.checked_json import read_toml
from l0prune.files.consent import RECIPES, is_code, makers

DEFAULTS_FILE = "l0prune.toml"
OURS = (".gated.pt", ".tuned.pt", ".fit.pt", ".state.pt")
_IMAGES = {
    *(".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
}  # what torchvision reads
_TAIL = 1 << 20  # bytes at the end of an ONNX file that are searched for an export's facts
_TEXTS = ("model", "input", "data", "data_root")
_SETTINGS = "finetune"


def defaults() -> dict[str, Any]:
    """Return the default options of all commands in this folder, from ``l0prune.toml``.

    Raises:
        FileError: the file cannot be read, or is no TOML.
        UsageError: an entry of the file is no default.
    """
    path = Path(DEFAULTS_FILE)
    if not path.exists():
        return {}
    found = read_toml(path)
    for name, value in found.items():
        if name not in (*_TEXTS, _SETTINGS):
            raise UsageError(
                f"{DEFAULTS_FILE} has {', '.join(_TEXTS)} and a table [{_SETTINGS}] of the "
                f"settings of training, not {name}{meant(name, (*_TEXTS, _SETTINGS))}"
            )
        kind, what = (dict, "a table") if name == _SETTINGS else (str, "a text")
        if not isinstance(value, kind):
            raise UsageError(f"{name} in {DEFAULTS_FILE} is {what}, not {value!r}")
    return found


def chosen(given: Any, name: str, info: dict[str, Any] | None = None) -> Any:
    """Return an option: as given, else from the model file, else from ``l0prune.toml``."""
    if given is not None:
        return given
    if info and info.get(name) is not None:
        return info[name]
    return defaults().get(name)


def newest(*patterns: str, command: str) -> Path:
    """Return the newest file in this folder that matches any of the patterns.

    Raises:
        UsageError: there is none; the message names ``command``, which writes one.
    """
    found = [path for pattern in patterns for path in Path().glob(pattern) if path.is_file()]
    if not found:
        raise UsageError(
            f"no file is named and there is no {' or '.join(patterns)} here; `{command}` makes one."
        )
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def only_model() -> str | None:
    """Return the only model file in this folder that no command has written; None without any.

    ONNX files count only if there is no file of torch.

    Raises:
        UsageError: there are several.
    """
    paths = (path for ending in ("pt", "pth") for path in Path().glob(f"*.{ending}"))
    found = sorted(str(path) for path in paths if not str(path).endswith(OURS))
    found = found or sorted(str(path) for path in Path().glob("*.onnx") if not _is_ours(path))
    if len(found) > 1:
        raise UsageError(
            f"no model is named, and there are {len(found)} model files here: {', '.join(found)}. "
            f"Name one: l0prune gate {found[0]}"
        )
    return found[0] if found else None


def _is_ours(path: Path) -> bool:
    """Return whether an export has written this ONNX file, by the facts at the file's end."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        return b"l0prune." in file.read()


def image_folder() -> Path | None:
    """Return the only folder of images here, or this folder if it contains train and test.

    Such a folder has train and test (or val), or else at least two folders of images, one for
    each class.

    Raises:
        UsageError: there are several.
    """
    here = Path()
    if _has_parts(here):
        return here
    folders = (path for path in here.iterdir() if path.is_dir() and path.name[0] != ".")
    found = sorted(path for path in folders if _has_parts(path) or _has_classes(path))
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise UsageError(
            f"no data is named, and there are {len(found)} folders of images here: {names}. Name "
            f"one: --data imagefolder:{found[0]}"
        )
    return found[0] if found else None


def _has_parts(folder: Path) -> bool:
    tests = (folder / part for part in ("test", "val"))
    return _has_classes(folder / "train") and any(map(_has_classes, tests))


def _has_classes(folder: Path) -> bool:
    """Return whether at least two folders in this one hold images."""
    return folder.is_dir() and sum(any(_images(each)) for each in folder.iterdir()) > 1


def _images(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (path for path in folder.iterdir() if path.suffix.lower() in _IMAGES)


def output_path(out: Path | None, source: str, suffix: str) -> Path:
    """Return the path to write: ``out``, else the model's name with the suffix, in this folder.

    A model from code is named after its class, else after its file, with the function's name if the
    file has several and this one has another name.
    """
    if out is not None:
        return out
    kind, _, name = source.rpartition(":")
    stem = name if kind and not Path(source).exists() else Path(source).name
    if kind.endswith(".py") and Path(kind).is_file():
        file, is_class = Path(kind).stem, name[:1].isupper()
        is_only = name == file or len(makers(kind)) < 2
        stem = name if is_class else file if is_only else f"{file}-{name}"
    for ending in (".gated.pt", ".tuned.pt", ".pt", ".pth", ".onnx"):
        if stem.endswith(ending):
            stem = stem.removesuffix(ending)
            break
    return Path(f"{stem.replace('/', '_')}{suffix}")


def find_recipe(name: str) -> Path:
    """Return the file of a recipe, given by path or by the name of a built-in one.

    Raises:
        UsageError: there is none.
    """
    for path in (Path(name), RECIPES / f"{name}.toml"):
        if path.is_file():
            return path
    known = sorted(path.stem for path in RECIPES.glob("*.toml"))
    raise unknown(f"there is no recipe {name!r}", name, known, " and files of your own")


def read_recipe(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe, apply ``section.key=value`` overrides, and resolve the Python files it names.

    ``section.key=`` removes the recipe's value, so that the default is used.

    Raises:
        FileError: the file cannot be read, or is no TOML.
        UsageError: there is no such recipe, or an override is wrong.
    """
    path = find_recipe(name)
    content = read_toml(path)
    for override in overrides:
        _override(content, override)
    content.setdefault("name", path.stem)
    found: dict[str, Any] = _placed(content, path.parent)
    return found


def _override(content: dict[str, Any], text: str) -> None:
    key, value = key_and_value(text, "finetune.epochs=5", may_be_empty=True)
    *sections, last = key.split(".")
    target = content
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise UsageError(f"{text!r}: {section} is a value, not a section.")
    if not value:
        if last not in target:
            raise UsageError(f"{text!r}: the recipe does not say {key}, so nothing is left out.")
        del target[last]
        return
    target[last] = toml_value(value)


def _placed(value: Any, folder: Path) -> Any:
    """Resolve Python files: beside the recipe, else in the working directory, else built in.

    So a copy of a built-in recipe in any folder finds the code that it names.
    """
    if isinstance(value, dict):
        return {key: _placed(each, folder) for key, each in value.items()}
    if isinstance(value, list):
        return [_placed(each, folder) for each in value]
    if not (isinstance(value, str) and is_code(value)):
        return value
    path, _, name = value.rpartition(":")
    places = (folder / path, Path(path), RECIPES / path)
    found = next((place for place in places if place.is_file()), None)
    return value if found is None else f"{found.resolve()}:{name}"
