import numpy as np
import pytest
import torch
from torch.nn import functional as F

from l0prune.errors import UsageError
from l0prune.running.criteria import LOSSES, METRICS, loss_of, metric_of, metric_values
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
    with pytest.raises(UsageError, match=r"gives y: \(3, 1\) of float32.*Give a function"):
        loss_of("mse")({"y": Y}, T)
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
    for field, names in (("loss", LOSSES), ("metric", METRICS[:4])):
        text = Settings.model_fields[field].description
        assert all(name in text for name in names)
    with pytest.raises(UsageError, match="there is no loss 'mes'; did you mean 'mse'"):
        Settings.of({"loss": "mes"})
