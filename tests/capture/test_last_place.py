import numpy as np
import torch

from l0prune.capture.last_place import MovedResults, moved

VALUES = torch.tensor([0.1, -0.1, 1.5, 1e-30, 3.0, 0.0, -7.0, float("inf"), 3.4028234e38])


def test_a_number_becomes_one_of_its_two_neighbours():
    for seed in range(4):
        for before, after in zip(VALUES[:4].tolist(), moved(VALUES, seed)[:4], strict=True):
            below, above = (np.nextafter(np.float32(before), np.float32(e)) for e in (-1e9, 1e9))
            assert float(after) in (float(below), float(above))
    draws = {tuple(moved(torch.full((32,), 0.1), seed).tolist()) for seed in range(4)}
    assert len(draws) == 4
    assert all(len(set(draw)) == 2 for draw in draws)


def test_whole_numbers_and_infinities_stay():
    assert torch.equal(moved(VALUES, 0)[4:], VALUES[4:])


def test_a_seed_says_what_is_drawn():
    assert torch.equal(moved(VALUES, 7), moved(VALUES, 7))
    assert moved(VALUES.double(), 7).dtype == torch.float32


def test_results_are_moved_apart_from_each_other():
    """The variance as a difference rounds by far more than any change of its inputs shows."""
    x = torch.full((64,), 100.0) + torch.rand(64, generator=torch.Generator().manual_seed(0)) / 10

    def variance(x):
        return (x * x).mean() - x.mean() ** 2

    exact = variance(x.double())
    of_inputs = [abs(variance(moved(x, seed).double()) - exact) for seed in range(4)]
    found = []
    for seed in range(4):
        with MovedResults(seed):
            found.append(abs(variance(x) - exact))
    assert max(found) > 10 * max(of_inputs)


def test_views_and_what_is_written_in_place_are_not_moved():
    x = torch.full((4,), 0.1)
    with MovedResults(0):
        view = x[:2]
        view.mul_(2)
        same = x.add_(0)
    assert torch.equal(x, torch.tensor([0.2, 0.2, 0.1, 0.1]))
    assert same.data_ptr() == x.data_ptr()
