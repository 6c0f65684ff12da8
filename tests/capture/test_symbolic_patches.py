"""Symbolic sizes in functions that torch would make numbers of."""

import pytest
import torch
from networks import Fn
from torch.export import Dim

from l0prune.capture.symbolic_patches import SymbolicPatches


def exported(forward, x):
    with SymbolicPatches():
        shapes = {"args": ({0: Dim("n")},)}
        program = torch.export.export(Fn(lambda m, x: forward(x)), (x,), dynamic_shapes=shapes)
    return program.module()


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: torch.cat(torch.cat(x.split(4, 2), 0).split(x.size(0), 0), 2),
        lambda x: torch.cat(torch.split(torch.cat([x, x, x]), split_size_or_sections=len_of(x))),
        lambda x: torch.cat([x, x]).chunk(2)[1],
        lambda x: torch.stack(torch.chunk(torch.cat([x, x]), chunks=2, dim=0), 1),
        lambda x: torch.cdist(x[:, 0], torch.ones(40, 8)),
        lambda x: torch.cdist(x[:, 0], x[:, 1]),
        lambda x: x.split(x.shape[0])[0],
    ],
)
def test_a_size_stays_a_symbol(forward):
    module = exported(forward, torch.randn(2, 5, 8))
    for rows in (2, 3, 40):
        x = torch.randn(rows, 5, 8)
        torch.testing.assert_close(module(x), forward(x), rtol=1e-4, atol=1e-4)


def len_of(x):
    return x.size(0)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x.split(3, 1)[1],  # the last piece is smaller
        lambda x: x.split([2, 3], dim=1)[0],
        lambda x: x.chunk(3, 1)[2],
        lambda x: torch.cdist(x, x, p=1.0),
        lambda x: torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist"),
    ],
)
def test_sizes_that_are_numbers_do_what_they_did(forward):
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    with SymbolicPatches():
        found = forward(x)
    torch.testing.assert_close(found, forward(x))


def test_pieces_that_do_not_come_out_even_are_left_to_torch():
    """How many there are depends on the size."""
    with pytest.raises(Exception, match="Constraints violated"):
        exported(lambda x: x.split(3)[0], torch.randn(4, 5, 8))
