from collections import namedtuple

import pytest
import torch

from l0prune.running.task import are_detections, model_loss

LOSS, SCORES = torch.tensor(0.5), torch.ones(4, 3)


@pytest.mark.parametrize(
    "outputs",
    [
        namedtuple("Output", ["loss", "logits"])(LOSS, SCORES),
        {"loss": LOSS, "logits": SCORES},
        {"boxes": LOSS / 2, "classes": LOSS / 2},
    ],
)
def test_a_loss_is_found(outputs):
    assert model_loss(outputs) == LOSS


@pytest.mark.parametrize(
    "outputs",
    [
        SCORES,
        LOSS,
        None,
        {},
        (LOSS, SCORES),
        {"loss": SCORES},
        {"loss": None, "logits": SCORES},
        {"count": torch.tensor(3), "classes": LOSS},
    ],
)
def test_what_is_no_loss_is_not_taken_for_one(outputs):
    assert model_loss(outputs) is None


def test_findings_are_a_mapping_for_each_example():
    assert are_detections([{"boxes": SCORES}, {"boxes": SCORES}])
    assert not are_detections([])
    assert not are_detections({"boxes": SCORES})
    assert not are_detections((SCORES, {"boxes": SCORES}))
