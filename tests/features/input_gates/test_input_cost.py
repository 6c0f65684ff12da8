"""What input gates pay, and what they leave of a network's work."""

import copy
import math

import pytest
import small_task
import torch
from input_gated import IMAGES, POINTS, images, points
from stacks import stack

import l0prune
from l0prune.errors import DataError, UsageError
from l0prune.features.input_gates.cost import _prior_cdf, shaping

RATIO = math.log(0.1 / 1.1) * 2 / 3  # β·log(−γ/ζ)
TARGETS = torch.tensor([0, 1, 2, 1, 0])


def chances(gate, x):
    """P(z ≠ 0) of the channels, and of the block, by eq. 12."""
    hidden = gate.hidden(x).relu()
    return [(20 * layer(hidden) - RATIO).sigmoid() for layer in (gate.axes[0], gate.whole)]


def test_the_share_is_what_is_expected_of_the_macs():
    model = points().eval()
    x, expected = model.network.stem(POINTS), []
    fixed = 6 * 12 + 12 * 3 + 4 * 8 * (12 + 12 + 1)  # first and last layer, gating modules
    assert model.macs == fixed + 4 * 2 * 12 * 12
    blocks = []
    for block, gate in zip(model.network.blocks, model.gates, strict=True):
        blocks.append(chances(gate, x))
        x = block(x)
    model.train()
    torch.manual_seed(0)
    model.network.blocks.eval()  # so that what a block gives does not depend on the noise
    for gate in model.gates[1:]:
        gate.eval()
    model(POINTS)
    assert model.shares() is None
    one, whole = blocks[0]
    found = model.gates[0].chances
    assert torch.allclose(found[0], one, atol=1e-6)
    assert torch.allclose(found[1], whole, atol=1e-6)
    for gate, of in zip(model.gates, blocks, strict=True):
        gate.chances = of
        expected.append((of[0].mean(1) * of[1][:, 0]).mean() * 2 * 12 * 12)
    assert model.shares().item() == pytest.approx(((fixed + sum(expected)) / model.macs).item())


def test_a_target_has_a_multiplier_that_follows_the_excess():
    model = points(target=0.5).train()
    model(POINTS)
    excess = model.shares().item() - 0.5
    assert l0prune.input_penalty(model).item() == 0  # the multiplier begins at 0
    assert l0prune.input_penalty(model) is None
    assert float(model.multiplier) == pytest.approx(max(0, 0.05 * excess), rel=1e-4)
    with torch.no_grad():
        model.multiplier.fill_(2.0)
    model(POINTS)
    excess = model.shares().item() - 0.5
    total = l0prune.input_penalty(model)
    assert total.item() == pytest.approx(2 * excess, rel=1e-4)
    total.backward()
    assert model.gates[3].axes[0].bias.grad.abs().max() > 0
    assert float(model.multiplier) == pytest.approx(2 + 0.05 * excess, rel=1e-4)


def test_a_price_is_paid_for_the_share():
    model = points(price=0.3).train()
    model(POINTS)
    share = model.shares().item()
    assert l0prune.input_penalty(model).item() == pytest.approx(0.3 * share)
    assert l0prune.input_penalty(model.eval()) is None
    assert l0prune.input_penalty(stack()) is None


def test_the_penalty_of_a_gated_model_has_it():
    model = l0prune.gate(points(price=0.3), (POINTS,)).train()
    alone = l0prune.penalty(model, 1e-3)
    model(POINTS)
    share = model.shares().item()
    assert l0prune.penalty(model, 1e-3).item() == pytest.approx(alone.item() + 0.3 * share)


def test_batch_shaping_compares_with_beta():
    stats = pytest.importorskip("scipy.stats")
    p = torch.linspace(0.001, 0.999, 101, dtype=torch.float64, requires_grad=True)
    beta = stats.beta(0.6, 0.4)
    assert abs(_prior_cdf(p).detach().numpy() - beta.cdf(p.detach().numpy())).max() < 1e-4
    _prior_cdf(p).sum().backward()
    slopes = beta.pdf(p.detach().numpy())
    assert abs(p.grad.numpy() / slopes - 1)[1:-1].max() < 0.02
    model = points(shape=1.0).train()
    model(POINTS)
    found = []
    for gate in model.gates:
        for of in gate.chances:
            for column in of.T.tolist():
                at = beta.cdf(sorted(column))
                found.append(sum((f - (i + 1) / 6) ** 2 for i, f in enumerate(at)) / 5)
    assert shaping(model.gates).item() == pytest.approx(sum(found) / len(found), rel=1e-3)


def test_a_loop_that_forgets_it_is_told():
    model = l0prune.gate(points(), (POINTS,)).train()
    said = []
    pruner = l0prune.Pruner(model, steps=10, lam=0.0, say=said.append)
    model(POINTS).sum().backward()
    pruner.before_step()
    assert any("loss + l0prune.input_penalty" in text for text in said)


def test_a_penalty_on_weights_of_the_same_slots_is_refused():
    model = l0prune.gate(points(), (POINTS,))
    with pytest.raises(UsageError, match="has input gates"):
        l0prune.Pruner(model, steps=10, penalty="group-lasso", lam=1e-3)


def counted(model, x, kept=None):
    """MACs of one example, its closed channels gone, with loops."""
    z = {}
    handles = [
        gate.register_forward_hook(lambda _, __, out, n=n: z.update({n: out[0][0] != 0}))
        for n, gate in enumerate(model.gates)
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return [int(z[n].sum()) for n in sorted(z)]


def test_expected_macs_are_the_mean_over_examples():
    model = points()
    each = [counted(model, x[None]) for x in POINTS]
    fixed = model.macs - 4 * 2 * 12 * 12
    expected = sum(fixed + sum(2 * 12 * n for n in of) for of in each) / len(each)
    found = l0prune.input_macs(model, [(POINTS[:3], TARGETS[:3]), (POINTS[3:], TARGETS[3:])])
    assert found.expected == pytest.approx(expected)
    assert found.whole == model.macs
    assert found.examples == 5
    assert found.blocks[0].open == pytest.approx(sum(of[0] for of in each) / 5 / 12)
    assert 0 <= found.blocks[0].always <= found.blocks[0].open <= 1 - found.blocks[0].never
    assert model.gates[0].chances == []
    closed = [sum(of[n] == 0 for of in each) / 5 for n in range(4)]
    skipped = fixed + sum(2 * 12 * 12 * (1 - share) for share in closed)
    assert found.skipped >= found.expected
    assert found.skipped >= skipped - 1e-6  # closed one by one, a block is not left out whole


def test_gated_ones_count_what_the_export_has():
    model = images()
    closing = copy.deepcopy(model)
    l0prune.gate(closing, (IMAGES,), branches=False)
    gates = l0prune.gates(closing)
    with torch.no_grad():
        noise = torch.randn(gates.log_alpha.shape, generator=torch.Generator().manual_seed(2))
        gates.log_alpha.add_(3 * noise)
    batch = [(IMAGES, TARGETS[:3])]
    found = l0prune.input_macs(closing, batch)
    small = l0prune.export(closing)
    assert found.whole == small.macs
    again = small.module
    each = [counted(again, x[None]) for x in IMAGES]
    fixed, expected = small.macs, []
    for n, block in enumerate((again.network[1], again.network[2])):
        ways = 64 * 9 * (block.first.in_channels + block.second.out_channels)
        fixed -= ways * block.first.out_channels
        expected.append(sum(of[n] for of in each) / 3 * ways)
    assert found.expected == pytest.approx(fixed + sum(expected))


def test_what_cannot_be_counted_is_said():
    with pytest.raises(UsageError, match="has no input gates"):
        l0prune.input_macs(stack(), small_task.data())
    with pytest.raises(DataError, match="no examples"):
        l0prune.input_macs(points(), [])
