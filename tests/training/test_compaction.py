"""A network that is cut in the midst of its training learns what the masked one does."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from contextlib import suppress

import pytest
import torch
from cut_networks import (
    EXACT,
    IMAGES,
    OPTIMIZERS,
    Inline,
    Residual,
    Side,
    compare,
    differences,
    gated,
    half_closed,
    laid_out,
    outputs,
    places,
    steps,
    weights,
    without,
)
from deadness import randomise
from dynamic_layers import Dynamic
from example_counts import costliest
from hypothesis import assume, given
from hypothesis import strategies as st
from random_networks import written
from small_task import differing, tensors
from torch import Tensor, nn

import l0prune
from l0prune.errors import NothingToPrune, UsageError
from l0prune.exporting import in_place
from l0prune.gating.gated_class import CHILD
from l0prune.training import compaction
from l0prune.training.averages import Average
from l0prune.training.compaction import Compaction
from l0prune.training.wrappers import channels_last


@pytest.fixture
def model():
    return half_closed()


MEMORY = torch.contiguous_format, torch.channels_last
KINDS = "momentum", "fused", "fused adam", "fused sgd", "foreach"


@costliest
@given(st.integers(0, 2**32), st.integers(1, 10), st.sampled_from(MEMORY), st.sampled_from(KINDS))
def test_random_networks_learn_the_same_cut_and_masked(seed, length, memory, kind):
    network, x = written(random.Random(seed).randrange, length)
    assume(trains(network, x))
    learns_the_same(network, x, memory, kind)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_random_networks(part):
    cut = 0
    for seed in range(100 * part, 100 * part + 100):
        network, x = written(random.Random(seed).randrange, 1 + seed % 12)
        if trains(network, x):
            cut += learns_the_same(network, x, MEMORY[seed % 2], KINDS[seed % 5])
    assert cut > 30


class CountingBranch(nn.Module):
    """A branch beside a shortcut, and a count of all forwards, in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.branch = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.calls * 2
        h = self.first(x)
        return self.head(h + self.branch(h)) * (1 + 0.1 * self.calls)


def test_what_a_forward_keeps_is_not_of_forwards_that_only_check():
    torch.manual_seed(0)
    x, y = torch.randn(40, 6), torch.arange(40) % 2
    model = l0prune.gate(CountingBranch(), x[:2], outputs="output*")
    assert (float(model.calls), float(model.last)) == (0, 0)
    gates = l0prune.gates(model)
    with torch.no_grad():
        for axis in gates.axes:
            if axis.kind == "branch":
                gates.log_alpha[axis.slice] = -5.0
        model.calls.fill_(7)
    small = Compaction(model)
    small.begin()
    assert small.cut is not None
    assert (float(model.calls), float(model.last)) == (7, 0)
    small.end()
    seen = []
    model.register_forward_pre_hook(lambda mod, _: seen.append((mod.training, float(mod.calls))))
    batches = [(x[:20], y[:20]), (x[20:], y[20:])]
    options = {"epochs": 1, "progress": False, "report": False, "compact": "never"}
    l0prune.finetune(model, (batches, batches), budget="params=0.9", start="fisher", **options)
    at_first = next(calls for training, calls in seen if training)
    assert seen[0] == (False, 7)
    assert at_first == 7 + len(batches)  # the test before, but neither checks nor scores


def learns_the_same(network: nn.Module, x: Tensor, memory: torch.memory_format, kind: str) -> bool:
    """Compare what is learned; whether something was cut."""
    with suppress(NothingToPrune), channels_last(network, memory == torch.channels_last):
        x = x.to(memory_format=memory)
        return not compare(gated(network, (x,), branches=True), x, OPTIMIZERS[kind], memory)
    return False


def trains(network: nn.Module, x: Tensor) -> bool:
    """Check that torch itself can: not where what a gradient needs was written over."""
    try:
        sum(output.square().mean() for output in outputs(network.train(), x)).backward()
    except RuntimeError:
        return False
    network.zero_grad()
    return True


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("way", ["product", "einsum", "loop"])
@pytest.mark.one_in(6)
def test_closed_kernels_are_cut(way, memory):
    mixed = Dynamic(6, 5, 4, False, True, way)
    layers = nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), mixed, nn.BatchNorm2d(5), nn.Sigmoid()
    torch.manual_seed(0)
    network = randomise(nn.Sequential(*layers, nn.Flatten(), nn.Linear(80, 3)).double())
    kernels = set()
    network.register_forward_pre_hook(lambda *_: kernels.add(len(mixed.weight)))
    assert learns_the_same(network, IMAGES, memory, "foreach")
    assert kernels == {4, 3}


def test_a_bias_whose_gradient_is_rounding_learns_the_same():
    layers = nn.Conv2d(2, 6, 3), nn.Sigmoid(), nn.Conv2d(6, 5, 1), nn.BatchNorm2d(5), nn.Flatten()
    torch.manual_seed(0)
    network = randomise(nn.Sequential(*layers, nn.Linear(20, 3)).double())
    with torch.no_grad():
        network[-1].weight.mul_(10)  # and the rounding by about 100
    assert learns_the_same(network, IMAGES, MEMORY[0], "foreach")


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.one_in(16)
def test_every_optimizer_goes_on_as_if_nothing_had_happened(model, kind):
    assert compare(model, IMAGES, OPTIMIZERS[kind]) == ""


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
    assert type(last).__name__ == "SkippedModule"
    assert small.share < 1
    state = tensors(model)
    small.end()
    assert type(last) is kind
    assert last._parameters["weight"] is parameter
    assert parameter.requires_grad
    assert torch.equal(parameter, value)
    assert differing(state, tensors(model)) == []


def test_norms_within_a_closed_branch_count_nothing_there():
    model = without(Residual(), "branch.5")
    assert compare(model, IMAGES, OPTIMIZERS["adam"]) == ""
    small = Compaction(model.train())
    small.begin()
    assert type(model.branch).__name__ == "SkippedModule"
    small.end()


def test_of_a_closed_branch_one_capture_is_enough_and_what_is_frozen_stays_so(monkeypatch):
    captured, surveyed = [], in_place.surveyed
    monkeypatch.setattr(
        in_place, "surveyed", lambda of, **how: captured.append(of) or surveyed(of, **how)
    )
    model = without(Side(), "down")
    model.down.bias.requires_grad_(False)
    small = Compaction(model.train())
    for _ in range(2):
        small.begin()
        assert model._modules["down"].gives == "zeros"
        small.end()
    assert len(captured) == 1
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {"down.bias"}


def test_a_closed_branch_that_the_class_computes_itself_is_as_narrow_as_can_be():
    model = without(Inline(), "inner")
    assert compare(model, IMAGES, OPTIMIZERS["adam"]) == ""
    small = Compaction(model.train())
    small.begin()
    assert model.inner.weight.shape[0] == 1
    small.end()


class Volumes(nn.Sequential):
    """Convolutions of three dims, one of them with kernels of a single weight."""

    def __init__(self) -> None:
        layers = nn.Conv3d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv3d(6, 5, 1), nn.ReLU()
        super().__init__(*layers, nn.Conv3d(5, 3, 3))


VOLUMES = IMAGES[:, :, None].expand(-1, -1, 4, -1, -1)


@pytest.mark.parametrize(
    ("net", "x", "memory"),
    [(net, IMAGES, memory) for net in (Residual, Side, Strided) for memory in MEMORY]
    + [(Volumes, VOLUMES, memory) for memory in (MEMORY[0], torch.channels_last_3d)],
)
@pytest.mark.parametrize("kind", ["adam", "fused"])
@pytest.mark.one_in(16)
def test_all_that_is_cut_has_the_strides_that_torch_gives_it(net, x, memory, kind):
    """Fused optimizers refuse gradients and moments that lie otherwise than their parameter."""
    model = gated(net(), (x,)).to(memory_format=memory)
    x = x.contiguous(memory_format=memory)
    optimizer, average = OPTIMIZERS[kind](weights(model)), Average(model, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    small = Compaction(model)
    small.follow((optimizer,))
    small.average = average

    def steps_scaled() -> None:
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        average.update()
        assert scaler.get_scale() == 8.0
        for parameter in weights(model):  # torch's own of a Conv3d may lie otherwise
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter)
        lie_alike(model, average)
        laid_out(weights(model), optimizer, memory)

    for _ in range(2):  # a second cut is of what the first one left
        steps_scaled()
        small.begin()
        assert small.cut is not None
        lie_alike(model, average)
        laid_out(weights(model), optimizer, memory)
        steps_scaled()
        small.end()
        lie_alike(model, average)
        laid_out(weights(model), optimizer, memory)


def lie_alike(model: nn.Module, average: Average) -> None:
    named = dict(model.named_parameters())
    for name, value in average.tensors().items():
        if name in named:
            assert value.stride() == named[name].stride()


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


def test_an_optimizer_that_keeps_all_with_its_first_parameter_is_not_cut(model):
    small = Compaction(model)
    small.begin()
    cut = small.cut.by_id().keys()
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


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_hooks_that_compute_a_weight_are_the_models_own():
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.utils.weight_norm(nn.Linear(6, 6)))
    model = l0prune.gate(plain, (torch.randn(2, 4),))
    model.register_forward_hook(lambda *_: None)  # of the whole model
    assert Compaction(model).hindrance() == ""


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


@pytest.mark.slow
def test_an_optimizer_that_a_loop_replaces_is_let_go(model):
    small = Compaction(model)
    optimizer = OPTIMIZERS["adam"](weights(model))
    small.follow((optimizer,))
    small.begin()
    gone = weakref.ref(optimizer)
    optimizer = OPTIMIZERS["momentum"](weights(model))
    small.follow((optimizer,))
    gc.collect()
    assert gone() is None
    steps(model, optimizer, IMAGES, 1)
    small.end()
    velocity = optimizer.state[model.stem.weight]["momentum_buffer"]
    assert velocity.shape == model.stem.weight.shape


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


def test_a_weight_of_a_closed_branch_can_be_read_though_nothing_is_left_of_it():
    model = without(Residual(), "branch.5")
    layers = [module for module in model.branch if hasattr(module, "weight")]
    before = [layer.weight.detach().clone() for layer in layers]
    small = Compaction(model.train())
    small.begin()
    assert float(sum(layer.weight.abs().sum() for layer in layers)) == 0
    assert all(layer.weight.numel() == 0 for layer in layers)
    model.load_state_dict(model.state_dict(), assign=True)
    small.end()
    assert all(map(torch.equal, before, [layer.weight for layer in layers]))


def test_a_network_within_another_module_is_not_cut_in_finetune(model):
    around = nn.Sequential(model)
    assert "it is a part of the module that is trained" in Compaction(around).hindrance()
    own = Compaction(around, own_loop=True)
    assert own.hindrance() == ""
    own.begin(resumes=True)
    assert own.cut is not None
    own.end()
    replica = nn.parallel.DataParallel(model)
    assert Compaction(replica, own_loop=True).hindrance() == ""


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8, sparse=True)
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(self.words(x)))).mean(1)


def test_sparse_gradients_become_whole_again():
    x = torch.tensor([[1, 2, 2], [4, 0, 2]])
    model = l0prune.gate(randomise(Words().double()), (x,))
    bank = l0prune.gates(model)
    with torch.no_grad():
        bank.log_alpha[::2] = -5.0
    bank.fixed = True
    small = Compaction(model.train())
    small.begin()
    model(x).square().sum().backward()
    cut = small.cut.places["words.weight"]
    expected = model.words._parameters["weight"].grad.to_dense()
    small.end()
    grad = model.words._parameters["weight"].grad
    assert grad.is_sparse
    assert grad.shape == (9, 8)
    assert torch.equal(cut.cut(grad.to_dense()), expected)
    assert grad.to_dense().count_nonzero() == expected.count_nonzero()


class Auxiliary(nn.Module):
    """It keeps something of its forward while it trains, or wants more there."""

    def __init__(self, keeps=None, targets: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.keeps, self.targets, self.kept = keeps, targets, None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = torch.relu(self.first(x))
        if self.training and self.targets:
            return self.last(hidden) - targets.mean()
        if self.training and self.keeps is not None:
            self.kept = self.keeps(hidden, self.last(hidden))
        return self.last(hidden)


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (Auxiliary(lambda hidden, output: output.mean()), ""),
        # of another shape: whoever reads it finds out
        (Auxiliary(lambda hidden, output: hidden), ""),
        (
            Auxiliary(lambda hidden, output: hidden.mean()),
            "in training mode kept becomes something else",
        ),
        (Auxiliary(targets=True), "cannot be tried on its example"),
    ],
)
@pytest.mark.one_in(2)
def test_what_a_training_step_keeps_or_wants_beside_its_output(network, reason):
    x = torch.randn(5, 4).double()
    model = gated(randomise(network.double()), (x,))
    model(x, x).sum()  # what it keeps of this is in the midst of a graph
    small = Compaction(model)
    if not reason:
        small.begin()
        assert small.cut is not None
        small.end()
        return
    with pytest.raises(UsageError, match=reason):
        small.begin()
    assert small.cut is None


def test_a_network_that_cannot_be_copied_is_not_cut(model):
    model.lock = threading.Lock()
    with pytest.raises(UsageError, match="the model cannot be copied"):
        Compaction(model.train()).begin()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_networks_in_half_precision_are_cut_too(dtype):
    model, x = half_closed().to(dtype), IMAGES.to(dtype)
    optimizer = torch.optim.SGD(weights(model), lr=1e-2)
    small, twin = Compaction(model), copy.deepcopy(model)
    small.follow((optimizer,))
    small.begin()
    assert small.share < 0.5
    steps(model, optimizer, x, 1)
    steps(twin, torch.optim.SGD(weights(twin), lr=1e-2), x, 1)
    assert max(differences(small, model, twin).values()) < 8 * torch.finfo(dtype).eps
    assert {p.dtype for p in weights(model)} == {dtype}
    small.end()


@pytest.mark.parametrize(("steps_left", "cuts"), [(1, False), (200, True)])
@pytest.mark.one_in(2)
def test_a_cut_has_to_win_back_what_it_costs(model, steps_left, cuts, monkeypatch):
    monkeypatch.setitem(compaction._WAITED, "cpu", 20)
    small = Compaction(model.train())
    small.look(steps_left, begins=True)
    assert (small.cut is not None) == cuts
    small.end()


def test_a_gate_that_opens_while_its_slot_is_cut_brings_it_back(model):
    small = Compaction(model.train())
    small.look(1, begins=True)
    bank, kept = l0prune.gates(model), small.cut.kept
    share = small.share
    with torch.no_grad():
        bank.log_alpha[int((~kept).nonzero()[0])] = 3.0
    small.look(1)
    assert int(small.cut.kept.sum()) > int(kept.sum())
    assert small.share > share
    assert torch.equal(small.cut.kept, bank.plan.kept(bank.open()))
    small.end()


def test_a_state_with_gates_that_are_open_makes_a_cut_model_whole(model):
    x = IMAGES
    with torch.no_grad():
        before, bank = copy.deepcopy(model.state_dict()), l0prune.gates(model)
        before[f"{CHILD}.log_alpha"].fill_(3.0)
        twin = copy.deepcopy(model)
        twin.load_state_dict(before)
        expected = twin.eval()(x)
    small = Compaction(model.train())
    small.begin()
    half = copy.deepcopy(model.state_dict())
    assert not model.load_state_dict(before).missing_keys
    assert small.cut is None
    with torch.no_grad():
        assert torch.equal(model.eval()(x), expected)
    assert bank.made_whole_by is None
    model.load_state_dict(half)
    small.begin()
    model.load_state_dict(half)  # its gates are those of the cut
    assert small.cut is not None
    assert differing(half, model.state_dict()) == []
    small.end()
    assert differing(half, model.state_dict()) == []
