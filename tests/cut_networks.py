"""Networks with closed gates, and what a cut one learns beside a twin that only masks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from deadness import randomise
from small_task import differing, tensors
from torch import Tensor, nn

import l0prune
from l0prune.errors import L0pruneError
from l0prune.exporting.slicing.tensors import Place
from l0prune.training.compaction import Compaction

EXACT = 1e-10
# Before a norm a bias has a gradient of zero, computed as some 1e-16. A step of Adam has the slope
# lr / eps there: with torch's eps, 1e5.
SMOOTH = {"lr": 1e-3, "eps": 1e-4}
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-3),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-3, amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "fused": lambda ps: torch.optim.AdamW(ps, **SMOOTH, fused=True),
    "fused adam": lambda ps: torch.optim.Adam(ps, **SMOOTH, fused=True, amsgrad=True),
    "fused sgd": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9, fused=True),
    "foreach": lambda ps: torch.optim.Adam(ps, **SMOOTH, foreach=True),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=1e-3),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=1e-3),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-3),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=1e-2),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=1e-3),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=1e-3),
}
RANKS = {torch.channels_last: 4, torch.channels_last_3d: 5}
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def gated(
    module: nn.Module, example: tuple[Tensor, ...], closed: float = 0.4, branches: bool = False
) -> nn.Module:
    """In float64, some of its gates closed and the others open, to stand as they are."""
    model = l0prune.gate(module.double(), tuple(x.double() for x in example), branches=branches)
    bank = l0prune.gates(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        bank.log_alpha.uniform_(-1.5, 2.5, generator=generator)
        bank.log_alpha[torch.rand(bank.plan.size, generator=generator) < closed] = -5.0
    bank.fixed = True
    return model.train()


def weights(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p is not l0prune.gates(model).log_alpha]


def outputs(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    found = model(x)
    return found if isinstance(found, tuple) else (found,)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, count: int) -> None:
    """Dropout and the like draw the same numbers each time."""
    for step in range(count):
        torch.manual_seed(step)
        sum((output - 0.1).square().mean() for output in outputs(model, x)).backward()
        optimizer.step()
        optimizer.zero_grad()


def places(small: Compaction, model: nn.Module) -> dict[str, Place]:
    """By the name of a tensor that is cut, where it is."""
    assert small.cut is not None
    by_id = small.cut.by_id()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: by_id[id(t)] for name, t in named if id(t) in by_id}


def unread(model: nn.Module) -> set[str]:
    """The modules that only closed branches need."""
    bank = l0prune.gates(model)
    closed = {axis.name for axis in bank.axes if axis.kind == "branch" and not axis.open.any()}
    return {path for each in bank.plan.branches if each.name in closed for path in each.modules}


def differences(small: Compaction, model: nn.Module, twin: nn.Module) -> dict[str, float]:
    """By tensor, how far what is left is from what it is in the masked twin.

    What a branch that is closed has goes on learning there, from nothing; nothing reads it.
    """
    found, cut, theirs, out = {}, places(small, model), tensors(twin), unread(twin)
    for name, whole in tensors(model).items():
        if name.rpartition(".")[0] in out:
            continue
        mine, other = (cut[name].cut(t) if name in cut else t for t in (whole, theirs[name]))
        if other.is_floating_point() and other.numel():
            found[name] = float((mine - other).abs().max() / other.abs().max().clamp_min(1e-12))
    return found


def laid_out(
    parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, memory: torch.memory_format
) -> None:
    """Each parameter lies as torch moves those of its rank there, and what belongs to it, too."""
    for parameter in parameters:
        plain = torch.empty(parameter.shape)
        if parameter.dim() == RANKS.get(memory):
            plain = plain.to(memory_format=memory)
        assert parameter.stride() == plain.stride()
        of = [v for v in optimizer.state[parameter].values() if v.shape == parameter.shape]
        if parameter.grad is not None:
            of.append(parameter.grad)
        assert all(each.stride() == parameter.stride() for each in of)


def compare(
    model: nn.Module, x: Tensor, make: Make, memory: torch.memory_format | None = None
) -> str:
    """Two steps whole, then three cut, beside five of a twin that only masks; why not, if not.

    Args:
        memory: the format that the model is in, which is looked at where it is given.
    """
    optimizer = make(weights(model))
    steps(model, optimizer, x, 2)
    twin, its = copy.deepcopy((model, optimizer))
    small = Compaction(model)
    small.follow((optimizer,))
    try:
        small.begin()
    except L0pruneError as error:
        assert small.cut is None
        assert differing(tensors(twin), tensors(model)) == []
        return str(error)
    if small.cut is None:
        return "all slots are open"
    assert sum(map(torch.numel, weights(model))) < sum(map(torch.numel, weights(twin)))
    cut = [p for p in weights(model) if id(p) in small.cut.by_id()]
    if memory is not None:
        laid_out(cut, optimizer, memory)
    steps(model, optimizer, x, 3)
    steps(twin, its, x, 3)
    assert max(differences(small, model, twin).values()) <= EXACT
    small.end()
    if memory is not None:
        laid_out(cut, optimizer, memory)
    assert [p.shape for p in model.parameters()] == [p.shape for p in twin.parameters()]
    with torch.no_grad():
        for mine, other in zip(outputs(model.eval(), x), outputs(twin.eval(), x), strict=True):
            assert (mine - other).abs().max() <= EXACT * max(1.0, float(other.abs().max()))
    return ""


class Residual(nn.Module):
    """Convolutions with a norm and a shortcut, and a Linear that reads a flattened map."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.branch = nn.Sequential(
            nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1, bias=False),
        )  # fmt: skip
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(6 * 16, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.relu(x + self.branch(x)))


IMAGES = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(3)).double()


def half_closed() -> nn.Module:
    """The same at each call."""
    torch.manual_seed(0)
    return gated(randomise(Residual().double()), (IMAGES,))


class Side(nn.Module):
    """A path beside a shortcut, and one that is put beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(8, 6, 1)
        self.inner, self.beside = nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(6, 5, 1)
        self.norm, self.head = nn.BatchNorm2d(11), nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.down(torch.relu(self.inner(x)))
        x = torch.relu(self.norm(torch.cat([x, torch.relu(self.beside(x))], 1)))
        return self.head(x.mean((2, 3)))


class Inline(Side):
    """Its path is no module's: there is no way around it for its class."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Conv2d(8, 6, 1)
        del self.down

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        hidden = torch.relu(self.inner(x))
        x = x + nn.functional.conv2d(hidden, self.middle.weight, self.middle.bias)
        x = torch.relu(self.norm(torch.cat([x, torch.relu(self.beside(x))], 1)))
        return self.head(x.mean((2, 3)))


def without(module: nn.Module, out: str) -> nn.Module:
    """Gated, all open but for the branch that has a module of this name."""
    torch.manual_seed(0)
    model = gated(randomise(module.double()), (IMAGES,), closed=0.0, branches=True)
    bank = l0prune.gates(model)
    (name,) = (
        branch.name for branch in bank.plan.branches if any(out in each for each in branch.modules)
    )
    (switch,) = (axis for axis in bank.axes if axis.name == name)
    with torch.no_grad():
        bank.log_alpha[switch.slice] = -5.0
    return model
