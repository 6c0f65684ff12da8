from collections import namedtuple
from functools import partial

import pytest
import torch
from small_task import data
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from l0prune.data import Tensors
from l0prune.errors import DataError, FileError, UsageError
from l0prune.running.criteria import cross_entropy, error_rate
from l0prune.running.task import (
    Amount,
    Task,
    amount_keys,
    amounts,
    are_detections,
    batch_length,
    model_loss,
)

SCORES = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 0.0, 5.0], [1.0, 0.0, 0.0]])
TARGETS = torch.tensor([0, 1, 1, 2])


SPLIT = Tensors(torch.zeros(4, 6), TARGETS)


@pytest.mark.parametrize("loss", [mse_loss, "mse", torch.nn.MSELoss()])
def test_a_task_with_a_loss_of_its_own_reports_that_alone(loss):
    task = Task(SPLIT, SPLIT, loss=loss)
    assert task.metric_name == "test_loss"
    assert task.loss_and_metric(SCORES, SCORES + 2) == {"test_loss": 4}


def named(outputs, targets):
    return outputs.mean()


class Named(torch.nn.Module):
    def forward(self, outputs, targets):
        return 0.5


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (None, "error"),
        ("mae", "mae"),
        ("label-error", "label-error"),
        (error_rate, "error"),
        (named, "named"),
        (partial(named, targets=0), "named"),
        (Named(), "Named"),
        (lambda outputs, targets: outputs.mean(), "metric"),
    ],
)
def test_a_metric_has_a_name(metric, name):
    assert Task(SPLIT, metric=metric).metric_name == name
    assert Task(SPLIT, metric=metric, metric_name="mine").metric_name == "mine"


def test_a_task_reports_what_it_is_given():
    found = Task(SPLIT, metric=named).loss_and_metric(SCORES, TARGETS)
    assert found == {"test_loss": cross_entropy(SCORES, TARGETS), "named": SCORES.mean()}
    assert Task(SPLIT, metric=Named()).loss_and_metric(SCORES, TARGETS)["Named"] == 0.5
    found = Task(SPLIT, metric="accuracy").loss_and_metric(SCORES, TARGETS)
    assert found["accuracy"].tolist() == [1, 1, 0, 0]


def test_a_name_that_the_records_have_is_refused():
    with pytest.raises(UsageError, match="cannot be called seconds"):
        Task(SPLIT, metric=named, metric_name="seconds")


def test_which_metric_is_better():
    assert Task(SPLIT, metric="accuracy").larger_is_better
    assert not Task(SPLIT, metric="error").larger_is_better
    assert not Task(SPLIT, metric=named).larger_is_better
    assert Task(SPLIT, metric=named, larger_is_better=True).larger_is_better


@pytest.mark.parametrize("wrong", ["mes", "", 3, ["mse"]])
def test_names_that_mean_nothing(wrong):
    with pytest.raises(UsageError, match=r"there is no loss.*cross-entropy, mse, l1"):
        Task(SPLIT, loss=wrong)
    with pytest.raises(UsageError, match="there is no metric"):
        Task(SPLIT, metric=wrong)
    with pytest.raises(UsageError, match="did you mean 'smooth-l1'"):
        Task(SPLIT, loss="smooth_l1")


def test_a_file_may_define_them(tmp_path):
    (tmp_path / "mine.py").write_text("def twice(y, t):\n    return 2 * y.mean()\nsome = 3\n")
    task = Task(SPLIT, loss=f"{tmp_path}/mine.py:twice", metric=f"{tmp_path}/mine.py:twice")
    wanted = 2 * SCORES.mean()
    assert task.loss_and_metric(SCORES, TARGETS) == {"test_loss": wanted, "twice": wanted}
    with pytest.raises(UsageError, match="not a function for a loss"):
        Task(SPLIT, loss=f"{tmp_path}/mine.py:some")
    with pytest.raises(FileError, match="does not exist"):
        Task(SPLIT, metric=f"{tmp_path}/yours.py:some")


def test_a_loss_must_be_one_number_and_a_metric_a_number():
    with pytest.raises(UsageError, match=r"loss smooth must be one number.*\(4, 3\) of float32"):
        Task(SPLIT, loss=smooth).loss_and_metric(SCORES, SCORES)
    with pytest.raises(UsageError, match=r"the loss must be one number.*a float"):
        Task(SPLIT, loss=lambda y, t: 0.5).loss_and_metric(SCORES, TARGETS)
    for given, says in (({"f1": 0.5}, "f1: a float"), (None, "None"), ("good", "a str")):
        with pytest.raises(UsageError, match=f"the metric must give one number.*it gives {says}"):
            Task(SPLIT, metric=lambda y, t, given=given: given).loss_and_metric(SCORES, TARGETS)
    with pytest.raises(UsageError, match=r"\(0,\) of float32"):
        Task(SPLIT, metric=lambda y, t: y[:0, 0]).loss_and_metric(SCORES, TARGETS)


def smooth(outputs, targets):
    return outputs - targets


class Outputs(dict):
    """As transformers' models return them."""

    def __getattr__(self, name):
        return self.get(name)


OWN = torch.tensor(0.25)


@pytest.mark.parametrize(
    "outputs",
    [
        Outputs(loss=OWN, logits=SCORES),
        {"loss": OWN, "other": SCORES},
        {"boxes": OWN - 1, "classes": torch.tensor(1.0)},  # in train mode a detector's
    ],
)
def test_the_models_own_loss_is_used(outputs):
    assert Task(SPLIT).loss_in(outputs, TARGETS) == OWN


def test_of_class_scores_the_error_is_told_beside_the_models_own_loss():
    judge = Task(SPLIT).loss_and_metric
    found = judge(Outputs(loss=OWN, logits=SCORES), TARGETS)
    assert found.pop("error").tolist() == [0, 0, 1, 1]
    assert found == {"test_loss": OWN}
    words = Outputs(loss=OWN, logits=torch.zeros(4, 5, 7))
    assert judge(words, torch.zeros(4, 5).long()) == {"test_loss": OWN}
    numbers = Outputs(loss=OWN, logits=SCORES[:, :1])
    assert judge(numbers, TARGETS.float()) == {"test_loss": OWN}


def test_without_a_loss_of_its_own_cross_entropy_is_taken():
    found = Task(SPLIT).loss_in(Outputs(loss=None, logits=SCORES), TARGETS)
    assert torch.equal(found, cross_entropy(SCORES, TARGETS))
    with pytest.raises(UsageError, match="hold no labels, only words, mask, and the model gives"):
        Task(SPLIT).loss_in(Outputs(logits=SCORES), {"words": TARGETS, "mask": TARGETS})


def test_a_detector_has_no_loss_in_eval_mode():
    found = [{"boxes": torch.zeros(3, 4)}, {"boxes": torch.zeros(0, 4)}]
    assert Task(SPLIT).loss_in(found, found) is None
    assert Task(SPLIT, metric=lambda y, t: len(y)).loss_and_metric(found, found) == {"metric": 2}
    with pytest.raises(UsageError, match="give a metric"):
        Task(SPLIT).loss_and_metric(found, found)


def test_what_is_asked_for_beside_the_data_counts():
    source = data()
    task = Task.of(source, loss="mse", metric="mae")
    assert (task.loss, task.metric_name) == ("mse", "mae")
    assert Task.of(source, metric="accuracy").metric_name == "accuracy"
    given = Task(SPLIT, loss="mse")
    assert Task.of(given, metric="mae").loss == "mse"
    assert Task.of(given, loss="auto").metric_name == "error"
    own = Task(SPLIT, metric="accuracy", metric_name="right")
    assert Task.of(own, loss="bce").metric_name == "right"
    other = Task.of(own, metric="error")
    assert (other.metric_name, other.larger_is_better) == ("error", False)


def test_a_dataset_is_made_into_batches():
    dataset = TensorDataset(SCORES, TARGETS)
    for task in (Task.of(dataset), Task.of((dataset, dataset)), Task(dataset)):
        inputs, targets = next(task.train.batches(3))
        assert torch.equal(inputs, SCORES[:3])
        assert torch.equal(targets, TARGETS[:3])


def test_tensors_of_loss_and_metric_go_to_the_device():
    seen = []

    class Weighed(torch.nn.CrossEntropyLoss):
        def to(self, device):
            seen.append(str(device))

    weighed = Weighed(weight=torch.ones(3))
    with Task(SPLIT, loss=weighed, metric=Named()).on_device(torch.device("meta")):
        assert seen == ["meta"]
    assert seen == ["meta", "cpu"]


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
    with pytest.raises(DataError, match="str is nothing to train on"):
        Task.of("mnist")


def test_a_model_with_too_few_outputs_is_refused():
    task = Task.of(data())
    with pytest.raises(DataError, match="3 classes, but the model has 2 outputs"):
        task.loss_in(SCORES[:, :2], TARGETS)
    assert torch.equal(task.loss_in(SCORES, TARGETS), cross_entropy(SCORES, TARGETS))


def test_batch_length_is_that_of_targets_or_inputs():
    assert batch_length(SCORES[:2], TARGETS) == 4
    assert batch_length((SCORES, {"a": SCORES}), None) == 4
    assert batch_length({"scale": torch.tensor(1.0), "x": SCORES}, None) == 4
    assert batch_length(None, None) == 1
    boxes = [{"boxes": torch.zeros(n, 4)} for n in (5, 0, 1)]
    assert batch_length(([torch.zeros(3, 8, 8)] * 3, boxes), boxes) == 3


def test_a_task_prints_without_its_tensors():
    """Such as the one that ``answered`` gives, which holds all answers in memory."""
    inputs, targets = torch.arange(7000.0).view(1000, 7), torch.zeros(1000, 3)
    batches = [(inputs, targets)] * 2
    for task in (Task(batches, batches, loss="mse"), Task(Tensors(inputs, targets), size=5)):
        text = repr(task)
        assert len(text) < 120
        assert "tensor" not in text
    assert repr(Task(batches, loss="mse", size=9)) == (
        "Task(train=2 batches, loss='mse', metric_name='test_loss', size=9, larger_is_better=False)"
    )


LOSS, ONES = torch.tensor(0.5), torch.ones(4, 3)


@pytest.mark.parametrize(
    "outputs",
    [
        namedtuple("Output", ["loss", "logits"])(LOSS, ONES),
        {"loss": LOSS, "logits": ONES},
        {"boxes": LOSS / 2, "classes": LOSS / 2},
    ],
)
def test_a_loss_is_found(outputs):
    assert model_loss(outputs) == LOSS


@pytest.mark.parametrize(
    "outputs",
    [
        ONES,
        LOSS,
        None,
        {},
        (LOSS, ONES),
        {"loss": ONES},
        {"loss": None, "logits": ONES},
        {"count": torch.tensor(3), "classes": LOSS},
    ],
)
def test_what_is_no_loss_is_not_taken_for_one(outputs):
    assert model_loss(outputs) is None


def test_findings_are_a_mapping_for_each_example():
    assert are_detections([{"boxes": ONES}, {"boxes": ONES}])
    assert not are_detections([])
    assert not are_detections({"boxes": ONES})
    assert not are_detections((ONES, {"boxes": ONES}))


def test_a_record_has_the_amounts_by_measure():
    record = {"epoch": 1, **Amount(7.5, 7, 10).entries("macs"), **Amount(2, 1.5, 0).entries("time")}
    assert list(record)[1:] == [*amount_keys("macs"), *amount_keys("time")]
    assert amounts(record) == {"macs": Amount(7.5, 7, 10), "time": Amount(2, 1.5, 0)}


def test_shares_are_of_the_dense_amount():
    assert Amount(7.5, 7, 10).share(7.5) == 0.75
    assert Amount(0, 0, 0).share(0) == 0
