"""Weights rounded by least squares, beside all roundings and a loop that is written out."""

import itertools

import torch

from l0prune.features.int8.rounding import nearest, rounded
from l0prune.selection.least_squares import damping

STEP, LARGEST = 0.5, 3


def problem(seed, groups=1, features=5, outputs=3):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(groups, features, features, generator=generator, dtype=torch.float64)
    weight = torch.randn(groups, features, outputs, generator=generator, dtype=torch.float64)
    return weight, mix @ mix.mT, torch.full_like(weight, STEP)


def errors(whole, weight, gram):
    damped = gram + torch.diag_embed(damping(gram, 1e-2))
    left = whole * STEP - weight
    return ((damped @ left) * left).sum(1)


def test_no_output_is_worse_than_by_the_nearest_and_most_are_near_the_best():
    numbers = range(-LARGEST, LARGEST + 1)
    every = torch.tensor(list(itertools.product(numbers, repeat=5))).double()[:, :, None]
    near, nearest_near = 0, 0
    for seed in range(10):
        weight, gram, steps = problem(seed)
        found = errors(rounded(weight, gram, steps, LARGEST), weight, gram)
        plain = errors(nearest(weight, steps, LARGEST), weight, gram)
        best = errors(every, weight, gram).min(0).values
        assert (found <= plain).all()
        assert (found[0] >= best - 1e-12).all()
        near += int((found[0] < 1.2 * best).sum())
        nearest_near += int((plain[0] < 1.2 * best).sum())
    assert near > 1.5 * nearest_near


def test_it_is_the_loop_of_the_paper():
    weight, gram, steps = problem(1, features=200, outputs=2)  # more than a block
    damped = gram[0] + torch.diag(damping(gram, 1e-2)[0])
    order = damped.diagonal().argsort(descending=True)
    inverse, left, expected = damped[order][:, order].inverse(), weight[0, order].clone(), []
    for i in range(200):  # OBQ: the inverse without what is rounded, by elimination
        whole = (left[i] / STEP).round().clamp(-LARGEST, LARGEST)
        expected.append(whole)
        left -= inverse[:, i, None] / inverse[i, i] * (left[i] - whole * STEP)
        inverse -= torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        inverse[i, i] = 1.0
    found = rounded(weight, gram, steps, LARGEST)[0, order]
    assert torch.equal(found, torch.stack(expected))
    assert not torch.equal(found, nearest(weight, steps, LARGEST)[0, order])


def test_inputs_that_do_not_depend_on_each_other_are_rounded_to_the_nearest():
    weight, _, steps = problem(2, groups=3)
    gram = torch.diag_embed(torch.tensor([1.0, 4.0, 0.0, 2.0, 1.0]).double()).expand(3, 5, 5)
    assert torch.equal(rounded(weight, gram, steps, LARGEST), nearest(weight, steps, LARGEST))
