from collections import namedtuple

import pytest
import torch
from small_task import data
from torch.utils.data import DataLoader, TensorDataset

from l0prune.errors import DataError, UsageError
from l0prune.running.task import Task, batch_length, cross_entropy, error_rate

SCORES = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 0.0, 5.0], [1.0, 0.0, 0.0]])
TARGETS = torch.tensor([0, 1, 1, 2])


def test_the_loss_is_the_mean_negative_log_probability():
    expected = -SCORES.softmax(1).log()[torch.arange(4), TARGETS].mean()
    torch.testing.assert_close(cross_entropy(SCORES, TARGETS), expected)
    assert cross_entropy(SCORES.bfloat16(), TARGETS).dtype == torch.float32


def test_the_error_is_one_number_per_example():
    assert error_rate(SCORES, TARGETS).tolist() == [0, 0, 1, 1]


def test_the_error_of_a_map_is_the_fraction_of_its_pixels():
    scores = torch.stack([SCORES.T, SCORES.T])  # (2, 3 classes, 4 pixels)
    targets = torch.stack([TARGETS, torch.tensor([0, 1, 2, 2])])
    assert error_rate(scores, targets).tolist() == [0.5, 0.25]


def test_targets_may_be_probabilities():
    soft = torch.nn.functional.one_hot(TARGETS, 3).float()
    assert error_rate(SCORES, soft).tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(cross_entropy(SCORES, soft), cross_entropy(SCORES, TARGETS))


def test_scores_may_be_called_logits():
    outputs = namedtuple("Outputs", ["logits", "rest"])(SCORES, None)
    assert torch.equal(cross_entropy(outputs, TARGETS), cross_entropy(SCORES, TARGETS))
    assert torch.equal(error_rate(outputs, TARGETS), error_rate(SCORES, TARGETS))


def test_other_outputs_need_a_loss_of_their_own():
    with pytest.raises(UsageError, match=r"dict.*Task with a loss"):
        cross_entropy({"a": SCORES}, TARGETS)
    with pytest.raises(DataError, match="loss of your own"):
        cross_entropy(SCORES[0], TARGETS)


def test_a_task_comes_from_whatever_holds_data():
    source = data()
    assert Task.of(source).train is source.train
    assert Task.of(source).name == "clouds"
    loader = DataLoader(TensorDataset(SCORES, TARGETS))
    assert Task.of(loader).test is None
    assert Task.of((loader, [])).test == []
    task = Task(loader)
    assert Task.of(task) is task
    with pytest.raises(DataError, match="int is nothing to train on"):
        Task.of(3)


def test_a_model_with_too_few_outputs_is_refused():
    task = Task.of(data())
    with pytest.raises(DataError, match="3 classes, but the model has 2 outputs"):
        task.loss(SCORES[:, :2], TARGETS)
    assert torch.equal(task.loss(SCORES, TARGETS), cross_entropy(SCORES, TARGETS))


def test_batch_length_is_that_of_targets_or_inputs():
    assert batch_length(SCORES[:2], TARGETS) == 4
    assert batch_length((SCORES, {"a": SCORES}), None) == 4
    assert batch_length({"scale": torch.tensor(1.0), "x": SCORES}, None) == 4
    assert batch_length(None, None) == 1
