"""A loop's wrappers of its model (DDP, FSDP2): removed before a cut, made anew after it."""

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
    """A model with its loop's wrapper, which is kept while the model's tensors keep their sizes.

    FSDP2 replaces parameters by shards; optimizers that follow then hold the shards, and whole
    parameters again once the wrapper is removed. One that holds the replaced parameters follows
    from the step on for which ``adopt`` gets it.

    Attributes:
        network: the wrapped model, which the loop calls; None while there is no wrapper.

    Args:
        model: gated, plain.
        gates: the model's bank, which is whole in every process and not wrapped.
        wrap: function from the model to the module that is called.
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
        # Replaced tensors, held so that their ids stay unique, and the parameters replacing them.
        self._former: list[Tensor] = []
        self._now: dict[int, nn.Parameter] = {}

    def put_on(self) -> nn.Module:
        """Return the wrapped model, which is wrapped now if it is not yet.

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
        """Put the present parameters into optimizers that did not follow so far."""
        exchange(optimizers, self._now)

    def take_off(self) -> None:
        """Remove the wrapper and make parameters whole; all processes call this together."""
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
    """Hide the gates' parameters from the model within the context."""
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
