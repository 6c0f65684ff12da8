"""Gates that follow the input: where they go, what they compute, and that exports are exact."""

import copy

import pytest
import small_task
import torch
import torch.nn.functional as F
from input_gated import IMAGES, POINTS, convolutions, images, points, said
from stacks import stack
from torch import nn
from torch.utils.checkpoint import checkpoint

import l0prune
from l0prune.errors import AlreadyGated, UsageError
from l0prune.gating.kinds.hard_concrete import HardConcrete


def multipliers(gate, x):
    """z of a gate of one axis by the formulas."""
    log_alpha = [20 * layer(gate.hidden(x).relu()) for layer in (gate.axes[0], gate.whole)]
    one, whole = ((each.sigmoid() * 1.2 - 0.1).clamp(0, 1) for each in log_alpha)
    return one * whole


def test_the_network_computes_the_same_in_the_beginning():
    model = stack().eval()
    random, before = torch.get_rng_state(), model(POINTS)
    gated = l0prune.add_input_gates(model, (POINTS,))
    assert torch.equal(random, torch.get_rng_state())
    assert gated.network is model
    assert torch.equal(gated(POINTS), before)
    said(gated)
    assert not torch.equal(gated(POINTS), before)
    assert torch.equal(gated.take_off()(POINTS), before)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_channels_are_multiplied_by_what_the_blocks_input_says():
    gated = points()
    x = gated.network.stem(POINTS)
    for block, gate in zip(gated.network.blocks, gated.gates, strict=True):
        inner = F.linear(x, block.inner.weight, block.inner.bias).relu() * multipliers(gate, x)
        x = x + F.linear(inner, block.outer.weight, block.outer.bias)
    assert torch.allclose(gated(POINTS), gated.network.last(x), atol=1e-6)
    z = multipliers(gated.gates[0], gated.network.stem(POINTS))
    assert (z == 0).any()
    assert ((z > 0) & (z < 1)).any()
    assert (z.amax(0) != z.amin(0)).any()


def test_feature_maps_are_averaged_first():
    gated = images()
    stem, block = gated.network[0], gated.network[1]
    x = stem(IMAGES)
    z = multipliers(gated.gates[0], x.mean((2, 3)))[:, :, None, None]
    block_alone = copy.deepcopy(convolutions()[1])
    inner = block_alone.norm(block_alone.first(x)).relu() * z
    expected = x + block_alone.last(block_alone.second(inner))
    assert torch.allclose(block(x), expected, atol=1e-6)


def test_each_position_can_have_gates_of_its_own():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = stack()

        def forward(self, x):
            return self.stack(x).mean(1)

    x = torch.randn(2, 4, 6)
    model = Tokens().eval()
    gated = said(l0prune.add_input_gates(model, (x,), per="position"))
    alone = points()
    assert torch.allclose(gated(x)[0], alone(x[0]).mean(0), atol=1e-6)


def test_in_training_mode_gates_are_sampled():
    gated = points().train()
    torch.manual_seed(0)
    first, second = gated(POINTS), gated(POINTS)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(gated(POINTS), first)


class Recomputed(nn.Module):
    """A block whose values are computed once more in the backward pass."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def test_recomputed_blocks_see_the_same_sample():
    found = []
    for wrap in (nn.Identity, Recomputed):
        gated = images().train()
        blocks = [gated.network[1], gated.network[2]]
        gated.network[1], gated.network[2] = (
            Recomputed(block) if wrap is Recomputed else block for block in blocks
        )
        torch.manual_seed(2)
        gated(IMAGES).square().sum().backward()
        found.append([p.grad for gate in gated.gates for p in gate.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert found[0][0].abs().max() > 0


def test_blocks_with_a_shortcut_can_be_closed_whole():
    assert [block.skips for block in points().blocks] == [True] * 4
    assert [block.skips for block in points(skip=False).blocks] == [False] * 4
    gated = images()
    with torch.no_grad():
        gated.gates[0].whole.bias.fill_(-10)
        gated.gates[0].whole.weight.zero_()
    x = gated.network[0](IMAGES)
    block = convolutions()[1]
    constant = block.last(block.second(torch.zeros(1, 6, 8, 8)))
    assert torch.allclose(gated.network[1](x), x + constant, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "kind"), [(points, HardConcrete()), (images, HardConcrete(estimator="median"))]
)
@pytest.mark.slow
def test_static_gates_cut_what_no_input_needs_and_the_export_is_exact(make, kind):
    x = POINTS if make is points else IMAGES
    model = make(gate=kind).double()
    inner = {axis.name for axis in l0prune.gates(l0prune.gate(model, (x.double(),))).axes}
    assert any(name.startswith("network.") for name in inner)
    gates = l0prune.gates(model)
    with torch.no_grad():
        noise = torch.randn(gates.log_alpha.shape, generator=torch.Generator().manual_seed(5))
        gates.log_alpha.add_(4 * noise.double())
    small = l0prune.export(model)
    assert small.params < sum(p.numel() for p in model.parameters())
    assert torch.allclose(small.module(x.double()), model(x.double()), rtol=1e-10, atol=1e-12)


def small_network():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 8))
    return nn.Sequential(nn.Linear(6, 8), block, nn.Linear(8, 3)).eval()


@pytest.mark.slow
def test_they_learn_with_gates_and_reach_the_target():
    data = small_task.data()
    model = l0prune.add_input_gates(stack(), (POINTS,), target=0.6)
    settings = {"epochs": 30, "batch_size": 16, "lr": 1e-2, "ema": 0.0, "report": False}
    l0prune.gate(model, (POINTS,))
    history = l0prune.finetune(model, data, lam=0.0, start="alike", **settings)
    assert history.last["error"] < 0.1
    found = l0prune.input_macs(model, data)
    assert found.expected < 0.7 * found.whole


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = stack(blocks=2)

    def forward(self, x):
        x = self.stack.stem(x)
        for _ in range(2):
            x = self.stack.blocks(x)
        return self.stack.last(x)


REFUSED = {
    "no block that repeats": (small_task.network, {}),
    "at=\\['…'\\], of 1": (small_network, {}),
    "matches no block with inner axes": (stack, {"at": "layers.*"}),
    "is not called once": (Twice, {}),
    "give a target, or a price": (stack, {"target": 0.5, "price": 1.0}),
    "with all input gates closed": (stack, {"target": 0.01}),
    "per must be": (stack, {"per": "token"}),
    "temperature that changes": (stack, {"gate": HardConcrete(beta="learn")}),
    "gate must be a gate": (stack, {"gate": HardConcrete}),
    "has input gates already": (points, {}),
    "put the input gates on first": (lambda: l0prune.add_exits(stack(), (POINTS,)), {}),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_have_them_is_refused(text):
    make, options = REFUSED[text]
    with pytest.raises(UsageError, match=text):
        l0prune.add_input_gates(make().eval(), (POINTS,), **options)


def test_gated_models_are_refused():
    with pytest.raises(AlreadyGated):
        l0prune.add_input_gates(l0prune.gate(stack(), (POINTS,)), (POINTS,))


def test_gates_for_each_position_need_positions():
    with pytest.raises(UsageError, match="gates for each position do not fit"):
        l0prune.add_input_gates(convolutions(), (IMAGES,), per="position")
