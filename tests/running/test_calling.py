import pytest
import torch
from torch import nn

from l0prune.errors import DataError
from l0prune.running.batches import call


def test_inputs_are_arguments():
    class Sum(nn.Module):
        def forward(self, a, b=0):
            return a + b

    one = torch.ones(1)
    assert call(Sum(), one) == 1
    assert call(Sum(), (one, one)) == 2
    assert call(Sum(), {"a": one, "b": 2 * one}) == 3


class Words(nn.Module):
    def forward(self, input_ids, mask=None):
        return input_ids


class Labelled(nn.Module):
    def forward(self, input_ids, labels=None):
        return labels


class Anything(nn.Module):
    def forward(self, **given):
        return list(given)


ONE = torch.ones(1)


def test_labels_go_where_there_is_a_place_for_them():
    batch = {"input_ids": ONE, "labels": 2 * ONE}
    assert call(Words(), batch) == 1
    assert call(Labelled(), batch) == 2
    assert call(Labelled(), {"input_ids": ONE, "label": 3 * ONE}) == 3
    assert call(Anything(), batch) == ["input_ids", "labels"]
    assert call(nn.DataParallel(Words()), batch) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by a compiler looking
def test_a_compiled_model_is_asked_for_its_own_names():
    batch = {"input_ids": ONE, "labels": ONE}
    assert call(torch.compile(Words(), backend="eager"), batch) == 1


def test_names_that_forward_does_not_take_are_refused():
    batch = {"input_ids": ONE, "labels": ONE, "idx": ONE, "text": ["a"]}
    says = "idx, text, which the forward of Words does not take; it takes input_ids, mask"
    with pytest.raises(DataError, match=says):
        call(Words(), batch)
