"""A network that is cut in the midst of its training learns what the masked one does."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from deadness import randomise
from example_counts import costliest
from hypothesis import given
from hypothesis import strategies as st
from random_networks import Author
from shared_runs import COMMON, doubled, loss, mlp, residual, task
from small_task import differing, tensors
from torch import Tensor, nn
from torch.testing import assert_close

import l0prune
from l0prune.errors import L0pruneError, NothingToPrune, UsageError
from l0prune.exporting import in_place
from l0prune.exporting.place import Place
from l0prune.running.task import Task
from l0prune.training.compaction import Compaction
from l0prune.training.shrinking import Shrinking

EXACT = 1e-10
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-3),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-3, amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=1e-3),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=1e-3),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-3),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=1e-2),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=1e-3),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=1e-3),
}
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


def compare(model: nn.Module, x: Tensor, make: Make) -> str:
    """Two steps whole, then three cut, beside five of a twin that only masks; why not, if not."""
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
    steps(model, optimizer, x, 3)
    steps(twin, its, x, 3)
    assert max(differences(small, model, twin).values()) <= EXACT
    small.end()
    assert [p.shape for p in model.parameters()] == [p.shape for p in twin.parameters()]
    with torch.no_grad():
        for mine, other in zip(outputs(model.eval(), x), outputs(twin.eval(), x), strict=True):
            assert (mine - other).abs().max() <= EXACT * max(1.0, float(other.abs().max()))
    return ""


@costliest
@given(st.integers(0, 2**32), st.integers(1, 10))
def test_random_networks_learn_the_same_cut_and_masked(seed, length):
    network, x = written(seed, length)
    with suppress(NothingToPrune):
        compare(gated(network, (x,), branches=True), x, OPTIMIZERS["momentum"])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_random_networks(part):
    cut = 0
    for seed in range(100 * part, 100 * part + 100):
        network, x = written(seed, 1 + seed % 12)
        with suppress(NothingToPrune):
            cut += not compare(gated(network, (x,), branches=True), x, OPTIMIZERS["momentum"])
    assert cut > 30


def written(seed: int, length: int) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            author = Author(random.Random(seed).randrange)
            network = author.write(length)
        finally:
            torch.set_default_dtype(torch.float32)
    return randomise(network), author.values[0]


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


@pytest.fixture
def model():
    torch.manual_seed(0)
    return gated(randomise(Residual().double()), (IMAGES,))


IMAGES = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(3)).double()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.one_in(4)
def test_every_optimizer_goes_on_as_if_nothing_had_happened(model, kind):
    assert compare(model, IMAGES, OPTIMIZERS[kind]) == ""


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


class Strided(Side):
    """The shortcut has fewer positions and other channels, and is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.down, self.short = nn.Conv2d(8, 11, 1), nn.Conv2d(6, 11, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.down(torch.relu(self.inner(x)))
        y += self.short(x)
        return self.head(torch.relu(self.norm(y)).mean((2, 3)))


@pytest.mark.parametrize(("net", "out"), [(Side, "down"), (Side, "beside"), (Strided, "down")])
@pytest.mark.one_in(3)
def test_nothing_of_a_closed_branch_is_left_or_computed(net, out):
    model = without(net(), out)
    assert compare(model, IMAGES, OPTIMIZERS["adam"]) == ""
    small = Compaction(model.train())
    last = model.get_submodule(out)
    kind, parameter = type(last), last._parameters["weight"]
    value = parameter.detach().clone()
    small.begin()
    assert parameter.shape == (0, 0, 0, 0)
    assert not parameter.requires_grad
    assert type(last).__name__ == "PassedBy"
    assert small.share < 1
    state = tensors(model)
    small.end()
    assert type(last) is kind
    assert last._parameters["weight"] is parameter
    assert parameter.requires_grad
    assert torch.equal(parameter, value)
    assert differing(state, tensors(model)) == []


def test_of_a_closed_branch_one_capture_is_enough_and_what_is_frozen_stays_so(monkeypatch):
    captured, surveyed = [], in_place.surveyed
    monkeypatch.setattr(in_place, "surveyed", lambda of: captured.append(of) or surveyed(of))
    model = without(Side(), "down")
    model.down.bias.requires_grad_(False)
    small = Compaction(model.train())
    for _ in range(2):
        small.begin()
        assert model._modules["down"].gives == "zeros"
        small.end()
    assert len(captured) == 1
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {"down.bias"}


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


def test_a_closed_branch_that_the_class_computes_itself_is_as_narrow_as_can_be():
    model = without(Inline(), "inner")
    assert compare(model, IMAGES, OPTIMIZERS["adam"]) == ""
    small = Compaction(model.train())
    small.begin()
    assert model.inner.weight.shape[0] == 1
    small.end()


def test_a_run_that_goes_on_knows_what_could_not_be_cut(monkeypatch):
    def in_vain(*_):
        tried.append(1)
        raise UsageError("in vain")

    tried, said = [], []
    monkeypatch.setattr(Compaction, "_cut_to", in_vain)
    model = without(Inline(), "inner")
    before = Shrinking(Compaction(model), "auto", said.append)
    before.to_what_stands()
    assert len(tried) == 2  # there may be no way around what is gone
    state = before.state_dict()
    assert (state["failed"], state["goes_around"]) == (True, False)
    after = Shrinking(Compaction(model), "auto", said.append)
    after.load_state_dict(state)
    after.to_what_stands()
    assert len(tried) == 2
    assert after.state_dict() == state
    assert said == ["compact: the network keeps its size while it trains: in vain"]
    after.load_state_dict({"kept": None, "closed": None})  # of a version that did not note it
    assert not after.state_dict()["failed"]


def test_channels_last_stays(model):
    model.to(memory_format=torch.channels_last)
    last = {"memory_format": torch.channels_last}
    x = IMAGES.to(**last)
    assert compare(model, x, OPTIMIZERS["adam"]) == ""
    small = Compaction(model.train())
    small.begin()
    assert model.stem.weight.shape[0] < 6
    assert model.stem.weight.is_contiguous(**last)
    small.end()
    assert model.stem.weight.is_contiguous(**last)


def test_parameters_are_the_same_objects_and_their_hooks_are_called(model):
    before = dict(model.named_parameters())
    called = []
    model.stem.weight_seen = before["stem.weight"].register_hook(lambda g: called.append(g.shape))
    steps(model, OPTIMIZERS["sgd"](weights(model)), IMAGES, 1)
    small = Compaction(model)
    small.begin()
    steps(model, OPTIMIZERS["sgd"](weights(model)), IMAGES, 1)
    assert all(p is before[name] for name, p in model.named_parameters())
    small.end()
    steps(model, OPTIMIZERS["sgd"](weights(model)), IMAGES, 1)
    assert called[0] == called[2] == (6, 2, 3, 3)
    assert called[1][0] < 6


def test_an_optimizer_whose_state_has_another_shape_is_named_and_nothing_is_cut(model):
    reason = compare(model, IMAGES, lambda ps: torch.optim.Adafactor(ps))
    assert "Adafactor keeps 'row_var' in a shape that does not follow" in reason


def test_gradients_and_moments_come_back(model):
    """A cut between backward and the step: gradients that are there are cut, and whole again."""
    optimizer = OPTIMIZERS["momentum"](weights(model))
    steps(model, optimizer, IMAGES, 1)
    twin, its = copy.deepcopy((model, optimizer))
    small = Compaction(model)
    small.follow((optimizer,))
    for each in (model, twin):
        each(IMAGES).square().mean().backward()
    small.begin()
    optimizer.step(), its.step()
    assert max(differences(small, model, twin).values()) <= EXACT
    cut = places(small, model)
    small.end()
    optimizer.step(), its.step()
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        if name in cut:
            mine, other = cut[name].cut(parameter), cut[name].cut(theirs[name])
            assert (mine - other).abs().max() <= EXACT


def test_optimizers_that_come_one_after_the_other_all_follow(model):
    """Some loops name only those that step next."""
    halves = weights(model)[::2], weights(model)[1::2]
    optimizers = [OPTIMIZERS["momentum"](half) for half in halves]
    for each in optimizers:
        steps(model, each, IMAGES, 1)
        model.zero_grad()
    twin, theirs = copy.deepcopy((model, optimizers))
    small = Compaction(model)
    small.follow(optimizers[:1])
    small.follow(optimizers[1:])
    small.begin()
    for mine, its in zip(optimizers, theirs, strict=True):
        small.follow((mine,))
        steps(model, mine, IMAGES, 1)
        steps(twin, its, IMAGES, 1)
        model.zero_grad(), twin.zero_grad()
    assert small.cut is not None
    assert max(differences(small, model, twin).values()) <= EXACT


# --- what is saved is of the whole model --------------------------------------------------------


def test_its_state_is_that_of_the_whole_model(model):
    whole = tensors(model)
    small = Compaction(model)
    small.begin()
    assert model.stem.weight.shape != whole["stem.weight"].shape
    assert differing(whole, tensors(model)) == []
    assert (
        differing(
            whole, {n.removeprefix("0."): t for n, t in tensors(nn.Sequential(model)).items()}
        )
        == []
    )
    other = {name: value + 1 for name, value in whole.items()}
    assert str(model.load_state_dict(other)) == "<All keys matched successfully>"
    assert differing(other, tensors(model)) == []
    small.end()
    assert differing(other, tensors(model)) == []
    assert {name for name, _ in model.named_buffers()} <= whole.keys()


def pruner_of(model, steps=12, **settings):
    return l0prune.Pruner(
        model, steps=steps, warmup=0, settle=6, compact="settle", say=settings.pop("say", quiet),
        lam=0.0, **settings,
    )  # fmt: skip


def quiet(text):
    """These runs are too short to be any good, which would be said."""


def trained(model, pruner, optimizer, count):
    for _ in range(count):
        model(IMAGES).square().mean().backward()
        pruner.before_step(optimizer)
        optimizer.step()
        pruner.after_step()
        optimizer.zero_grad()


def states(model, pruner, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), pruner.state_dict()))


def started(model):
    pruner = pruner_of(model)
    return model, pruner, torch.optim.Adam(pruner.param_groups(lr=1e-3))


def loaded(run, found):
    for each, state in zip((run[0], run[2], run[1]), (found[0], found[1], found[2]), strict=True):
        each.load_state_dict(state)


def test_a_loop_of_ones_own_is_cut_while_its_gates_stand_and_whole_in_the_end(model):
    shapes = {name: p.shape for name, p in model.named_parameters()}
    l0prune.gates(model).fixed = False
    run = started(model)
    sizes = []
    for _ in range(12):
        trained(*run, 1)
        sizes.append(sum(p.numel() for p in model.parameters()))
    assert sizes[:5] == [sizes[0]] * 5
    assert sizes[5:11] == [sizes[5]] * 6
    assert sizes[5] < sizes[0] == sizes[11]
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert l0prune.export(model).params < sizes[0]


@pytest.mark.parametrize(
    "action",
    [
        l0prune.export,
        lambda model: l0prune.save(model, Path(__file__) / "no folder"),
        lambda model: l0prune.gates(model).put(l0prune.gates(model).open()),
        lambda model: l0prune.fit(model),
        lambda model: l0prune.score(model, "magnitude"),
        lambda model: l0prune.Pruner(model, steps=10),
        l0prune.ungate,
    ],
)
def test_what_wants_the_whole_model_makes_a_cut_one_whole(model, action):
    parameters, run = weights(model), started(model)
    shapes = [p.shape for p in parameters]
    trained(*run, 7)
    assert [p.shape for p in parameters] != shapes
    with suppress(L0pruneError):
        action(model)
    assert [p.shape for p in parameters] == shapes
    assert run[1].compaction.cut is None


def test_what_was_made_whole_is_cut_again_at_the_next_look(model):
    pruner = l0prune.Pruner(
        model, steps=100, warmup=0, settle=60, compact="settle", say=quiet, lam=0.0
    )
    run = model, pruner, torch.optim.Adam(pruner.param_groups(lr=1e-3))
    trained(*run, 50)
    share = run[1].compaction.share
    assert share < 1
    exported = l0prune.export(model)
    assert run[1].compaction.share == 1
    trained(*run, 6)
    assert run[1].compaction.share == share
    trained(*run, 44)
    assert run[1].compaction.share == 1
    assert l0prune.export(model).params == exported.params


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("of", ["widths", "branch"])
def test_a_copy_of_a_cut_model_computes_the_same_and_is_exported(copied, of, model):
    if of == "branch":
        model = without(Side(), "down")
        small = Compaction(model.train())
        small.begin()
    else:
        run = started(model)
        trained(*run, 7)
        small = run[1].compaction
    other = copied(model)
    expected = model.eval()(IMAGES)
    assert torch.equal(other.eval()(IMAGES), expected)
    assert_close(l0prune.export(other).module(IMAGES), expected)
    assert small.cut is not None
    whole = tensors(other)
    small.end()
    assert differing(tensors(model), whole) == []


def test_part_of_a_cut_model_does_not_know_what_was_cut_off(model):
    trained(*started(model), 7)
    gates = copy.copy(l0prune.gates(model))
    gates.made_whole_by = None
    with pytest.raises(UsageError, match="what was cut off is not here"):
        gates.make_whole()


def test_hooks_keep_the_size_of_the_network(capsys):
    model, seen = mlp(), []
    width = model[0].out_features
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    assert "0 has hooks" in Compaction(model).hindrance()
    settings = {**COMMON, "budget": "params=0.5", "lam": None, "gate_lr": None}
    history = l0prune.finetune(model, task(doubled()), **settings | {"progress": True})
    assert set(seen) == {width}
    assert history.last["training_macs"] == 1
    assert "keeps its size while it trains: 0 has hooks" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_hooks_that_compute_a_weight_are_the_models_own():
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.utils.weight_norm(nn.Linear(6, 6)))
    model = l0prune.gate(plain, (torch.randn(2, 4),))
    model.register_forward_hook(lambda *_: None)  # of the whole model
    assert Compaction(model).hindrance() == ""


def test_a_loss_that_knows_the_whole_sizes_keeps_the_network_whole(capsys):
    model = mlp()
    kept = [(p, p.detach().clone()) for p in model.parameters() if p.dim() > 1]

    def near(outputs, targets):
        return loss(outputs, targets) + sum(((p - was) ** 2).sum() for p, was in kept)

    settings = {**COMMON, "budget": "params=0.5", "lam": None, "gate_lr": None}
    near_task = Task(doubled(), loss=near)
    history = l0prune.finetune(model, near_task, **settings | {"progress": True})
    assert history.last["training_macs"] == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "the loss or the model fails at the sizes that are left: The size of tensor" in said


def test_in_an_own_loop_all_optimizers_have_to_be_known(model):
    for named in (0, 1, 2):
        other, said = copy.deepcopy(model), []
        pruner = l0prune.Pruner(other, lam=0.0, steps=20, compact="settle", say=said.append)
        pruner.take_gates()
        parts = pruner.weights[:2], pruner.weights[2:]
        optimizers = [torch.optim.Adam(part) for part in parts]
        for _ in range(18):
            other(IMAGES).square().mean().backward()
            pruner.before_step(*optimizers[:named])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            pruner.after_step()
        assert (pruner.compaction.cut is not None) == (named == 2)
        assert any("no optimizer that before_step" in text for text in said) == (named < 2)


def test_an_optimizer_that_keeps_all_with_its_first_parameter_is_not_cut(model):
    small = Compaction(model)
    places = {id(p) for p in weights(model)}
    small.begin()
    cut = small.cut.by_id().keys() & places
    small.end()
    order = sorted(weights(model), key=lambda p: id(p) in cut)
    assert id(order[0]) not in cut
    optimizer = torch.optim.LBFGS(order, max_iter=2)

    def closure():
        optimizer.zero_grad()
        found = model(IMAGES).square().mean()
        found.backward()
        return found

    optimizer.step(closure)
    small.follow([optimizer])
    with pytest.raises(UsageError, match="LBFGS keeps"):
        small.begin()
    assert small.cut is None


@pytest.mark.parametrize("saved", [3, 8])
@pytest.mark.parametrize("now", [0, 4, 9])
@pytest.mark.one_in(2)
def test_a_checkpoint_of_before_the_cut_or_after_it_is_loaded_at_any_time(model, saved, now):
    other = copy.deepcopy(model)
    run = started(model)
    torch.manual_seed(0)
    trained(*run, saved)
    found, drawn = states(*run), torch.get_rng_state()
    trained(*run, 12 - saved)
    mine = started(other)
    trained(*mine, now)
    loaded(mine, found)
    torch.set_rng_state(drawn)
    trained(*mine, 12 - saved)
    assert differing(tensors(model), tensors(other)) == []


# --- in finetune --------------------------------------------------------------------------------


def finetuned(make, compact, **settings):
    """What is left of a model that was pruned to half of its parameters, and what was said."""
    model = make()
    own = {**COMMON, "lam": None, "budget": "params=0.5", "gate_lr": None, "epochs": 6, **settings}
    with torch.random.fork_rng():
        history = l0prune.finetune(model, task(doubled()), **own, compact=compact)
    assert all(p.grad is None for p in model.parameters())
    state = l0prune.export(model).module.state_dict()
    for path in unread(model):  # a closed branch that is passed by counts no batches
        state.pop(f"{path}.num_batches_tracked", None)
    return state, history.last["training_macs"]


# said by Dynamo alone, which looks at all that a forward reads
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("make", "way"),
    [
        (mlp, {"optimizer": "sgd", "ema": 0.9}),
        (mlp, {"distill": 0.5, "schedule": "constant"}),
        (residual, {"checkpointing": True, "accumulate": 2}),
        pytest.param(residual, {"compile": "eager"}, marks=pytest.mark.slow),
        (partial(residual, True), {"l2": 1e-2, "optimizer": "adamw", "weight_decay": 0.1}),
    ],
    ids=["average", "distilled", "checkpointed", "compiled", "norms and L2"],
)
@pytest.mark.one_in(6)
def test_a_run_that_is_cut_learns_what_one_that_only_masks_does(make, way):
    whole, all_of_it = finetuned(make, "never", **way)
    cut, less = finetuned(make, "settle", **way)
    assert less < 0.95 < all_of_it == 1
    assert_close(whole, cut, rtol=1e-9, atol=1e-10)


def test_gates_that_are_closed_for_good_are_cut_while_others_learn():
    _, late = finetuned(mlp, "settle")
    _, early = finetuned(mlp, "auto")
    assert early < late


def test_what_raises_leaves_the_model_whole():
    model = mlp()
    shapes = [p.shape for p in model.parameters()]
    calls = []

    def failing(outputs, targets):
        calls.append(len(next(model.parameters())))
        if len(calls) >= 47:
            raise ZeroDivisionError
        return loss(outputs, targets)

    settings = {**COMMON, "lam": None, "budget": "params=0.5", "gate_lr": None, "epochs": 6}
    with pytest.raises(ZeroDivisionError):
        l0prune.finetune(model, Task(doubled(), loss=failing), **settings)
    assert calls[-1] < calls[0]
    assert [p.shape for p in model.parameters()] == shapes


def test_what_hinders_a_cut_is_said_before_the_first_step(capsys):
    settings = {**COMMON, "epochs": 2, "progress": True}
    l0prune.finetune(mlp(), task(doubled()), **settings, distill=0.5, match="0")
    said = capsys.readouterr().err
    text = "compact: the network keeps its size while it trains: match compares what its modules"
    assert text in " ".join(said.split())
    assert said.index("compact:") < said.index("epoch 1/2")
    l0prune.finetune(mlp(), task(doubled()), **settings, distill=0.5, match="0", compact="never")
    assert "compact" not in capsys.readouterr().err
