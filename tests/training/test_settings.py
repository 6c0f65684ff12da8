import inspect
import subprocess
import sys

import pytest
from pydantic import ValidationError

from l0prune.errors import UsageError
from l0prune.training.checkpoint import CHANGEABLE, IRRELEVANT
from l0prune.training.fields import types
from l0prune.training.run import OF_GATES
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


def test_a_message_says_what_was_given_and_what_is_allowed():
    with pytest.raises(UsageError) as caught:
        Settings(batch_size=2.5)
    assert str(caught.value).startswith(
        "batch_size must be a whole number from 1 to 2,147,483,647, not 2.5 (examples in a step"
    )
    with pytest.raises(UsageError, match=r"distill must be a number from 0 to 1, not 1\.5"):
        Settings(distill=1.5)
    with pytest.raises(UsageError, match=r"ema must be a number of at least 0 and less than 1"):
        Settings(ema=1)
    with pytest.raises(UsageError, match="match must be text or a list of texts, not 3 "):
        Settings(match=3)
    with pytest.raises(UsageError, match=r"teacher must be a torch\.nn\.Module, not a str"):
        Settings(distill=0.5, teacher="resnet18")


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(UsageError, match=r"lr must be .*; there is no setting 'epoch'"):
        Settings.of({"epoch": 3, "lr": -1})


FIELDS = Settings.model_fields
NUMBERS = [name for name in FIELDS if name != "prior" and float in types(FIELDS[name])]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, True, "1"])
def test_every_number_is_one(name, value):
    with pytest.raises(UsageError, match=f"{name} must be a number"):
        Settings.of({name: value})


def test_whole_numbers_do_for_others():
    assert Settings(lr=1).lr == 1.0


def test_settings_stay_as_they_are():
    with pytest.raises(ValidationError, match="frozen"):
        Settings().lr = 1.0


def test_every_setting_is_explained_where_the_class_is():
    assert all(field.description for field in Settings.model_fields.values())
    text = " ".join(inspect.getdoc(Settings).split())
    for name, field in Settings.model_fields.items():
        assert f" {name}: {' '.join(field.description.split())}" in text


def test_settings_that_decide_how_a_run_goes_on_are_settings():
    assert Settings.model_fields.keys() >= CHANGEABLE | IRRELEVANT | set(OF_GATES)


def test_settings_need_no_torch():
    code = "import sys, l0prune.cli.options; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
