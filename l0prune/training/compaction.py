"""Training at reduced size: closed slots are cut in place, and restored in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from l0prune.capture.compat import pytree
from l0prune.capture.copying import holds_ddp
from l0prune.capture.example_inputs import call
from l0prune.capture.undisturbed import trying
from l0prune.errors import L0pruneError, UsageError
from l0prune.exporting.in_place import Cut, Graph, smaller_form
from l0prune.gating.attaching import holder
from l0prune.gating.gated_class import CHILD, QUANTIZER, original_class
from l0prune.plan.cost import cost_of
from l0prune.plan.switches import with_all_branches
from l0prune.progress.stages import stage
from l0prune.running import rng
from l0prune.running.device import device_of
from l0prune.running.processes import is_sharded, run_on_first
from l0prune.training.averages import Average
from l0prune.training.gate_settings import Compact
from l0prune.training.optimizers import (
    States,
    bare,
    check_held,
    check_states,
    cut_states,
    saved_cut,
    saved_whole,
    whole_states,
)

_NOT_USERS = ("torch.nn.", "l0prune.gating.", "torch.distributed.fsdp.")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def watched(root: nn.Module) -> str:
    """Return why hooks forbid a cut; else an empty string.

    A cut keeps the model's outputs, but not its inner values. A module of a removed branch is not
    called at all.
    """
    for path, module in root.named_modules():
        tables = (getattr(module, each, {}) for each in _HOOKS)
        hooks = (hook for table in tables for key, hook in table.items() if key != QUANTIZER)
        if path and any(map(_is_users, hooks)):
            return (
                f"{path} has hooks, which would see fewer channels, or nothing where a branch is "
                "gone"
            )
    return ""


def _is_users(hook: Any) -> bool:
    """Return whether a hook is the user's, not one of torch.nn, gates or FSDP."""
    made_by = getattr(hook, "__module__", None) or type(hook).__module__
    return not str(made_by).startswith(_NOT_USERS)


_LESS = 0.9  # of the present MACs, at most, are left by another cut
# Duration of a cut's proof on the host in steps of the whole network, by device: on a CPU a step
# takes so much longer that any cut pays.
_WAITED = {"cpu": 0}
_ELSEWHERE = 20


class Compaction:
    """A gated model that may be cut in place while it trains.

    While it is cut, its ``state_dict()`` gives, and its ``load_state_dict()`` takes, the tensors
    of the whole model: a checkpoint is the same file before the cut, after it and in the end.

    Attributes:
        cut: what was cut; None while the model is whole.
        share: the model's MACs now, as a share of the whole model's.
        average: moving average that is resized with the model, if there is one.
        let_go: called before the sizes change, to drop references to the present tensors.
        take_off: called before a cut or its undoing, to unwrap the model. None where it cannot be
            unwrapped: wrappers stay then.

    Args:
        own_loop: the loop is the user's.
    """

    def __init__(self, model: nn.Module, own_loop: bool = False) -> None:
        self._own_loop = own_loop
        self.take_off: Callable[[], None] | None = None
        self._root, self._gates = holder(model)
        # The enclosing module may use its layers, or hold its tensors under other names.
        self._is_part = self._root is not model and not own_loop
        self._is_joined = holds_ddp(model)
        self.cut: Cut | None = None
        self.share = 1.0
        self._following: list[ref[Optimizer]] = []
        self.average: Average | None = None
        self.let_go: Callable[[], None] = _nothing
        self._closed: Tensor | None = None
        self._goes_around, self._graph = True, Graph()  # around removed branches
        self._hooks: list[Any] = []
        self._loaded: dict[int, Mapping[str, Any]] = {}  # whole states, by the parameter's id

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers whose states are cut with the model, held weakly: the loop may drop them."""
        return [found for each in self._following if (found := each()) is not None]

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Cut these optimizers' states with the model, too, and save them whole, from now on."""
        known = self.optimizers
        new = [each for each in map(bare, optimizers) if each not in known]
        if not new:
            return
        self._following = [*map(ref, [*known, *new])]
        if self.cut is not None:
            cut_states(new, self.cut.by_id())
            self._hook()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, without optimizers and average."""
        none: dict[str, Any] = {"_following": [], "average": None, "_loaded": {}}
        return {**self.__dict__, **none, "let_go": _nothing, "_graph": Graph()}

    def hindrance(self) -> str:
        """Return why the model cannot be cut, if that is known beforehand; else an empty string."""
        if self._is_sharded and self.take_off is None:
            return (
                "its weights are in shards (FSDP); Pruner(model, wrap=…) makes shards of what is "
                "left"
                if self._own_loop
                else "its weights are in shards (FSDP)"
            )
        if self._is_part:
            return "it is a part of the module that is trained: give finetune the network itself"
        if self._gates.plan.in_parts:
            return "it was captured in parts"
        is_shared = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if self._own_loop and self.take_off is None and (is_shared or self._is_joined):
            return (
                "several processes train it, and what joins them is made for the whole network; "
                "Pruner(model, wrap=…) makes it anew"
            )
        return watched(self._root)

    @property
    def _is_sharded(self) -> bool:
        return any(map(is_sharded, self._root.parameters()))

    def begin(self, kept: Tensor | None = None, *, resumes: bool = False) -> None:
        """Cut the model down to these slots, by default those that an export would keep.

        If a loop ``resumes``, its optimizers are not known yet.

        Raises:
            L0pruneError: the model, or an optimizer's state, cannot be cut so; it is whole then.
        """
        if kept is None:
            kept = self._left(self._gates.open())
        self.end()
        with stage(f"{original_class(self._root).__name__}: cutting what its gates have closed"):
            try:
                self._cut_to(kept, resumes)
            except L0pruneError:
                with_zeros = with_all_branches(self._gates.plan, kept)
                if torch.equal(with_zeros, kept):
                    raise
                # Removed branches cannot be bypassed: from here on they stay, as zeros.
                self._goes_around = False
                self._cut_to(with_zeros, resumes)

    def _cut_to(self, kept: Tensor, resumes: bool) -> None:
        if bool(kept.all()):
            return
        self._make_plain()
        if reason := watched(self._root):
            raise UsageError(reason)
        with rng.preserved(device_of(self._root)):
            form = run_on_first(lambda: smaller_form(self._root, kept, self._graph))
        self.let_go()
        cut = Cut(self._root, form)
        places = cut.by_id()
        try:
            if form.emptied:
                self._check_runs()
            check_states(self.optimizers, places)
            if self._own_loop and not resumes:
                check_held(self.optimizers, places, self._root.named_parameters())
        except BaseException:
            cut.undo()
            raise
        cut_states(self.optimizers, places)
        if self.average is not None:
            self.average.resize(cut.left)
        self.cut, self.share = cut, self._share_of(kept)
        self._gates.made_whole_by = self.end
        self._hook()

    def _make_plain(self) -> None:
        if self.take_off is not None:
            self.take_off()

    def _check_runs(self) -> None:
        """Raise UsageError if the model without its removed branches fails on its example.

        The proof is of the class without gates, which may act where no slots are left.
        """
        device = device_of(self._root)
        to_device = partial(pytree.tree_map_only, Tensor, lambda x: x.to(device))
        example = to_device(self._gates.example)
        try:
            with rng.preserved(device), trying(self._root):
                call(self._root, example)
        except Exception as error:
            raise UsageError(
                f"without the branches that are gone it does not run on its example: {error}"
            ) from error

    def _left(self, open_: Tensor) -> Tensor:
        """Return the slots that a cut in place leaves."""
        plan = self._gates.plan
        kept = plan.kept(open_)
        return kept if self._goes_around else with_all_branches(plan, kept)

    def _share_of(self, kept: Tensor) -> float:
        cost = cost_of(self._gates.plan)
        return cost.amount(kept.double(), "macs") / max(cost.dense("macs"), 1)

    def look(self, steps_left: int, *, begins: bool = False) -> None:
        """Cut slots that are closed for good at two looks in a row, if that saves enough.

        The cost of a cut has to be saved within ``steps_left``. If the run ``begins``, one look is
        enough, since no step had these slots open. A cut slot whose gate has opened since, by a
        prior or by the user, is restored.
        """
        closed = self._gates.closed_for_good().cpu()
        before, self._closed = closed if begins else self._closed, closed
        if before is None:
            return
        kept = self._left(~(closed & before))
        if self._lacks(self._gates.open()) or self._pays(kept, steps_left):
            self.begin(kept)

    def _pays(self, kept: Tensor, steps_left: int) -> bool:
        """Return whether a cut to these slots saves more than it costs."""
        share = self._share_of(kept)
        cost = _WAITED.get(device_of(self._root).type, _ELSEWHERE)
        return share <= _LESS * self.share and (self.share - share) * steps_left >= cost

    def _lacks(self, open_: Tensor) -> bool:
        """Return whether any slot with an open gate is cut."""
        return self.cut is not None and bool((self._left(open_) & ~self.cut.kept).any())

    def end(self, rest: States | None = None) -> None:
        """Make the model whole: cut slots get their last values, and their gates are closed.

        ``rest`` are whole states of the optimizers, by the parameter's id, with the cut-off slots.
        """
        if self.cut is None:
            return
        self._make_plain()
        cut, places = self.cut, self.cut.by_id()
        self.let_go()
        cut.undo()
        self.cut, self.share = None, 1.0
        self._gates.made_whole_by = None
        self._unhook()
        whole_states(self.optimizers, places, rest or {})
        if self.average is not None:
            self.average.resize(cut.in_whole)

    def in_whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Expand tensors of the model, by name, to those of the whole model."""
        cut = self.cut
        if cut is None:
            return dict(tensors)
        return {n: cut.in_whole(n, t) for n, t in tensors.items() if n not in cut.gained}

    def state_dict(self) -> dict[str, Any]:
        """Return kept slots (None if whole), closed slots, and whether branches may be bypassed."""
        kept = None if self.cut is None else self.cut.kept
        return {"kept": kept, "closed": self._closed, "goes_around": self._goes_around}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut the model, which has whole tensors, as it was cut when the state was saved."""
        kept, self._closed = state["kept"], state["closed"]
        self._goes_around = state["goes_around"]
        now = None if self.cut is None else self.cut.kept
        if now is not None and kept is not None and torch.equal(now, kept):
            return
        self.end(self._loaded)
        self._loaded = {}
        # The optimizers that hold shards are not known yet: they are cut at the next look.
        if kept is not None and not self.hindrance() and not self._is_sharded:
            self.begin(kept, resumes=True)

    def _hook(self) -> None:
        """Register hooks that save and load the state of the whole model."""
        self._unhook()
        self._hooks = [
            # torch marks a hook with an attribute, which a method cannot have
            self._root.register_state_dict_post_hook(partial(self._give_whole)),
            self._root.register_load_state_dict_pre_hook(partial(self._take_whole)),
        ]
        for optimizer in self.optimizers:
            self._hooks += [
                optimizer.register_state_dict_post_hook(self._give_whole_states),
                optimizer.register_load_state_dict_pre_hook(self._take_whole_states),
            ]

    def _unhook(self) -> None:
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def _give_whole(
        self, _: nn.Module, state: dict[str, Any], prefix: str, __: dict[str, Any]
    ) -> None:
        if self.cut is None:
            return
        self._check_plain()
        own = {name: state.pop(name) for name in list(state) if name.startswith(prefix)}
        for name, value in own.items():
            path = name.removeprefix(prefix)
            if path not in self.cut.gained:
                is_tensor = isinstance(value, Tensor)
                state[name] = self.cut.in_whole(path, value) if is_tensor else value

    def _check_plain(self) -> None:
        """Raise UsageError if the weights are sharded: the whole state cannot be assembled."""
        if self._is_sharded:
            raise UsageError(
                "this network is cut and in shards, and its states are not those of the whole: "
                "call pruner.make_whole() before states are saved or loaded, in all processes; it "
                "is cut again later"
            )

    def _opens(self, log_alpha: Any) -> bool:
        """Return whether loaded gates open slots that are cut."""
        own = self._gates.log_alpha
        if not isinstance(log_alpha, Tensor) or log_alpha.shape != own.shape:
            return False
        return self._lacks(self._gates.estimated(log_alpha.to(own)) > 0)

    def _take_whole(
        self, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any, **___: Any
    ) -> None:
        if self.cut is None:
            return
        self._check_plain()
        if self._opens(state.get(f"{prefix}{CHILD}.log_alpha")):
            hooks, self._hooks = self._hooks, []  # torch iterates over them: do not remove them
            self.end()
            self._hooks = hooks
            return
        for name, value in list(state.items()):
            if name.startswith(prefix) and isinstance(value, Tensor):
                state[name] = self.cut.take(name.removeprefix(prefix), value)
        for name in self.cut.gained:
            state[prefix + name] = self._root.get_buffer(name)

    def _give_whole_states(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        if self.cut is None:
            return
        self._check_plain()
        saved_whole(optimizer, saved, self.cut.by_id())

    def _take_whole_states(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        if self.cut is None:
            return
        self._check_plain()
        self._loaded.update(saved_cut(optimizer, saved, self.cut.by_id()))


class CompactionPolicy:
    """Schedule of cuts by the setting ``compact``; a failure is reported and ends all cuts."""

    def __init__(self, compaction: Compaction, when: Compact, say: Callable[[str], None]) -> None:
        self._compaction, self._when, self._say = compaction, when, say
        self._has_failed = False

    def look_ahead(self, hindrance: str) -> None:
        """Report a known hindrance before the first step, and cut nothing then."""
        if hindrance and self._when != "never":
            self._keep_whole(hindrance)

    def to_what_stands(self) -> None:
        """Cut to the open slots once all gates are fixed."""
        if self._when != "never":
            self._attempt(self._compaction.begin)

    def to_what_is_open(self, steps_left: int, *, begins: bool = False) -> None:
        """Cut slots that were closed for long enough, while gates learn or before they begin to."""
        if self._when == "auto":
            self._attempt(partial(self._compaction.look, steps_left, begins=begins))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the cut, and whether cutting has failed."""
        return {**self._compaction.state_dict(), "failed": self._has_failed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the cut of the run that is resumed."""
        self._has_failed = state["failed"]
        if self._has_failed:
            self.stop()
        if self._when == "never":
            state = {**state, "kept": None}
        self._attempt(partial(self._compaction.load_state_dict, state))

    def stop(self) -> None:
        """Cut nothing from here on."""
        self._when = "never"

    def _attempt(self, cut: Callable[[], None]) -> None:
        try:
            cut()
        except L0pruneError as error:
            self.fail(str(error))

    def fail(self, reason: str) -> None:
        """Report that the model cannot be cut, and cut nothing from now on, also if resumed."""
        self._has_failed = True
        self._keep_whole(reason)

    def _keep_whole(self, reason: str) -> None:
        self.stop()
        self._say(f"compact: the network keeps its size while it trains: {reason}")


def _nothing() -> None:
    """No-op, the default of ``let_go``."""


@contextmanager
def whole_in_the_end(compaction: Compaction | None) -> Iterator[None]:
    """Make the model whole when the context ends."""
    try:
        yield
    finally:
        if compaction is not None:
            compaction.end()
