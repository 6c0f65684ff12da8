import pytest
import torch

from l0prune.data.dataset import part_length, part_slice
from l0prune.errors import DataError
from l0prune.running.batches import Batch, part_weight


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
