import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.plan.switches import switches_of
from l0prune.training.budget import BlockCoupling, Budget


def gated():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return l0prune.gate(model, torch.zeros(2, 4), include=["0"])


def at(model, value):
    with torch.no_grad():
        l0prune.gates(model).log_alpha.fill_(value)


def test_the_lagrangian_is_the_multiplier_times_the_excess_over_the_target():
    model = gated()
    budget = Budget(model, "params=23", steps=10, ramp=0.0)
    budget.multipliers = torch.tensor([3.0])
    at(model, 0.5)
    p = l0prune.gates(model).open_probability()
    expected = 3.0 * ((7 * p.sum() + 2) / 23 - 1)
    torch.testing.assert_close(l0prune.penalty(model, budget), expected)


def test_every_step_takes_the_same_part_of_what_the_target_leaves():
    model = gated()
    budget = Budget(model, "params=0.5", steps=10, ramp=0.4)
    targets = []
    for _ in range(6):
        targets.append(float(budget.targets))
        l0prune.penalty(model, budget)
        budget.step()
    assert targets == pytest.approx([1, 0.5**0.25, 0.5**0.5, 0.5**0.75, 0.5, 0.5])


def test_the_target_begins_at_what_is_left_already():
    model = gated()
    l0prune.fit(model, "params=0.7", l0prune.score(model, "magnitude"), fill=False)
    share = (7 * int(l0prune.gates(model).open().sum()) + 2) / 58
    budget = Budget(model, "params=0.4", steps=10, ramp=1.0)
    assert float(budget.targets) == pytest.approx(share)
    budget.done = 5
    assert float(budget.targets) == pytest.approx((share * 0.4) ** 0.5)
    other = Budget(gated(), "params=0.4", steps=10, ramp=1.0)
    other.load_state_dict(budget.state_dict())
    assert float(other.targets) == float(budget.targets)


def test_a_multiplier_ascends_by_the_excess_and_starts_again_once_the_budget_is_met():
    model = gated()
    at(model, 9.0)  # all open: 1 of the dense count is expected
    budget = Budget(model, "params=0.95", steps=10, ramp=0.0, rate=2.0)
    found = []
    for _ in range(2):
        l0prune.penalty(model, budget)
        budget.step()
        found.append(float(budget.multipliers))
    over = 1 / 0.95 - 1
    first = 2 * over
    assert found == pytest.approx([first, first + 2 * over * (1 + first)], rel=1e-3)
    at(model, -9.0)
    l0prune.penalty(model, budget)
    budget.step()
    assert float(budget.multipliers) == 0


def test_a_multiplier_goes_by_the_excess_ten_steps_from_now():
    model = gated()
    budget = Budget(model, "params=0.5", steps=10, ramp=0.0, rate=0.1)
    excess, found = [], []
    for value in (3.0, 2.99, -0.5):
        at(model, value)
        p = l0prune.gates(model).open_probability().detach()
        excess.append(float(budget.bounds[0].expected_share(p)) / 0.5 - 1)
        l0prune.penalty(model, budget)
        budget.step()
        found.append(float(budget.multipliers))
    first, second, third = excess
    assert second + 10 * (second - first) > 0.1  # counts no more beyond that
    assert found[1] == pytest.approx(0.01 + 0.01 * (1 + 0.01), rel=1e-3)
    assert third > 0 > third + 10 * (third - second)  # it will be met, if it goes on like that
    assert found[2] == 0


def test_what_is_expected_follows_the_target_and_does_not_fall_far_below_it():
    """Gates descend a loss of their own by Adam. Without looking ahead it falls to 0.85 of it."""
    layers = nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 2)
    model = l0prune.gate(nn.Sequential(*layers), torch.zeros(2, 20), include=["0"])
    gates = l0prune.gates(model)
    gates.init_from_scores(torch.rand(gates.plan.size))
    worth = 1e-3 * torch.rand(gates.plan.size)
    budget = Budget(model, "params=0.4", steps=140)
    optimizer = torch.optim.Adam([gates.log_alpha], lr=0.3, betas=(0.9, 0.99))
    over = []
    for _ in range(140):
        optimizer.zero_grad()
        noise = 3e-3 * torch.randn(gates.plan.size)
        loss = (noise - worth) @ gates.open_probability() + l0prune.penalty(model, budget)
        loss.backward()
        budget.step()
        optimizer.step()
        over.append(float(budget.share_of_targets(gates.open_probability().detach())))
    assert min(over[20:]) > 0.9
    assert max(over[-10:]) < 1.05


def test_the_gradient_of_the_gates_keeps_its_direction_and_its_scale():
    model = gated()
    at(model, 0.5)
    budget = Budget(model, "params=0.5", steps=10, ramp=0.0)
    budget.multipliers = torch.tensor([99.0])
    log_alpha = l0prune.gates(model).log_alpha
    l0prune.penalty(model, budget).backward()
    before = log_alpha.grad.clone()
    budget.step()
    torch.testing.assert_close(log_alpha.grad, before / 100)


def test_the_gradient_of_the_gates_has_the_size_that_the_loss_gives_it():
    """(a + λ·b) / (1 + λ·|b|/|a|), whose norm is |a| at most, and next to it for a large λ."""
    model = gated()
    at(model, 0.5)
    log_alpha = l0prune.gates(model).log_alpha
    budget = Budget(model, "params=0.5", steps=10, ramp=0.0)
    p = l0prune.gates(model).open_probability()
    (b,) = torch.autograd.grad(budget.bounds[0].expected_share(p) / 0.5 - 1, log_alpha)
    for multiplier, scale in ((0.0, 1.0), (7.0, 1.0), (7.0, 1024.0), (900.0, 1.0)):
        log_alpha.grad = None
        budget = Budget(model, "params=0.5", steps=10, ramp=0.0)
        budget.multipliers = torch.tensor([multiplier])
        a = 1e-3 * torch.arange(1.0, 1 + len(log_alpha))
        loss = log_alpha @ a + l0prune.penalty(model, budget)
        (scale * loss).backward()
        budget.step(scale)
        weight = b.norm() / a.norm()
        expected = (a + multiplier * b) / (1 + multiplier * weight)
        torch.testing.assert_close(log_alpha.grad / scale, expected, rtol=2e-3, atol=1e-7)
        assert float(log_alpha.grad.norm() / scale) <= float(a.norm()) * 1.001


def test_slots_that_are_cut_in_blocks_learn_in_blocks():
    layers = nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)
    model = l0prune.gate(nn.Sequential(*layers), (torch.randn(2, 4),), include=["0"])
    gates = l0prune.gates(model)
    gates.init_from_scores(torch.rand(16))
    budget = Budget(model, "params=0.5", steps=10, round_to=4, ramp=0.0)
    blocks = gates.log_alpha.detach().argsort(descending=True).reshape(4, 4)
    optimizer = torch.optim.Adam(l0prune.param_groups(model, gate_lr=0.5))
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean() + l0prune.penalty(model, budget)
        loss.backward()
        budget.step()
        optimizer.step()
        assert all(len(gates.log_alpha[block].unique()) == 1 for block in blocks)
    assert len(gates.log_alpha.unique()) == 4
    other = Budget(model, "params=0.5", steps=10, round_to=4)
    other.load_state_dict(budget.state_dict())
    assert torch.equal(other.state_dict()["blocks"], budget.state_dict()["blocks"])
    budget.fit()
    assert int(gates.open().sum()) == 4  # 7 params a neuron, 57 in all


def test_one_block_of_each_axis_counts_as_sure_to_stay():
    layers = nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)
    plan = l0prune.gates(l0prune.gate(nn.Sequential(*layers), torch.zeros(2, 3))).plan
    sizes = [axis.size for axis in plan.axes]
    p = torch.arange(1.0, 1 + plan.size).div(20).requires_grad_()
    together = BlockCoupling(plan, [2] + [1] * (len(sizes) - 1), p.detach())
    counted = together.least(together.mean(p))
    first = plan.axes[0].slice
    pairs = p.detach()[first].reshape(-1, 2).mean(1)
    assert counted[first].tolist() == pytest.approx([float(pairs[0])] * 2 + [1.0, 1.0])
    assert torch.equal(counted[sizes[0] :], p[sizes[0] :])  # no blocks, as they were
    (gradient,) = torch.autograd.grad(counted.sum(), p)
    assert gradient.tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0] + [1.0] * (plan.size - 4))


def test_multipliers_go_on_where_they_were():
    model = gated()
    budget = Budget(model, "params=0.5, macs=0.5", steps=10)
    for _ in range(3):
        l0prune.penalty(model, budget)
        budget.step()
    other = Budget(model, "params=0.5, macs=0.5", steps=10)
    other.load_state_dict(budget.state_dict())
    assert torch.equal(other.multipliers, budget.multipliers)
    assert torch.equal(other.targets, budget.targets)
    at(model, 0.5)
    for each in (budget, other):  # of a model that has moved since
        l0prune.penalty(model, each)
        each.step()
    assert torch.equal(other.multipliers, budget.multipliers)


def test_a_step_without_its_penalty_is_refused():
    with pytest.raises(UsageError, match="penalty"):
        Budget(gated(), "params=0.5", steps=10).step()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [({"steps": 0}, "steps must be"), ({"steps": 5, "ramp": 2}, "ramp must be")],
)
@pytest.mark.one_in(2)
def test_what_makes_no_sense_is_refused(arguments, why):
    with pytest.raises(UsageError, match=why):
        Budget(gated(), "params=0.5", **arguments)


def test_a_loop_of_ones_own_learns_which_slots_matter():
    teacher = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 2))
    model = gated()
    inputs = torch.randn(256, 4)
    targets = teacher(inputs).detach()
    steps = 400
    budget = Budget(model, "params=0.5", steps=steps)
    optimizer = torch.optim.Adam(l0prune.param_groups(model, lr=1e-2, gate_lr=0.1))
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets) + l0prune.penalty(model, budget)
        loss.backward()
        budget.step()
        optimizer.step()
    (count,) = budget.fit().values()
    assert l0prune.export(model).params == count <= 29
    assert count > 29 - 7


class Beside(nn.Module):
    """A wide layer, and a narrow branch."""

    def __init__(self):
        super().__init__()
        self.wide, self.branch = nn.Linear(4, 40), nn.Linear(2, 2, bias=False)
        self.narrow, self.head = nn.Linear(40, 2), nn.Linear(2, 2)

    def forward(self, x):
        x = self.narrow(self.wide(x).relu()).relu()
        return self.head(x + self.branch(x).relu())


def test_a_branch_that_was_decided_does_not_come_back_where_there_is_room():
    model = l0prune.gate(Beside(), torch.zeros(2, 4), branches=True)
    gates = l0prune.gates(model)
    switches = switches_of(gates.plan)
    with torch.no_grad():  # slots of the wide layer that are closed are further so than the branch
        gates.log_alpha.fill_(-12.0)
        gates.log_alpha[: len(switches) // 2] = 5.0
        gates.log_alpha[switches] = -8.0
    before = gates.open().cpu()
    whole = sum(p.numel() for p in Beside().parameters())
    ((_, amount),) = Budget(model, f"params={whole - 1}", steps=10).fit().items()
    assert 0.9 * whole < amount < whole
    assert bool(switches.any())
    assert not bool((gates.open().cpu() & switches).any())
    assert bool((gates.open().cpu() & ~before).any())


def test_it_comes_back_where_the_rest_cannot_meet_the_budget():
    model = l0prune.gate(Beside(), torch.zeros(2, 4), branches=True, exclude=["wide*", "narrow*"])
    gates = l0prune.gates(model)
    whole = sum(p.numel() for p in Beside().parameters())
    counts = Budget(model, f"params={whole - 4}", steps=10).fit()  # all but the branch
    assert list(counts.values()) == [whole - 4]
    assert not bool((gates.open().cpu() & switches_of(gates.plan)).any())
