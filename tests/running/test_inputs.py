import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from l0prune.data.dataset import Tensors
from l0prune.errors import DataError
from l0prune.running.inputs import inputs_for
from l0prune.running.sources import with_pseudo_labels


class One(nn.Module):
    def forward(self, x):
        return x.sum(1, keepdim=True)


class Two(nn.Module):
    def forward(self, x, y):
        return (x + y[:, :3]).sum(1, keepdim=True)


class Maybe(nn.Module):
    def forward(self, x, mask=None):
        return x


X, Y, LABELS = torch.randn(12, 3), torch.randn(12, 5), torch.arange(12)


def batches_of(model, given):
    return list(inputs_for(model, given))


def test_tensors_for_each_argument_are_a_mapping_of_all_examples():
    for given in ((X, Y), [X, Y]):
        found = inputs_for(Two(), given)
        assert list(found) == ["x", "y"]
        assert found["y"] is Y


def test_a_list_of_tensors_holds_batches():
    for given in (list(X.split(4)), X.split(4)):
        found = batches_of(One(), given)
        assert [targets for _, targets in found] == [None] * 3
        assert torch.equal(torch.cat([inputs for inputs, _ in found]), X)


@pytest.mark.parametrize("kind", ["list", "loader", "dataset"])
def test_batches_of_the_arguments_need_no_targets(kind):
    dataset = TensorDataset(X, Y)
    given = {
        "list": list(zip(X.split(4), Y.split(4), strict=True)),
        "loader": DataLoader(dataset, 4),
        "dataset": dataset,
    }[kind]
    found = inputs_for(Two(), given)
    batches = (inputs for inputs, _ in found.batches(4)) if kind == "dataset" else found
    assert torch.equal(torch.cat([batch["y"] for batch in batches]), Y)
    assert len(found) == (12 if kind == "dataset" else 3)


def test_a_pair_is_inputs_and_targets_or_training_and_test():
    found = inputs_for(One(), (X, LABELS))
    assert isinstance(found, Tensors)
    assert found.inputs is X
    train, test = inputs_for(One(), (X[:8], X[8:]))
    assert (len(train), len(test)) == (8, 4)
    with_targets = inputs_for(Two(), [(X, Y, LABELS)])
    assert with_targets[0][1] is LABELS


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        (Two(), X, "takes x, y: give a mapping, {'x': tensor, 'y': tensor}"),
        (Two(), (X, Y, Y), "3 tensors of 12 examples were given, but the forward of Two"),
        (Two(), (X, Y[:5]), "2 tensors of 5, 12 examples"),
        (Two(), DataLoader(TensorDataset(X), 4), "a batch of 1 tensors"),
        (Maybe(), (X, LABELS), "may be two inputs, or inputs and targets"),
        (One(), iter(X.split(4)), "which this iterator does not allow"),
    ],
)
def test_what_is_not_clear_is_refused_with_the_way(model, given, said):
    with pytest.raises(DataError) as caught:
        list(inputs_for(model, given))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (One(), X),
        (One(), list(X.split(4))),
        (One(), iter(X.split(4))),
        (One(), DataLoader(TensorDataset(X), 4)),
        (Two(), (X, Y)),
        (Two(), list(zip(X.split(4), Y.split(4), strict=True))),
    ],
)
def test_a_network_answers_inputs_of_any_of_these_forms(model, given):
    task = with_pseudo_labels(given, model)
    pairs = task.train.batches(12) if isinstance(task.train, Tensors) else task.train
    found = torch.cat([answers for _, answers in pairs])
    torch.testing.assert_close(found, model(X, Y) if isinstance(model, Two) else model(X))
