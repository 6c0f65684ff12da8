import pytest

from l0prune.errors import UsageError
from l0prune.training.settings import Settings


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"epochs": 0}, "epochs"),
        ({"epochs": 2.5}, "epochs"),
        ({"epochs": True}, "epochs"),
        ({"batch_size": -1}, "batch_size"),
        ({"recalibrate": -1}, "recalibrate"),
        ({"lr": -1e-3}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": "fast"}, "lr"),
        ({"gate_lr": float("inf")}, "gate_lr"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"clip": 0}, "clip=None"),
        ({"ema": 1.0}, "ema"),
        ({"warmup": -0.5}, "warmup"),
        ({"settle": "long"}, "settle"),
        ({"counting": "both"}, "'joint', 'groups'"),
        ({"optimizer": "adamm"}, "'adam'"),
        ({"schedule": "linear"}, "'cosine'"),
        ({"autocast": "fp8"}, "'bf16'"),
        ({"resume": True}, "out"),
    ],
)
def test_nonsense_is_refused_by_name(given, says):
    with pytest.raises(UsageError, match=says):
        Settings.of(given)


def test_an_unknown_name_is_met_with_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'epochs'"):
        Settings.of({"epoch": 3})
    with pytest.raises(UsageError, match="there are lam"):
        Settings.of({"zzz": 3})
