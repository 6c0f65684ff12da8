"""The public way back to a smaller model: of its own class, with its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from l0prune.errors import FileError
from l0prune.files.atomic import PathLike
from l0prune.files.pretrained.origin import built, settled
from l0prune.files.pretrained.resizing import put_on
from l0prune.files.pretrained.stored import Stored, read
from l0prune.gating.attaching import check_ungated

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
