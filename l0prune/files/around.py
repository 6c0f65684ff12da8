"""Networks that features put around a user's network, such as one with early exits.

Each is an ``Around`` with the user's network in it. In a model's file the feature is named, with
the facts by which it is built again around the network of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from l0prune.doors import Registry

Loss = Callable[[Any, Any], Tensor]


class Around(nn.Module):
    """Network around the user's ``network``, whose arguments its forward takes.

    Attributes:
        name: under which it is registered, and its facts are in a model's file.
        words: that messages call it by.
        ordinary: further classes that the pickle of a model's file may hold without being trusted.
        has_hooks: whether it works by hooks on the network. Pickles do not hold them, so that it
            is not in the pickle of a model's file, but built by its facts.
        scales_slots: whether it multiplies what slots compute, so that the size of a slot's weights
            says nothing of the slot.
        network: the user's network, or another one around that.
    """

    name: ClassVar[str]
    words: ClassVar[str]
    ordinary: ClassVar[tuple[type[nn.Module], ...]] = ()
    has_hooks: ClassVar[bool] = False
    scales_slots: ClassVar[bool] = False
    network: nn.Module

    @property
    def stands_for(self) -> nn.Module:
        """The wrapped network, whose arguments the forward takes."""
        return self.network

    @property
    def facts(self) -> dict[str, Any] | None:
        """The plain data for ``of_facts``; None if there are none that are sufficient."""
        raise NotImplementedError

    @classmethod
    def of_facts(cls, network: nn.Module, facts: Mapping[str, Any]) -> Self:
        """Build it around a network by its ``facts``; its own weights are not loaded.

        Raises:
            AttributeError, KeyError, TypeError: the facts are invalid.
        """
        raise NotImplementedError

    def take_off(self) -> nn.Module:
        """Remove what is around the network, and return the network."""
        return self.network

    def own_loss(self, loss: Loss) -> nn.Module | None:
        """Return the loss by which the outputs learn, made of one; None if that does."""
        return None

    def cost(self) -> Tensor | None:
        """Return what the last forward in training mode adds to the loss, once; None for nothing.

        Shape: a scalar.
        """
        return None

    def unpaid(self) -> str:
        """Return a warning if a ``cost`` was not asked for since the last forward; else empty."""
        return ""


AROUND: Registry[type[Around]] = Registry("network around a network", "around")


def all_around(model: nn.Module) -> Iterator[Around]:
    """Yield all modules of a model that are around a network."""
    return (module for module in model.modules() if isinstance(module, Around))


def added_cost(model: nn.Module) -> Tensor | None:
    """Return what all that is around a network adds to the loss of the last forward, if any."""
    costs = [cost for each in all_around(model) if (cost := each.cost()) is not None]
    return sum(costs[1:], costs[0]) if costs else None


def innermost(model: nn.Module) -> nn.Module:
    """Return the user's network without all that is around it."""
    while isinstance(model, Around):
        model = model.network
    return model
