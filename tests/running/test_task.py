from collections import namedtuple

import pytest
import torch
from small_task import data
from torch.nn.functional import l1_loss, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from l0prune.data import Tensors
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


SPLIT = Tensors(torch.zeros(4, 6), TARGETS)
HALF_WRONG = torch.tensor([[1.0, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1]])  # of several labels


@pytest.mark.parametrize(
    ("outputs", "targets", "says"),
    [
        (SCORES[:, :1], torch.rand(4, 1), r"loss=torch\.nn\.functional\.mse_loss"),
        (SCORES[:, :1], TARGETS.clamp(max=1), "one output column"),
        (SCORES[:, :1], torch.rand(4), r"mse_loss\(y\[:, 0\], t\)"),
        (SCORES, torch.rand(4, 3) + 1, "binary_cross_entropy_with_logits"),
        (SCORES, HALF_WRONG, r"float32 targets of shape \(4, 3\)"),
        (SCORES, HALF_WRONG.bool(), r"t\.float\(\)"),
        (SCORES, HALF_WRONG.long(), r"t\.float\(\)"),
        (SCORES, TARGETS.float(), r"targets\.long\(\)"),
        (SCORES, TARGETS[:, None], r"targets of shape \(4, 1\)"),
    ],
)
def test_what_cross_entropy_is_not_for_is_refused_with_the_line_to_write(outputs, targets, says):
    with pytest.raises(UsageError, match=says) as caught:
        cross_entropy(outputs, targets)
    assert "l0prune.Task(" in str(caught.value) or "targets.long()" in str(caught.value)


def test_class_numbers_may_have_any_whole_type():
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(cross_entropy(SCORES, TARGETS.to(dtype)), cross_entropy(SCORES, TARGETS))


def test_a_task_with_a_loss_of_its_own_reports_that():
    task = Task(SPLIT, SPLIT, loss=mse_loss)
    assert task.metric_name == "loss"
    loss, metric = task.judged(SCORES, SCORES + 2)
    assert (float(loss), float(metric)) == (4, 4)


def test_a_task_reports_what_it_is_given():
    assert Task(SPLIT).metric_name == "error"
    assert Task(SPLIT, loss=mse_loss, metric=error_rate).metric_name == "error"
    task = Task(SPLIT, metric=lambda outputs, targets: outputs.mean())
    assert task.metric_name == "metric"
    assert Task(SPLIT, metric=l1_loss, metric_name="mae").metric_name == "mae"
    assert task.judged(SCORES, TARGETS) == (cross_entropy(SCORES, TARGETS), SCORES.mean())


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
