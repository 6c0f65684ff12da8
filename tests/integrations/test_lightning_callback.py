"""Gates in Lightning's real ``Trainer``."""

from __future__ import annotations

import pytest
import torch
from differences import ROUNDED, difference
from small_task import FEATURES, clouds, differing, gated, tensors
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import l0prune
from l0prune.errors import UsageError
from l0prune.gating.kinds.continuous_sparsification import ContinuousSparsification

lightning = pytest.importorskip("lightning.pytorch", reason="pip install 'l0prune[lightning]'")

from l0prune.integrations.lightning import L0Callback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework
STEPS = 60


class Task(lightning.LightningModule):
    """A network that learns by an optimizer over all that there is, as most people write it."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def training_step(self, batch, index):
        inputs, targets = batch
        return nn.functional.cross_entropy(self.network(inputs), targets)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer)]


class Compiled(Task):
    def __init__(self, network):
        super().__init__(network)
        self.network.compile(backend="eager")


class Checkpointed(Task):
    def training_step(self, batch, index):
        inputs, targets = batch
        outputs = checkpoint(self.network, inputs, use_reentrant=False)
        return nn.functional.cross_entropy(outputs, targets)


def made(network, compact="never"):
    return l0prune.Pruner(
        network, budget="params=0.5", steps=STEPS, gate_lr=0.2, say=print, compact=compact
    )


def trained(
    folder, network=None, pruner=None, parts=1, resume=None, more=(), task=Task, **arguments
):
    network = gated(norm=False) if network is None else network
    pruner = made(network) if pruner is None else pruner
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, log_every_n_steps=10, callbacks=[L0Callback(pruner), *more],
        **{"max_steps": STEPS, "accumulate_grad_batches": parts, **arguments},
    )  # fmt: skip
    examples = TensorDataset(clouds().inputs, clouds().targets)
    trainer.fit(task(network), DataLoader(examples, batch_size=24 // parts), ckpt_path=resume)
    return network, pruner, trainer


@pytest.mark.slow
def test_a_run_meets_its_budget_and_exports(tmp_path):
    network, pruner, trainer = trained(tmp_path, gradient_clip_val=0.1)
    small = l0prune.export(network)
    assert pruner.phase == "settle"
    assert 0.4 < small.params / small.params_before <= 0.5
    assert difference(network, small, torch.randn(2, FEATURES)) <= ROUNDED
    logged = float(trainer.logged_metrics["l0/params"])
    assert logged == pytest.approx(small.params / small.params_before)


def test_accumulation_gives_the_same_gates(tmp_path):
    """With gates that draw nothing."""
    ends = []
    for parts in (1, 4):
        network = gated(ContinuousSparsification(), norm=False)
        _, pruner, _ = trained(tmp_path / str(parts), network, parts=parts)
        ends.append(pruner.gates.log_alpha.detach())
    torch.testing.assert_close(*ends, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_the_gates_are_in_no_state_of_its_optimizer(tmp_path):
    _, pruner, trainer = trained(tmp_path)
    (optimizer,) = trainer.optimizers
    assert pruner.gates.log_alpha not in optimizer.state
    assert all(weight in optimizer.state for weight in pruner.weights)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.slow
def test_precision(precision, tmp_path):
    network, _, _ = trained(tmp_path, precision=precision)
    small = l0prune.export(network)
    assert difference(network, small, torch.randn(2, FEATURES)) <= ROUNDED


@pytest.mark.parametrize("task", [Compiled, Checkpointed])
@pytest.mark.slow
def test_compiled_or_with_checkpoints_the_gates_are_the_same(task, tmp_path):
    """With gates that draw nothing."""
    ends = []
    for each in (Task, task):
        network = gated(ContinuousSparsification(), norm=False)
        _, pruner, _ = trained(tmp_path / each.__name__, network, task=each)
        ends.append(pruner.gates.log_alpha.detach())
    torch.testing.assert_close(*ends)
    small = l0prune.export(network)
    assert difference(network, small, torch.randn(2, FEATURES)) <= ROUNDED


@pytest.mark.parametrize("compact", ["never", "settle"])
@pytest.mark.one_in(2)
def test_a_stop_and_a_resume_are_the_same_to_the_bit(compact, tmp_path):
    """With gates that draw nothing: Lightning keeps no state of random numbers."""

    def run():
        network = gated(ContinuousSparsification(), norm=False)
        return network, made(network, compact)

    kept = lightning.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=30, save_top_k=-1)
    whole, _, _ = trained(tmp_path / "whole", *run(), more=[kept])
    (checkpoint,) = tmp_path.glob("*step=30.ckpt")
    again, pruner, _ = trained(tmp_path / "again", *run(), resume=checkpoint)
    assert (pruner.record()["training_macs"] < 1) == (compact == "settle")
    assert pruner.step == STEPS
    assert differing(tensors(whole), tensors(again)) == []


def test_a_run_that_stops_early_meets_its_budget_too(tmp_path):
    class Stop(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step >= 20

    network, _, trainer = trained(tmp_path, more=[Stop()])
    assert trainer.global_step == 20
    small = l0prune.export(network)
    assert small.params <= 0.5 * small.params_before


def test_what_is_wrong_is_said_in_words(tmp_path):
    with pytest.raises(UsageError, match="steps=7"):
        trained(tmp_path, max_steps=7)
    with pytest.raises(UsageError, match="Pruner was made with"):
        trained(tmp_path, pruner=made(gated()))


def test_a_module_that_only_trains_names_the_network_in_it():
    class Trains(lightning.LightningModule):
        def training_step(self, batch, index):
            return self.network(batch).sum()

    module = Trains()
    module.network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(UsageError, match=r"This Trains trains a network .* module\.network"):
        l0prune.gate(module, torch.randn(2, 6))
    l0prune.gate(module.network, torch.randn(2, 6))
