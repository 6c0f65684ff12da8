"""Wrappers of a loop around its model (DDP, FSDP2): off before a cut, on again after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor, nn

from l0prune.capture.compat import unshard_modules
from l0prune.capture.copying import holds_ddp
from l0prune.errors import UsageError
from l0prune.gating.bank import Gates
from l0prune.running.processes import full_tensor, is_sharded, those_that_train
from l0prune.training.optimizers import Optimizers, exchange

Wrap = Callable[[nn.Module], nn.Module]


class Wrapping:
    """A model with what its loop has put around it, as long as its tensors keep their sizes.

    FSDP2 puts shards in the places of parameters; optimizers that follow then hold the shards, and
    whole parameters again once it is taken off. One that holds what was there before follows from
    the step on for which ``adopt`` is told of it.

    Attributes:
        network: what the loop calls; None while nothing is around the model.

    Args:
        model: gated, plain.
        gates: its bank, which is whole in every process and no part of what is wrapped.
        wrap: makes what is called of the model.
        optimizers: returns those that follow.
    """

    def __init__(
        self, model: nn.Module, gates: Gates, wrap: Wrap, optimizers: Callable[[], Optimizers]
    ) -> None:
        if holds_ddp(model) or any(map(is_sharded, model.parameters())):
            raise UsageError(
                "with wrap=… give Pruner the plain model, in neither DDP nor FSDP: wrap puts that "
                "around it, and again after each cut"
            )
        self._model, self._gates, self._wrap, self._optimizers = model, gates, wrap, optimizers
        self.network: nn.Module | None = None
        # What was replaced, held so that nothing else has its id, and what is in its place.
        self._former: list[Tensor] = []
        self._now: dict[int, nn.Parameter] = {}

    def put_on(self) -> nn.Module:
        """Return the wrapped model, made now if it is not there.

        Raises:
            UsageError: ``wrap`` does not return a module.
        """
        if self.network is not None:
            return self.network
        world = those_that_train()
        for parameter in self._gates.parameters():
            world.copy_from_first(parameter.data)
        before = dict(_places(self._model))
        with _left_out(self._gates):
            network = self._wrap(self._model)
        if not isinstance(network, nn.Module):
            raise UsageError(
                f"wrap returned a {type(network).__name__}: it takes the model and returns a "
                "module, as lambda model: DistributedDataParallel(model) does"
            )
        now = dict(_places(self._model))
        changed = {at: p for at, p in before.items() if now[at] is not p}
        self._former = [*changed.values()]
        self._now = {id(p): now[at] for at, p in changed.items()}
        exchange(self._optimizers(), self._now)
        for former in changed.values():
            former.grad, former.data = None, former.data.new_empty(0)
        self.network = network
        return network

    def adopt(self, optimizers: Optimizers) -> None:
        """Let optimizers that did not follow so far hold the parameters that there are now."""
        exchange(optimizers, self._now)

    def take_off(self) -> None:
        """Leave the plain model, with whole parameters; all processes call this together."""
        network, self.network = self.network, None
        if network is None:
            return
        if network is not self._model:
            network.__dict__["forward"] = _refuse
        if not any(map(is_sharded, self._model.parameters())):
            return
        unshard_modules(self._model)
        whole: dict[int, nn.Parameter] = {}
        for (module, name), parameter in list(_places(self._model)):
            if is_sharded(parameter):
                if id(parameter) not in whole:
                    values = full_tensor(parameter.detach()).clone()
                    whole[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
                    self._former.append(parameter)
                module._parameters[name] = whole[id(parameter)]
        before = {key: whole.get(id(p), p) for key, p in self._now.items()}
        self._now = {**before, **whole}
        exchange(self._optimizers(), self._now)


def _places(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], nn.Parameter]]:
    """Yield every module and name that a parameter has, with the parameter."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield (module, name), parameter


@contextmanager
def _left_out(gates: Gates) -> Iterator[None]:
    """Within the context the gates' parameters are none of the model's."""
    own = [(module, dict(module._parameters)) for module in gates.modules()]
    for module, _ in own:
        module._parameters.clear()
    try:
        yield
    finally:
        for module, parameters in own:
            module._parameters.update(parameters)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        "this wrapper is of the network as it was before a cut: call pruner.network(inputs) in "
        "each step, and keep no other name for it"
    )
