"""What has to be known of a smaller model beside its tensors, as JSON."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from l0prune.files.checked_json import Strict, checked

FORMAT = 1  # raised when older versions cannot read what this one writes


class Sizes(Strict):
    """Shape of a tensor before the cut and after it."""

    old: list[int]
    new: list[int]


class Origin(Strict):
    """What builds the model at its old sizes.

    Attributes:
        kind: the class, for people: module and name.
        transformers: the name of a class of transformers, which ``config`` builds.
        config: its configuration; None where there is none.
        spec: of a package or a Python file, as ``load_model`` takes it.
    """

    kind: str
    transformers: str = ""
    config: dict[str, Any] | None = None
    spec: str = ""

    @property
    def is_known(self) -> bool:
        """Whether anything but the user's own code can build it."""
        return bool(self.transformers or self.spec)


class Rebuild(Strict):
    """Whether the class, resized like this, computes the same; if not, why."""

    verified: bool
    reason: str = ""
    training: str = ""


class Manifest(Strict):
    """A smaller model without its tensors.

    Attributes:
        version: of the format.
        versions: of the packages that wrote it.
        origin: what builds the model at its old sizes.
        shapes: of every tensor of the state_dict.
        constants: of tensors that are cut and not in the state_dict.
        attributes: by module path, those that have changed.
        layers: by module path, the class of ``cut_layers`` that the module has become.
        dropped: parameters of branches that are gone, in whose place the class has zeros.
        rebuild: whether the class can be used.
        tied: further names of tensors that are stored under another one.
        save: drawn anew for each save, as the tensors beside the manifest have it.
        certificate: the comparisons of the export, where its weights are those of the file.
        changed: what is to be known where they are not; else empty.
        preprocessing: of images, as ``l0prune.data.preprocessing`` has it; None where unknown.
        digest: of all the rest.
    """

    version: int
    versions: dict[str, str] = Field(default_factory=dict)
    origin: Origin
    shapes: dict[str, Sizes]
    constants: dict[str, Sizes] = Field(default_factory=dict)
    attributes: dict[str, dict[str, Any]]
    layers: dict[str, str]
    dropped: list[str] = Field(default_factory=list)
    rebuild: Rebuild
    tied: dict[str, str] = Field(default_factory=dict)
    save: str = ""
    certificate: list[dict[str, Any]] = Field(default_factory=list)
    changed: str = ""
    preprocessing: dict[str, Any] | None = None
    digest: str = ""

    @property
    def kind(self) -> str:
        """Name of the class."""
        return self.origin.kind.rpartition(".")[2]


def parsed(content: Any, where: object) -> Manifest:
    """The manifest that a text or data say.

    Args:
        content: JSON as text, or what it says.
        where: what messages call it.

    Raises:
        FileError: it is none, or damaged, or of a newer version.
    """
    return checked(content, Manifest, FORMAT, where, ", or no manifest of l0prune")
