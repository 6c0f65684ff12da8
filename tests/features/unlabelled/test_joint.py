import pytest
import torch

from l0prune.features.unlabelled.joint import Part, solve_together
from l0prune.selection.least_squares import Moments


def moments(x, y):
    found = Moments()
    found.add(x[None], y[None])
    return found


def centred(x, has_bias):
    return x - x.mean(0) if has_bias else x


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_weight_and_its_transpose_are_fitted_as_by_one_system_of_equations(has_bias):
    torch.manual_seed(0)
    index = torch.arange(15).reshape(5, 3)  # 5 features, 3 outputs
    calls = [
        (torch.randn(200, 5).double(), torch.randn(200, 3).double(), index),
        (1 + torch.randn(200, 3).double(), torch.randn(200, 5).double(), index.T),
    ]
    rows, wanted, parts = [], [], []
    for x, y, at in calls:
        y += 2 * x.roll(1, 1)[:, :1]
        cx, cy = centred(x, has_bias), centred(y, has_bias)
        scale = cy.square().sum().sqrt()
        for output in range(y.shape[1]):  # an equation for each number that a product gives
            row = torch.zeros(len(x), 15, dtype=torch.float64)
            row[:, at[:, output]] = cx
            rows.append(row / scale)
            wanted.append(cy[:, output] / scale)
        found = moments(x, y)
        parts.append(Part(found, found, at[None], has_bias))
    expected = torch.linalg.lstsq(torch.cat(rows), torch.cat(wanted)[:, None]).solution[:, 0]
    solution = solve_together(parts, torch.zeros(15, dtype=torch.float64))
    torch.testing.assert_close(solution.flat, expected, atol=1e-4, rtol=1e-4)
    for (x, y, at), bias in zip(calls, solution.biases, strict=True):
        left = (y - x @ solution.flat[at]).mean(0) * has_bias
        torch.testing.assert_close(bias[0], left, atol=1e-6, rtol=1e-6)


def test_an_element_that_is_read_twice_is_one_unknown():
    torch.manual_seed(0)
    x = torch.randn(300, 4).double()
    found = moments(x, x.sum(1, keepdim=True) + x[:, :1])
    index = torch.tensor([0, 0, 1, 1])[None, :, None]
    solution = solve_together(
        [Part(found, found, index, True)], torch.zeros(2, dtype=torch.float64)
    )
    rows = torch.stack([x[:, 0] + x[:, 1], x[:, 2] + x[:, 3]], 1)
    rows = rows - rows.mean(0)
    expected = torch.linalg.lstsq(rows, x.sum(1, keepdim=True) + x[:, :1]).solution[:, 0]
    torch.testing.assert_close(solution.flat, expected, atol=1e-3, rtol=1e-3)


def test_held_out_rows_keep_a_weight_that_nothing_betters():
    torch.manual_seed(0)
    prior = torch.randn(6).double()
    index = torch.arange(6).reshape(1, 3, 2)
    x = torch.randn(50, 3).double()
    held = moments(x, x @ prior[index[0]])
    seen = moments(torch.randn(4, 3).double(), torch.randn(4, 2).double())
    solution = solve_together([Part(seen, held, index, True)], prior)
    assert torch.equal(solution.flat, prior)
    assert solution.error < 1e-6
