import threading

import pytest
import torch
from torch import nn

from l0prune.features.unlabelled.lockstep import Weights, forwards, places_of


@pytest.mark.parametrize(
    ("layer", "shape", "labels", "places"),
    [
        (nn.Conv2d(4, 2, 3), (1, 4, 5, 5), torch.ones(1, 36), 9),
        (nn.Conv2d(4, 2, 1), (1, 4, 5, 5), torch.arange(4)[None], 1),
        (nn.Linear(12, 2), (1, 12), torch.tensor([[1] * 4 + [0] * 8]), 4),
        (nn.Linear(12, 2), (1, 12), torch.arange(3).repeat_interleave(4)[None], 4),
        (nn.Linear(12, 2), (1, 12), torch.stack([torch.arange(12), torch.zeros(12)]), 1),
        (nn.Linear(12, 2), (1, 12), torch.ones(1, 12), 1),
    ],
)
def test_features_of_one_channel_are_those_of_a_kernel_or_a_flatten(layer, shape, labels, places):
    with torch.no_grad(), forwards(layer, [torch.zeros(shape)], Weights(layer)) as (forward,):
        read = forward.advance()
        assert places_of(read, labels) == places
        while forward.advance() is not None:
            pass


def test_rows_come_in_small_blocks_each_once_and_without_padding(monkeypatch):
    monkeypatch.setattr("l0prune.features.unlabelled.lockstep._BLOCK", 7 * (4 + 2))
    layer = nn.Linear(4, 2)
    batch = {"input": torch.zeros(5, 4)}
    with torch.no_grad(), forwards(layer, [batch], Weights(layer)) as (forward,):
        read = forward.advance()
        assert torch.cat(list(read.row_blocks(9, 0))).tolist() == [0, 1, 2, 3, 4]
        assert len(torch.cat(list(read.row_blocks(9, 0, places=3)))) == 3
        read.real = torch.tensor([True, False, True, True, False])
        assert torch.cat(list(read.row_blocks(9, 0))).tolist() == [0, 2, 3]
    images = torch.zeros(2, 4, 5, 5)
    convolution = nn.Conv2d(4, 2, 1)
    with torch.no_grad(), forwards(convolution, [images], Weights(convolution)) as (forward,):
        blocks = list(forward.advance().row_blocks(30, 0))
        assert {len(block) for block in blocks} == {7, 2}
        assert len(torch.cat(blocks).unique()) == 30


def test_a_network_that_expects_errors_of_operators_goes_on():
    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            try:
                return self.layer(x.mT.view(-1, 4))
            except RuntimeError:
                return self.layer(x.mT.reshape(-1, 4))

    model, x = Tries(), torch.randn(4, 5)
    with torch.no_grad(), forwards(model, [x], Weights(model)) as (forward,):
        while forward.advance() is not None:
            pass
        assert torch.equal(forward.output, model(x))


def test_operators_run_in_the_thread_that_waits():
    class Where(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.threads = nn.Linear(4, 4), []

        def forward(self, x):
            self.threads.append(threading.get_ident())
            return self.layer(x.relu())

    model, x = Where(), torch.randn(2, 4)
    seen = set()
    with torch.no_grad(), forwards(model, [x], Weights(model)) as (forward,):
        forward._asked = lambda job, asked=forward._asked: asked(
            job and (lambda: (seen.add(threading.get_ident()), job())[1])
        )
        while forward.advance() is not None:
            pass
    assert seen == {threading.get_ident()}
    assert model.threads[0] not in seen


def test_a_batch_of_matrices_has_no_kernel():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4, 5))

        def forward(self, x):
            return torch.bmm(x, self.weight)

    model = Many()
    x = torch.zeros(3, 2, 4)
    with torch.no_grad(), forwards(model, [x], Weights(model)) as (forward,):
        read = forward.advance()
        assert places_of(read, torch.tensor([[1, 1, 0, 0]])) == 2
        while forward.advance() is not None:
            pass
