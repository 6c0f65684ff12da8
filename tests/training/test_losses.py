"""However a step is computed, it is the same step: exactly, in float64."""

import pytest
import torch
from shared_runs import COMMON, FEATURES, Steady, doubled, loss, mlp, outcome, task
from small_task import tensors
from torch import nn
from torch.testing import assert_close

import l0prune
from l0prune.data import Tensors
from l0prune.errors import UsageError
from l0prune.running.task import Task
from l0prune.training.run import finetune
from l0prune.training.settings import Settings


def assert_same(one, other):
    assert_close(one[0], other[0], rtol=1e-9, atol=1e-10)
    losses = [[record["train_loss"] for record in records] for _, records in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize("parts", [2, 4, 30])
@pytest.mark.one_in(3)
def test_micro_batches_are_the_step_of_the_whole_batch(parts):
    assert_same(outcome("adam", accumulate=parts), outcome("adam"))


def test_each_micro_batch_has_gates_of_its_own():
    model = l0prune.gate(nn.Sequential(nn.Linear(FEATURES, 3)), torch.zeros(2, FEATURES))
    seen = []

    def watched(outputs, targets):
        if torch.is_grad_enabled():
            seen.append(l0prune.gates(model).current().detach().clone())
        return nn.functional.cross_entropy(outputs, targets)

    train = Tensors(torch.randn(30, FEATURES), torch.arange(30) % 3)
    finetune(
        model, Task(train, None, watched), accumulate=3, epochs=1, warmup=0, settle=0,
        batch_size=30, progress=False,
    )  # fmt: skip
    assert len(seen) == 3
    assert len({tuple(z.tolist()) for z in seen}) == 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by a compiler looking
@pytest.mark.parametrize(
    "how",
    [
        {"checkpointing": True},
        pytest.param({"compile": "aot_eager"}, marks=pytest.mark.slow),
        {"compile": "eager", "checkpointing": True},
    ],
    ids=str,
)
@pytest.mark.one_in(2)
def test_how_it_is_computed_does_not_matter(how):
    assert_same(outcome("residual", **how), outcome("residual"))


def test_channels_last_is_a_layout_only():
    def trained(**settings):
        torch.manual_seed(5)
        model = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3),
            nn.Flatten(), nn.Linear(16, 3),
        ).double()  # fmt: skip
        l0prune.gate(model, torch.zeros(2, 3, 4, 4, dtype=torch.float64), gate=Steady())
        images = torch.randn(60, 3, 4, 4, dtype=torch.float64)
        layouts = []

        def watched(outputs, targets):
            layouts.append(model[3]._parameters["weight"].stride())
            return loss(outputs, targets)

        train = Tensors(images, torch.arange(60) % 3)
        finetune(model, Task(train, train, watched, watched, "test"), **COMMON, **settings)
        return tensors(model), {*layouts}, model[3]._parameters["weight"].is_contiguous()

    plain, (rows,), _ = trained()
    turned, (pixels,), is_back = trained(channels_last=True)
    assert rows == (54, 9, 3, 1)
    assert pixels == (54, 1, 18, 6)
    assert is_back
    assert_close(turned, plain, rtol=1e-9, atol=1e-10)


def test_more_parts_than_examples_are_refused():
    with pytest.raises(UsageError, match=r"accumulate=31 .* than the 30 examples"):
        Settings(accumulate=31, batch_size=30)
    with pytest.raises(UsageError, match="inductor"):
        Settings(compile="fast")


def test_a_model_without_blocks_cannot_be_checkpointed():
    with pytest.raises(UsageError, match="accumulate=2"):
        finetune(mlp(), task(doubled()), checkpointing=True, **COMMON)
