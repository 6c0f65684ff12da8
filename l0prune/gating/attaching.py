"""Attach a bank of gates to a model in place, and detach it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch import Tensor, nn

from l0prune.errors import AlreadyGated, Interrupted, NotGated, UsageError
from l0prune.gating.bank import Gates
from l0prune.gating.gated_class import (
    CHILD,
    HOOKS,
    QUANTIZER,
    gated_class,
    is_gated,
    original_class,
)
from l0prune.gating.link import Link, kept_lists
from l0prune.gating.multiplying import LINK, GateValues, held
from l0prune.gating.named_members import gate_members, ungate_members
from l0prune.plan.plan import Site


def attach(model: nn.Module, gates: Gates) -> None:
    """Make ``model`` read every tensor of the plan's sites multiplied by its gates, in place.

    A tied one is gated under each of its names. The bank becomes the model's submodule
    ``l0prune_gates``. All or nothing: whatever fails leaves the model as it was.
    """
    check_ungated(model)
    links = _links(model, gates)
    try:
        for module, link in links:
            module.__dict__[LINK] = link
            names, lists = tuple(link.sites), tuple(link.lists)
            module.__class__ = gated_class(type(module), names, lists, module is model)
        if not is_gated(model):
            model.__class__ = gated_class(type(model), (), (), holds_bank=True)
        gate_members(model, gates)
        model.add_module(CHILD, gates.train(model.training))
        # Under a separate key: a file keeps the numbers that torch gives to hooks, and in the
        # process that loads it the user's first hooks would get the same numbers.
        for name, hook in zip(HOOKS, (gates.before_forward, gates.end_forward, True), strict=True):
            getattr(model, name)[CHILD] = hook
    except BaseException:
        _undo(model)
        raise


def detach(model: nn.Module) -> Gates:
    """Take the gates off, in place: the model computes with its plain parameters again.

    Nothing is folded: the parameters stay as they are, whatever the gates have learned. Returns the
    bank that the model carried.
    """
    root, gates = holder(model)
    gates.make_whole()
    _undo(root)
    return gates


def gates_of(model: nn.Module) -> Gates:
    """Return the bank of gates that ``model`` carries, also inside a wrapper such as DDP."""
    return holder(model)[1]


def check_intact(model: nn.Module) -> None:
    """Raise UsageError where a module that carried gates has been replaced since.

    A model that trains cut is made whole first.
    """
    root, gates = holder(model)
    gates.make_whole()
    for site in gates.plan.sites:
        path, _, leaf = site.tensor.rpartition(".")
        try:
            link = root.get_submodule(path).__dict__.get(LINK)
        except AttributeError:
            link = None
        if link is None or link.gates is not gates or leaf not in link.sites:
            raise UsageError(
                f"{path or 'the model'} has been replaced since the model was gated, and the new "
                "one carries no gates. Ungate the model (l0prune.ungate) and gate it again. Of "
                "adapters (LoRA) that stand in a layer's place: put them on first, and gate the "
                "model then."
            )
        if held(root.get_submodule(path), leaf) is None:
            raise UsageError(
                f"{site.tensor} is no parameter any more: a parametrization of torch's "
                "(weight_norm, spectral_norm) was put on it after the model was gated, and its "
                "gates do not reach it. Put that on first, and gate the model then."
            )


@contextmanager
def bypass(model: nn.Module) -> Iterator[None]:
    """Let ``model`` read its plain parameters within the context, as if it had no gates."""
    gates = gates_of(model)
    before, gates.bypassed = gates.bypassed, True
    try:
        yield
    finally:
        gates.bypassed = before


def check_ungated(model: nn.Module) -> None:
    """Raise AlreadyGated if ``model`` or any part of it carries gates."""
    for name, module in model.named_modules():
        if is_gated(module):
            where = f"its submodule {name!r}" if name else "it"
            raise AlreadyGated(
                f"this model cannot be gated, because {where} carries gates already; "
                "take them off first with l0prune.ungate"
            )


def holder(model: nn.Module) -> tuple[nn.Module, Gates]:
    """Return the module that was gated, ``model`` or one inside it, and its bank.

    Raises:
        NotGated: the model carries no gates.
        UsageError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"this is a {type(model).__name__}, and no gated model: l0prune.load reads one from a "
            "file"
        )
    for module in model.modules():
        bank = module._modules.get(CHILD)
        if isinstance(bank, Gates):
            return module, bank
    raise NotGated(
        "this model carries no gates; put them on with l0prune.gate(model, example_inputs), "
        "or l0prune.load a file that was saved with them"
    )


def gates_or_none(model: nn.Module) -> Gates | None:
    """Return the bank of gates that ``model`` carries, if it carries one."""
    with suppress(NotGated):
        return gates_of(model)
    return None


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters without those of its gates, each once, by name."""
    gates = gates_or_none(model)
    own = set() if gates is None else {*map(id, gates.learned)}
    return {name: p for name, p in model.named_parameters() if id(p) not in own}


def _links(model: nn.Module, gates: Gates) -> list[tuple[nn.Module, Link]]:
    """Return every module with a gated parameter or buffer, and its link to the bank."""
    sites: dict[int, list[tuple[GateValues, int]]] = defaultdict(list)
    for site in gates.plan.sites:
        sites[id(gated_tensor(model, site))].append((gates.multiplier(site), site.dim))
    links = []
    for module in model.modules():
        own = {
            name: tuple(sites[id(tensor)])
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if id(tensor) in sites
        }
        if own:
            links.append((module, Link(gates, own, kept_lists(module, own))))
    return links


def gated_tensor(model: nn.Module, site: Site) -> Tensor:
    """The parameter or buffer that a site names."""
    path, _, leaf = site.tensor.rpartition(".")
    try:
        tensor = held(model.get_submodule(path), leaf)
    except AttributeError:
        tensor = None
    if tensor is None:
        raise UsageError(
            f"the plan gates {site.tensor!r}, but the model has no such parameter or buffer: the "
            "plan was made for another model, or this one has changed since"
        )
    size = site.layout.size
    if tensor.dim() <= site.dim or tensor.shape[site.dim] != size:
        raise UsageError(
            f"the plan gates {size} slots along dim {site.dim} of {site.tensor!r}, whose shape is "
            f"{tuple(tensor.shape)}: the plan was made for another model"
        )
    return tensor


def _undo(model: nn.Module) -> None:
    """Restore every module's original class, and remove the bank and its hooks."""
    model._modules.pop(CHILD, None)
    for name in HOOKS:
        getattr(model, name).pop(CHILD, None)
    for module in model.modules():
        for name in HOOKS:
            getattr(module, name).pop(QUANTIZER, None)
        module.__dict__.pop(LINK, None)
        ungate_members(module)
        module.__class__ = original_class(module)


@contextmanager
def put_back_rounding(model: nn.Module) -> Iterator[None]:
    """Restore a gated model's former rounding if the context fails."""
    try:
        root, gates = holder(model)
    except NotGated:
        yield
        return
    before, plan = gates.quantizer, gates.plan
    log_alpha, clips = gates.log_alpha, gates.clips
    try:
        yield
    except Interrupted:
        raise
    except BaseException:
        if gates.quantizer is not None:
            gates.quantizer.detach(root)
        if gates.plan is not plan:
            gates.change_plan(plan, log_alpha)
        gates.clips = clips
        if before is not None:
            before.attach(root)
        raise
