import torch

from l0prune.selection import least_squares
from l0prune.selection.least_squares import Moments, solve


def moments(x, y, **kind):
    found = Moments(**kind)
    for rows in torch.arange(x.shape[1]).chunk(3):
        found.add(x[:, rows], y[:, rows])
    return found


def data(seed, rows=400, groups=2, features=5, outputs=3):
    generator = torch.Generator().manual_seed(seed)
    mix = 0.2 * torch.randn(groups, features, features, generator=generator, dtype=torch.float64)
    mix += torch.eye(features)
    x = torch.randn(groups, rows, features, generator=generator, dtype=torch.float64) @ mix + 3
    weight = torch.randn(groups, features, outputs, generator=generator, dtype=torch.float64)
    noise = torch.randn(groups, rows, outputs, generator=generator, dtype=torch.float64)
    return x, x @ weight + 0.1 * noise + 1


def direct(x, y, *, mean):
    """Least squares by QR, group by group."""
    if mean:
        x = torch.cat([x, torch.ones_like(x[..., :1])], 2)
    found = torch.linalg.lstsq(x, y).solution
    return (found[:, :-1], found[:, -1]) if mean else (found, torch.zeros_like(found[:, 0]))


def test_it_is_least_squares():
    x, y = data(0)
    seen = moments(x, y)
    for has_bias in (True, False):
        found = solve(seen, seen, torch.zeros(2, 5, 3).double(), has_bias=has_bias)
        weight, bias = direct(x, y, mean=has_bias)
        torch.testing.assert_close(found.weight, weight, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found.bias, bias, rtol=1e-3, atol=5e-3)


def test_damping_is_chosen_by_what_was_held_out():
    x, y = data(0)
    seen, held = (moments(x[:, rows], y[:, rows]) for rows in (slice(300), slice(300, None)))
    found = solve(seen, held, torch.zeros(2, 5, 3).double(), has_bias=True)
    weight, bias = direct(x, y, mean=True)
    left = (y - x @ found.weight - found.bias[:, None]).square().mean()
    best = (y - x @ weight - bias[:, None]).square().mean()
    assert float(left) < 1.01 * float(best)
    share = float(best / (y - y.mean(1, keepdim=True)).square().mean())
    assert abs(found.error - share) < 0.3 * share


def test_no_weight_is_built_on_an_input_that_is_rounding_alone():
    x, y = data(0, groups=1)
    dust = 1e-7 * (y[..., :1] - y[..., :1].mean())  # which explains the first output
    seen = moments(torch.cat([x[..., :2], dust], 2), y)
    found = solve(seen, seen, torch.zeros(1, 3, 3).double(), has_bias=True)
    c_xx, c_xy, _ = seen.about(mean=True)
    noise = 1e-8 * c_xx.diagonal(dim1=1, dim2=2).max()
    exact = torch.linalg.solve(c_xx + noise * torch.eye(3), c_xy)
    assert float(exact[0, 2].abs().max()) < 100  # 1e7 without
    torch.testing.assert_close(found.weight, exact, rtol=1e-2, atol=1e-2)


def test_what_stays_makes_up_for_what_goes():
    # Where inputs are the dense ones: W_k + C_kk⁻¹ C_kc W_c, and b + (μ_c − μ_k C_kk⁻¹ C_kc) W_c.
    x, _ = data(1, groups=1, rows=2000)
    weight, bias = torch.randn(1, 5, 3).double(), torch.randn(1, 3).double()
    kept, gone = [0, 2, 3], [1, 4]
    seen = moments(x[..., kept], x @ weight + bias[:, None])
    found = solve(seen, seen, weight[:, kept], has_bias=True)
    mean = x.mean(1)
    centred = x - mean[:, None]
    covariance = centred.mT @ centred / 2000
    across = torch.linalg.solve(covariance[:, kept][..., kept], covariance[:, kept][..., gone])
    torch.testing.assert_close(
        found.weight, weight[:, kept] + across @ weight[:, gone], rtol=1e-3, atol=1e-3
    )
    moved = mean[:, gone] - (mean[:, None, kept] @ across)[:, 0]
    expected = bias + (moved[:, None] @ weight[:, gone])[:, 0]
    torch.testing.assert_close(found.bias, expected, rtol=1e-3, atol=5e-3)


def test_moments_go_through_a_weight():
    x, y = data(2)
    weight, bias = torch.randn(2, 3, 7).double(), torch.randn(2, 7).double()
    found = moments(x, y, is_basis=True).through(weight, bias)
    wanted = moments(x, y @ weight + bias[:, None])
    for mean in (True, False):
        for one, other in zip(found.about(mean=mean), wanted.about(mean=mean), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_few_samples_do_no_harm():
    # What there is to fit is noise: the weights that are there already do better on what was held.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 400, 30, generator=generator, dtype=torch.float64)
    weight = torch.randn(1, 30, 2, generator=generator, dtype=torch.float64)
    y = x @ weight + 5 * torch.randn(1, 400, 2, generator=generator, dtype=torch.float64)
    few, held = moments(x[:, :35], y[:, :35]), moments(x[:, 35:70], y[:, 35:70])
    found = solve(few, held, weight, has_bias=False)
    rest_x, rest_y = x[:, 70:], y[:, 70:]
    error = (rest_y - rest_x @ found.weight).square().mean()
    unconstrained = (rest_y - rest_x @ direct(x[:, :70], y[:, :70], mean=False)[0]).square().mean()
    assert float(error) < 0.8 * float(unconstrained)


def test_a_singular_matrix_and_a_dead_group_keep_the_prior():
    x = torch.zeros(2, 50, 4).double()
    x[0, :, 0] = torch.linspace(-1, 1, 50)
    x[0, :, 1] = x[0, :, 0]  # twice the same
    y = x.sum(2, keepdim=True) + 1
    prior = torch.randn(2, 4, 1).double()
    found = solve(moments(x, y), moments(x, y), prior, has_bias=True)
    torch.testing.assert_close(found.weight[1], prior[1])
    torch.testing.assert_close(
        x[:1] @ found.weight[:1] + found.bias[:1, None], y[:1], atol=1e-3, rtol=0
    )


def test_wide_layers_are_solved_in_single_precision_far_from_zero(monkeypatch):
    x, y = data(3, rows=4000)
    x, prior = x + 200, torch.zeros(2, 5, 3)
    held = x[:, ::4], y[:, ::4]
    exact = solve(moments(x, y), moments(*held), prior.double(), has_bias=True)
    monkeypatch.setattr(least_squares, "_WIDE", 4)
    seen = moments(x, y)
    assert seen.xx.dtype == seen.xy.dtype == torch.float32
    found = solve(seen, moments(*held), prior, has_bias=True)
    assert found.weight.dtype == torch.float32
    torch.testing.assert_close(found.weight.double(), exact.weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.bias, exact.bias, rtol=1e-3, atol=1e-3)
    left = y - x @ found.weight.double() - found.bias[:, None]
    assert float(left.mean(1).abs().max()) < 0.01
    basis = moments(x, y, is_basis=True)
    through = basis.through(torch.randn(2, 3, 7).double(), None)
    assert through.xy.dtype == torch.float32
