"""What every registered gate keeps to, whatever it is."""

from dataclasses import dataclass

import pytest
import torch

import l0prune
from l0prune.errors import UsageError
from l0prune.gating.kinds.base import KINDS, Gate, gate_from_dict, gate_of, gate_to_dict, register

GATES = {name: kind() for name, kind in KINDS.items() if kind.__module__.startswith("l0prune.")}
every_gate = pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def test_these_are_known():
    assert set(GATES) == {"hard_concrete", "continuous_sparsification", "binary_concrete"}
    assert all(type(gate).__name__ in l0prune.__all__ for gate in GATES.values())


@every_gate
def test_it_is_a_gate_and_plain_data(gate):
    assert isinstance(gate, Gate)
    for progress in (0.0, 0.4, 1.0):
        now = gate.at(progress)
        assert type(now) is type(gate)
        assert now.at(0.2) == gate.at(0.2)
        assert gate_from_dict(gate_to_dict(now)) == now
    assert gate.at(0.0) == gate


@every_gate
@dtypes
@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_a_likely_gate_is_open_and_an_unlikely_one_is_closed(gate, dtype, progress):
    gate = gate.at(progress)
    starts = torch.tensor([gate.initial(1e-4), gate.initial(0.99), gate.initial(1 - 1e-4)])
    z = gate.estimate(starts.to(dtype))
    assert z.dtype == dtype
    assert z.tolist() == [0, 1, 1]
    p = gate.open_probability(starts.to(torch.float64))
    assert p.tolist() == pytest.approx([1e-4, 0.99, 1 - 1e-4], abs=1e-6)


@every_gate
@dtypes
def test_extremes_stay_finite(gate, dtype):
    eps = torch.finfo(dtype).eps
    log_alpha = torch.tensor([-1e4, -100, 0, 100, 1e4], dtype=dtype, requires_grad=True)
    for progress in (0.0, 1.0):
        now = gate.at(progress)
        for u in (eps, 0.5, 1 - eps):
            z = now.sample(log_alpha, torch.full((5,), u, dtype=dtype))
            p = now.open_probability(log_alpha)
            for values in (z, p):
                (slope,) = torch.autograd.grad(values.sum(), log_alpha)
                assert ((values >= 0) & (values <= 1)).all()
                assert slope.isfinite().all()


@every_gate
def test_more_log_alpha_is_never_less_open(gate):
    log_alpha = torch.linspace(-12, 12, 500, dtype=torch.float64)
    noise = torch.full_like(log_alpha, 0.3)
    for progress in (0.0, 0.5, 1.0):
        now = gate.at(progress)
        for values in (
            now.sample(log_alpha, noise), now.estimate(log_alpha), now.open_probability(log_alpha)
        ):  # fmt: skip
            assert (values.diff() >= 0).all()


@every_gate
def test_one_sample_takes_several_backward_passes(gate):
    log_alpha = torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_()
    noise = torch.linspace(0.2, 0.7, 5, dtype=torch.float64)
    z = gate.sample(log_alpha, noise)
    z[:2].sum().backward()
    z[2:].sum().backward()
    separate = log_alpha.grad.clone()
    log_alpha.grad = None
    gate.sample(log_alpha, noise).sum().backward()
    torch.testing.assert_close(separate, log_alpha.grad, rtol=0, atol=0)
    assert (separate[1:-1] > 0).all()


@every_gate
@pytest.mark.parametrize("p", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_a_gate_cannot_start_certain(gate, p):
    with pytest.raises(UsageError, match="strictly between 0 and 1"):
        gate.initial(p)


@every_gate
def test_users_name_it_with_hyphens(gate):
    assert gate_of(gate.name.replace("_", "-"), {}) == gate
    assert gate_of(gate.name, {"beta": 0.5}) == type(gate)(beta=0.5)


def test_unknown_gates_and_settings_are_refused():
    with pytest.raises(UsageError, match=r"'sorcery'.*hard_concrete"):
        gate_from_dict({"name": "sorcery"})
    with pytest.raises(UsageError, match=r"no gate 'sorcery'; .*hard-concrete"):
        gate_of("sorcery", {})
    for settings in ({"softness": 3}, {"beta": "much"}):
        with pytest.raises(UsageError, match="hard concrete gate does not take"):
            gate_of("hard-concrete", settings)
        with pytest.raises(UsageError, match="hard concrete gate does not take"):
            gate_from_dict({"name": "hard_concrete", **settings})


def test_another_gate_is_one_registered_class():
    @register
    @dataclass(frozen=True)
    class Step:
        name = "test_step"
        threshold: float = 0.0

    assert gate_from_dict({"name": "test_step", "threshold": 2.0}) == Step(2.0)
    del KINDS["test_step"]
