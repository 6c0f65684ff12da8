import pytest
import torch
from torch import nn

from l0prune.data.dataset import part_length, part_slice
from l0prune.errors import DataError
from l0prune.running.batches import Batch, call, part_weight


@pytest.mark.parametrize("examples", [1, 2, 3, 7, 30, 31])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_parts_are_the_whole_in_order_and_weights_average_to_one(examples, count):
    whole, taken, weights = list(range(examples)), [], []
    for number in range(count):
        part = whole[part_slice(examples, (number, count))]
        assert part  # whoever has nothing of its own borrows one
        own = part_length(examples, (number, count))
        taken += part[:own]
        weights.append(part_weight(examples, (number, count)))
        assert weights[-1] == own * count / examples
    assert taken == whole
    assert sum(weights) / count == pytest.approx(1)


def test_a_batch_of_any_structure_is_divided():
    inputs = {"ids": torch.arange(10).view(5, 2), "scale": torch.tensor(2.0), "kind": "text"}
    batch = Batch(inputs, (torch.arange(5),))
    first, second = batch.parts(2)
    assert first.inputs["ids"].tolist() == [[0, 1], [2, 3]]
    assert second.targets[0].tolist() == [2, 3, 4]
    assert second.inputs["scale"] == 2
    assert second.inputs["kind"] == "text"
    assert (first.examples, second.examples) == (2, 3)
    assert (first.weight, second.weight) == (2 * 2 / 5, 2 * 3 / 5)
    assert next(batch.parts(1)) is batch


def test_the_mean_of_the_parts_losses_by_weight_is_the_loss_of_the_whole():
    values = torch.randn(7, dtype=torch.float64)
    batch = Batch(values, values)
    halves = [batch.part((rank, 2)) for rank in range(2)]
    parts = [part for half in halves for part in half.parts(3)]
    mean = sum(part.weight * part.inputs.mean() for part in parts) / len(parts)
    torch.testing.assert_close(mean, values.mean())


def test_an_example_that_is_borrowed_counts_for_nothing():
    batch = Batch(torch.ones(1, 3), torch.ones(1))
    empty, full = batch.parts(2)
    assert (empty.weight, empty.examples, len(empty.inputs)) == (0, 0, 1)
    assert (full.weight, full.examples) == (2, 1)


def test_tensors_of_other_lengths_cannot_be_divided():
    with pytest.raises(DataError, match="5 examples also holds a tensor of 9"):
        Batch(torch.zeros(9, 2), torch.zeros(5)).part((0, 2))


def test_its_beginning_is_no_longer_than_asked():
    batch = Batch(torch.arange(100), (torch.arange(100), torch.tensor(1.0)))
    assert batch.head(32).inputs.tolist() == list(range(25))
    assert batch.head(16).targets[0].tolist() == list(range(14))
    assert batch.head(100) is batch
    assert batch.head(500) is batch
    odd = Batch(torch.zeros(9, 2), torch.zeros(5))
    assert odd.head(2) is odd  # which cannot be divided


def test_lists_of_a_detector_are_divided_by_image():
    images, found = [torch.rand(3, 8, 8) for _ in range(3)], [{"boxes": torch.rand(3, 4)}] * 3
    first, second = Batch(images, found).parts(2)
    assert [each.shape for each in (*first.inputs, *second.inputs)] == [(3, 8, 8)] * 3
    assert (len(first.targets), len(second.targets)) == (1, 2)
    assert (first.examples, second.examples) == (1, 2)
    assert (first.weight, second.weight) == (2 / 3, 4 / 3)


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
