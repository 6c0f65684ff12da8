import copy
import math

import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import L0pruneWarning
from l0prune.features.unlabelled import division
from l0prune.features.unlabelled.compensate import calibration
from l0prune.features.unlabelled.division import Division, _pooled
from l0prune.features.unlabelled.fidelity import relative_error
from l0prune.features.unlabelled.probes import Probe
from l0prune.gating.attaching import bypass
from l0prune.plan.limits import bounds, limits


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    return model.eval(), torch.randn(400, 6)


def left_by(x, y, kept):
    """Error of the best affine map from what stays, by QR."""
    rows = torch.cat([x[:, kept], torch.ones(len(x), 1)], 1).double()
    found = torch.linalg.lstsq(rows, y.double()).solution
    return float((y - rows @ found).square().sum() / (y - y.mean(0)).square().sum())


def test_errors_are_those_of_direct_least_squares():
    model, x = network()
    plain = copy.deepcopy(model)
    l0prune.gate(model, x[:2])
    plan = l0prune.gates(model).plan
    with bypass(model), torch.no_grad():
        division = Division(model, plan, list(x.split(100)), [x], relative_error)
        hidden = plain[1](plain[0](x))
        curve = next(c for c in division.curves if plan.axes[c.axis].size == 12)
        read = plain[2](hidden)
    for gone, local in zip(curve.gone[1:6], curve.local[1:6], strict=True):
        kept = [slot for slot in range(12) if slot not in curve.order[:gone]]
        exact = left_by(hidden, read, kept)
        assert abs(local - exact) < 0.02 * exact + 2e-3  # the damping's part
    # The first to go is the one without which the others do best.
    each = [left_by(hidden, read, [k for k in range(12) if k != slot]) for slot in range(12)]
    assert each[curve.order[0]] < 1.2 * min(each)


def test_outputs_are_those_of_the_network_with_one_axis_cut():
    model, x = network()
    plain = copy.deepcopy(model)
    l0prune.gate(model, x[:2])
    plan = l0prune.gates(model).plan
    with bypass(model), torch.no_grad():
        division = Division(model, plan, list(x.split(100)), [x], relative_error)
        curve = next(c for c in division.curves if plan.axes[c.axis].size == 8)
        hidden, wanted = plain[:4](x), plain(x)
    gone, error = min(curve.outputs.items())
    kept = [slot for slot in range(8) if slot not in curve.order[:gone]]
    assert abs(error - left_by(hidden, wanted, kept)) < 0.05 * error + 2e-3


def test_a_layer_that_is_called_twice_is_compared_with_both_calls_changed():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            # The second call has few rows.
            return torch.cat([self.out(torch.tanh(self.into(y))) for y in (x, x[:, :1])], 1)

    torch.manual_seed(0)
    model, x = Twice().eval(), torch.randn(300, 9, 6)
    plain = copy.deepcopy(model)
    l0prune.gate(model, x[:2])
    plan = l0prune.gates(model).plan
    with bypass(model), torch.no_grad():
        division = Division(model, plan, list(x.split(100)), [x], relative_error)
        curve = next(each for each in division.curves if plan.axes[each.axis].size == 8)
        hidden, wanted = torch.tanh(plain.into(x)), plain.out(torch.tanh(plain.into(x)))
        hidden, wanted = (torch.cat([y, y[:, :1]], 1).flatten(0, 1) for y in (hidden, wanted))
    gone, error = min(curve.outputs.items())
    kept = [slot for slot in range(8) if slot not in curve.order[:gone]]
    assert abs(error - left_by(hidden, wanted, kept)) < 0.05 * error + 2e-3


def test_scores_meet_a_budget_where_it_costs_least():
    model, x = network()
    l0prune.gate(model, x[:2])
    plan = l0prune.gates(model).plan
    with bypass(model), torch.no_grad():
        division = Division(model, plan, list(x.split(100)), [x], relative_error)
    wanted = bounds(plan, limits("macs=0.6"), ())
    scores = division.scores_for(wanted, [1] * len(plan.axes))
    assert scores.shape == (plan.size,)
    assert bool((scores > 0).all())
    assert bool(scores.isfinite().all())
    for curve in division.curves:  # within an axis slots go in its order
        mine = scores[plan.axes[curve.axis].slice][torch.tensor(curve.order)]
        assert bool((mine.diff() > 0).all())


def test_a_layer_with_more_features_than_samples_is_not_free_to_cut():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 300), nn.Tanh(), nn.Linear(300, 4)).eval()
    with torch.no_grad():
        model[0].weight.mul_(3)
    l0prune.gate(model, torch.randn(2, 12))
    with calibration(model, torch.randn(120, 12), batch_size=10) as found:
        (curve,) = (c for c in found.division().curves if len(c.order) == 299)
        gone = sorted(curve.outputs)[2]
        left = torch.ones(found.gates.plan.size, dtype=torch.bool)
        left[found.gates.plan.axes[curve.axis].start + torch.tensor(curve.order[:gone])] = False
        found.gates.set_open(left)
        with pytest.warns(L0pruneWarning, match="fewer samples than inputs"):
            after = found.compensate().after
        assert curve.outputs[gone] > 0.5 * after.error > 0.01


def test_pooled_values_never_fall():
    values = torch.tensor([1.0, 3.0, 2.0, 2.0, 5.0, 4.0])
    pooled = _pooled(values)
    assert torch.allclose(pooled, torch.tensor([1, 7 / 3, 7 / 3, 7 / 3, 4.5, 4.5]))


def test_sizes_of_inputs_change_no_division(monkeypatch):
    found, inverse = [], division._damped_inverse
    chosen = list[float]()

    def noted(covariance, strength):
        if covariance.dtype == torch.float64:  # those that are compared are in single precision
            chosen.append(strength)
        return inverse(covariance, strength)

    monkeypatch.setattr(division, "_damped_inverse", noted)
    for scale in (1.0, 1e-14, 1e14):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
        with torch.no_grad():
            model[0].weight *= scale
            model[0].bias *= scale
            model[2].weight /= scale
        small = l0prune.shrink(model, torch.randn(256, 6), "params=0.7", round_to=1, batch_size=32)
        found.append((small.widths, round(small.fidelity.error, 4), tuple(chosen)))
        chosen.clear()
    assert found[0][2]
    assert found[0] == found[1] == found[2]


def test_an_input_that_hardly_varies_beside_others_is_no_nan():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    with torch.no_grad():
        model[0].weight[0] *= 1e-30
        model[0].bias[0] *= 1e-30
        model[0].weight[1:] *= 100
    small = l0prune.shrink(model, torch.randn(256, 6), "params=0.8", round_to=1, batch_size=32)
    assert small.fidelity.error < 0.5


def test_a_cut_whose_outputs_are_no_numbers_comes_last(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU()).eval()
    model.append(nn.Linear(24, 3))
    error = Probe.error

    def failing(self, changed):
        is_first = any(view.name == "2.weight" for view in changed)
        return math.nan if is_first else error(self, changed)

    monkeypatch.setattr(Probe, "error", failing)
    small = l0prune.shrink(model, torch.randn(2048, 6), "params=0.7", round_to=1, samples=2048)
    assert small.module[0].out_features == 24
    assert small.module[2].out_features < 24
