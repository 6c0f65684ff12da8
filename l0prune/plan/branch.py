"""A branch of a network, as data: what is joined to a stream, and computed for that alone."""

from __future__ import annotations

from dataclasses import dataclass

KIND = "branch"  # of the axes that are switches: they may close completely


@dataclass(frozen=True, slots=True)
class Branch:
    """A part of the network that is added to a stream, or concatenated, and serves nothing else.

    Attributes:
        name: of the module that computes it, unique among branches and axes.
        tensors: the parameters with which all of it is multiplied: where they are zero, it is.
            Empty where it is one part of concatenations.
        size: the parameters that only it needs.
        modules: those all of whose own work is the branch's.
        axes: the names of those that are the part of a concatenation that it is.
        closing: the names of those without any of which it is zero.
    """

    name: str
    tensors: tuple[str, ...]
    size: int
    modules: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
