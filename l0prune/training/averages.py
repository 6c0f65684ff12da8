"""Moving averages of weights, buffers and gates: of a run, and those that the user keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from l0prune.capture.compat import average_, copy_all_, version_of
from l0prune.gating.bank import Gates, alive, asked_of
from l0prune.running.processes import distribute_like, from_local_like, full_tensor, to_local
from l0prune.training.budget import Budget

# (tensors of a module, name in them): looked up at each use, since a module may replace a buffer
# by another tensor.
Slot = tuple[dict[str, Tensor | None], str]


class Average:
    """An exponential moving average of a model's floating-point parameters and buffers.

    ``average ← β_t·average + (1 − β_t)·value`` with ``β_t = min(β, (1+t)/(10+t))`` after t
    updates: the window grows with the run, a tenth of the steps so far, until it is as long as
    β asks for. So a run of any length forgets the weights that it started from. Integer buffers
    are as the model has them. Half-precision tensors are averaged in float32, where a
    thousandth of a step is not lost.

    Attributes:
        beta: β in the end.
        updates: t, the updates so far.
    """

    def __init__(self, model: nn.Module, beta: float) -> None:
        self.beta = beta
        self.updates = 0
        self._slots = dict(_learned(model))
        self._values = {name: _wide(value) for name, value in self._now()}
        self._hidden: list[tuple[Tensor, Tensor]] = []

    def _now(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's present tensors by name; of sharded ones this process' part."""
        for name in self._slots:
            yield name, to_local(self._at(name).detach())

    def _at(self, name: str) -> Tensor:
        tensors, key = self._slots[name]
        value = tensors[key]
        assert value is not None
        return value

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages by the model's values after one more step."""
        beta = min(self.beta, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for averages, values in self._grouped():
            if averages[0].dtype != values[0].dtype:
                values = [value.to(averages[0].dtype) for value in values]
            average_(averages, values, 1 - beta)

    def _grouped(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return (averages, values), two lists, for each device and dtype of the tensors."""
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]]
        groups = defaultdict(lambda: ([], []))
        for name, value in self._now():
            averages, values = groups[value.device, value.dtype]
            averages.append(self._values[name])
            values.append(value)
        return list(groups.values())

    @torch.no_grad()
    def show(self) -> None:
        """Replace the model's values by the averages, until ``hide``."""
        self._hidden = [(value, value.clone()) for _, value in self._now()]
        for averages, values in self._grouped():
            copy_all_(values, averages)

    @torch.no_grad()
    def hide(self) -> None:
        """Restore the values that the model had before ``show``."""
        for value, held in self._hidden:
            value.copy_(held)
        self._hidden = []

    @torch.no_grad()
    def adopt(self, buffers: Iterable[Tensor]) -> None:
        """Copy the present values of these buffers into the averages, while these are shown."""
        wanted = {buffer.data_ptr() for buffer in buffers}
        for name, value in self._now():
            if value.data_ptr() in wanted:
                self._values[name].copy_(value)

    def install(self) -> None:
        """Replace the model's values by the averages for good, and restart from them."""
        self.show()
        self._hidden = []
        self.restart()

    def restart(self) -> None:
        """Restart the averages from the model's present values."""
        self.updates = 0
        self._values = {name: _wide(value) for name, value in self._now()}

    def resize(self, change: Callable[[str, Tensor], Tensor]) -> None:
        """Apply ``change`` to each average and its name, as the model's tensors are resized."""
        self._values = {name: change(name, value) for name, value in self._values.items()}

    def buffers(self) -> list[Tensor]:
        """The averages of the model's buffers."""
        kinds = {name: self._at(name) for name in self._slots}
        return [v for n, v in self._values.items() if not isinstance(kinds[n], nn.Parameter)]

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages, unsharded, by the names of the model's tensors."""
        return {
            n: full_tensor(from_local_like(value, self._at(n))) for n, value in self._values.items()
        }

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Restore the averages from ``tensors()``, and ``updates``."""
        self.updates = updates
        for name, value in self._values.items():
            value.copy_(to_local(distribute_like(tensors[name], self._at(name))))


def _learned(model: nn.Module) -> Iterator[tuple[str, Slot]]:
    """Yield parameters that learn and floating-point buffers, each tensor once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for key, value in tensors.items():
                if value is None or id(value) in seen:
                    continue
                if not (value.is_floating_point() or value.is_complex()):
                    continue
                if isinstance(value, nn.Parameter) and not value.requires_grad:
                    continue
                seen.add(id(value))
                yield (f"{prefix}.{key}" if prefix else key), (tensors, key)


def _wide(value: Tensor) -> Tensor:
    """Return a copy, in float32 if the value has half precision."""
    is_half = value.dtype in (torch.float16, torch.bfloat16)
    return value.detach().to(torch.float32 if is_half else value.dtype, copy=True)


_ROUNDING = 8.0  # eps of the values, below which a change is rounding


class Followers:
    """Copies of a model in training that are moving averages of it.

    An average of log α is no decision: gates that closed late are still open in it, so that it
    would export above the budget that the model itself meets. A copy is recognised as an average
    if all its gates move by the same part, from 0 to 1, of the difference to the model's. A copy
    that is trained, or that loads the model's state unchanged, is left alone.

    Other copies whose gates change, and the model itself, into which an average may be loaded, are
    registered with the budget: an export of them warns where they exceed it.
    """

    def __init__(self, gates: Gates) -> None:
        self._gates = gates
        self._seen: WeakKeyDictionary[Gates, tuple[int | None, Tensor]] = WeakKeyDictionary()
        self._averages: WeakSet[Gates] = WeakSet()
        self._changing: WeakSet[Gates] = WeakSet()
        asked_of[gates] = None

    @torch.no_grad()
    def look(self) -> None:
        """Find copies whose gates have changed, and averages among them; before each step."""
        now = self._gates.log_alpha.detach()
        for bank in alive():
            mine = bank.log_alpha.detach()
            if bank is self._gates or bank in self._averages or mine.shape != now.shape:
                continue
            if bank.kept is not None:  # a copy of a part
                continue
            version = version_of(mine)
            before = self._seen.get(bank)
            if before is not None and before[0] == version:
                continue
            if before is not None and _is_average(before[1].to(mine), mine, now.to(mine)):
                self._averages.add(bank)
            elif before is not None:
                self._changing.add(bank)
            self._seen[bank] = version, mine.clone()

    def follow(self, budget: Budget | None) -> None:
        """Fix the gates of averages as those of the model, which meet the budget."""
        open_ = self._gates.open()
        for bank in self._averages:
            bank.gate = self._gates.gate
            bank.set_open(open_)
        if budget is not None:
            with_runs = {*asked_of} - {self._gates}
            for bank in {self._gates, *self._averages, *self._changing} - with_runs:
                asked_of[bank] = partial(_strays, budget, open_.cpu().clone())


def _strays(budget: Budget, fitted: Tensor, open_: Tensor) -> str:
    """Return a warning if gates exceed the budget that the model's gates were fitted to.

    The fitted gates never do, whatever their predicted time: it was measured.
    """
    found = "" if torch.equal(open_, fitted) else excess_of(budget, open_)
    return found and (
        "the gates of this model exceed the budget of the run that trained them: an "
        f"export has {found}. The usual cause is an average (EMA) of your own that is not "
        "recognised as one, since its gates do not move towards the model's by one factor. "
        "Export the model that was trained, or give the average its gates: "
        "l0prune.gates(average).set_open(l0prune.gates(model).open()); where its state is "
        "loaded, leave l0prune_gates.log_alpha out"
    )


def excess_of(budget: Budget, open_: Tensor) -> str:
    """Return which budgets an export with these open gates exceeds; empty if none."""
    exceeded = [bound for bound in budget.bounds if bound.actual(open_) > bound.most]
    shares = (f"{bound.actual_share(open_):.0%} for {bound.limit}" for bound in exceeded)
    return ", ".join(shares)


def _is_average(before: Tensor, after: Tensor, model: Tensor) -> bool:
    """Return whether all values moved by the same fraction of their difference to the model."""
    way, step = (model - before).double(), (after - before).double()
    rounding = _ROUNDING * torch.finfo(after.dtype).eps * float(after.double().norm())
    if float(step.norm()) <= rounding:
        return False
    part = float(way @ step / (way @ way).clamp_min(1e-300))
    return 0 < part < 1 - 1e-3 and float((step - part * way).norm()) <= rounding
