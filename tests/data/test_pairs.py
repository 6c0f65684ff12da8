import pytest
import torch

from l0prune.data.dataset import inputs_and_targets, without_labels
from l0prune.errors import DataError

ONE, TWO = torch.ones(1), torch.ones(2)


def test_a_pair_is_one_as_it_is():
    for batch in ((ONE, TWO), [ONE, TWO]):
        assert inputs_and_targets(batch) == (ONE, TWO)


@pytest.mark.parametrize("name", ["labels", "label"])
def test_the_labels_of_a_mapping_are_its_targets(name):
    batch = {"x": ONE, name: TWO}
    inputs, targets = inputs_and_targets(batch)
    assert inputs is batch
    assert targets is TWO
    assert without_labels(inputs) == {"x": ONE}


def test_without_labels_all_of_it_is():
    batch = {"x": ONE, "start_positions": TWO}
    assert inputs_and_targets(batch) == (batch, batch)
    assert without_labels((ONE, TWO)) == (ONE, TWO)


@pytest.mark.parametrize(
    ("batch", "says"), [(ONE, "gave a Tensor;"), ([ONE] * 3, "a list of 3;"), ("ab", "gave a str")]
)
def test_what_is_neither_is_refused(batch, says):
    with pytest.raises(DataError, match=says):
        inputs_and_targets(batch)
