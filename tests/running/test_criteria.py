from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from l0prune.errors import UsageError
from l0prune.plan.names import LOSSES, METRICS
from l0prune.running.criteria import (
    class_dim,
    cross_entropy,
    error_rate,
    is_classification,
    loss_of,
    metric_of,
    metric_values,
)
from l0prune.training.settings import Settings

Y = torch.tensor([[0.5], [-1.0], [2.0]])
T = torch.tensor([[1.0], [0.0], [0.0]])
PAIRS = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth-l1": F.smooth_l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_name_is_torchs_loss_and_a_missing_dim_of_one_is_no_matter(name):
    wanted = PAIRS[name](Y, T)
    assert wanted > 0
    for outputs, targets in ((Y, T), (Y, T[:, 0]), (Y[:, 0], T), (Y, T.bool()), (Y, T.long())):
        assert torch.equal(loss_of(name)(outputs, targets), wanted)
    assert torch.equal(metric_of(name)(Y, T), wanted)
    assert loss_of(name)(Y.bfloat16(), T.bfloat16()).dtype == torch.float32
    assert loss_of(name)(Y.double(), T).dtype == torch.float64


@pytest.mark.parametrize(
    "targets", [torch.zeros(4, 1), torch.zeros(1, 3), torch.zeros(3, 2), torch.zeros(())]
)
def test_nothing_is_repeated_to_fit(targets):
    with pytest.raises(UsageError, match=r"one by one, but the outputs have the shape \(3, 1\)"):
        loss_of("mse")(Y, targets)


def test_what_is_no_tensor_needs_a_function():
    assert torch.equal(loss_of("mse")({"y": Y, "place": T.long()}, T), loss_of("mse")(Y, T))
    with pytest.raises(UsageError, match=r"shape \(3, 2\) and the targets \(3, 1\).*a function"):
        loss_of("mse")({"y": Y, "z": Y}, T)
    with pytest.raises(UsageError, match=r"gives y: \(3, 1\) of float32, z: .*Give a function"):
        loss_of("mse")({"y": Y, "z": Y[:2]}, T)
    with pytest.raises(UsageError, match="the targets are None"):
        loss_of("mse")(Y, None)


def test_labels_on_the_wrong_side_are_counted():
    scores = torch.tensor([[1.0, -1.0], [2.0, 3.0]])
    labels = torch.tensor([[1, 0], [0, 0]])
    assert metric_of("label-error")(scores, labels).tolist() == [0, 1]
    assert metric_of("label-error")(Y, T[:, 0]).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "value", [0.5, torch.tensor(0.5), np.float32(0.5), np.array([0.25, 0.75]), [0.25, 0.75]]
)
def test_a_metric_may_give_numbers_of_any_kind(value):
    assert metric_values(value, "mine").mean() == 0.5


@pytest.mark.parametrize("value", [None, "0.5", {"f1": 0.5}, [], torch.empty(0), 1j, object()])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(UsageError, match="the metric mine must give one number"):
        metric_values(value, "mine")


def test_settings_name_every_loss_and_metric():
    for field, names in (("loss", LOSSES), ("metric", METRICS[:5])):
        text = Settings.model_fields[field].description
        assert all(name in text for name in names)
    with pytest.raises(UsageError, match="there is no loss 'mes'; did you mean 'mse'"):
        Settings.of({"loss": "mes"})


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
    with pytest.raises(UsageError, match=r"dict.*loss=a function of"):
        cross_entropy({"a": SCORES}, TARGETS)
    with pytest.raises(UsageError, match="loss of your own"):
        cross_entropy(SCORES[0], TARGETS)


HALF_WRONG = torch.tensor([[1.0, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1]])  # of several labels


@pytest.mark.parametrize(
    ("outputs", "targets", "says"),
    [
        (SCORES[:, :1], torch.rand(4, 1), "loss='mse', 'l1' or 'smooth-l1'"),
        (SCORES[:, :1], TARGETS.clamp(max=1), "one number for an example"),
        (SCORES[:, 0], torch.rand(4), "loss='mse', 'l1' or 'smooth-l1'"),
        (SCORES[:, 0], torch.rand(2), "a loss of your own"),
        (SCORES[:, :1], torch.rand(4), "loss='mse'"),
        (SCORES, torch.rand(4, 3) + 1, "0 or 1 loss='bce'"),
        (SCORES, HALF_WRONG, r"\(4, 3\) of float32"),
        (SCORES, HALF_WRONG.bool(), "loss='bce'"),
        (SCORES, HALF_WRONG.long(), "loss='bce'"),
        (SCORES, TARGETS.float(), r"targets\.long\(\)"),
        (SCORES, TARGETS[:, None], r"\(4, 1\) of int64"),
    ],
)
def test_what_cross_entropy_is_not_for_is_refused_with_what_to_write(outputs, targets, says):
    with pytest.raises(UsageError, match=says) as caught:
        cross_entropy(outputs, targets)
    assert "loss=" in str(caught.value) or "targets.long()" in str(caught.value)
    with pytest.raises(UsageError, match="counts wrong classes"):
        error_rate(outputs, targets)
    assert not is_classification(outputs, targets)


def test_what_is_no_class_does_not_count_as_wrong():
    scores = torch.stack([SCORES.T, SCORES.T])  # (2, 3 classes, 4 pixels)
    targets = torch.stack([torch.tensor([0, -100, 0, 255]), torch.full((4,), -100)])
    assert error_rate(scores, targets).tolist() == [0.5, 0]
    assert error_rate(SCORES, torch.tensor([0, -100, 1, 2])).tolist() == [0, 0, 1, 1]


def test_classes_are_told_from_sequences():
    assert is_classification(SCORES, TARGETS)
    outputs = namedtuple("Outputs", "logits")
    assert is_classification(outputs(SCORES), TARGETS)
    sequence = torch.zeros(2, 3, 3)  # as many words as there are
    assert not is_classification(outputs(sequence), torch.zeros(2, 3).long())
    assert not is_classification({"a": SCORES}, TARGETS)
    assert not is_classification(SCORES[0], TARGETS)


def test_classes_are_dim_1_and_of_a_sequence_the_last():
    outputs = namedtuple("Outputs", "logits")
    assert class_dim(torch.zeros(2, 3)) == class_dim(torch.zeros(2, 3, 7)) == 1
    assert class_dim(outputs(torch.zeros(2, 7, 3))) == 2
    assert class_dim(outputs(torch.zeros(2, 3, 7, 7))) == class_dim(torch.zeros(2, 3, 7, 7)) == 1
    for single in (torch.zeros(2), torch.zeros(2, 1, 7), outputs(torch.zeros(2, 7, 1)), [1]):
        assert class_dim(single) is None


def test_class_numbers_may_have_any_whole_type():
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(cross_entropy(SCORES, TARGETS.to(dtype)), cross_entropy(SCORES, TARGETS))
