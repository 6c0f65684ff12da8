"""The loop of docs/integrations.md under the real ``accelerate``."""

from __future__ import annotations

import pytest
import torch
from differences import ROUNDED, difference
from small_task import FEATURES, clouds, gated
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import l0prune

accelerate = pytest.importorskip("accelerate", reason="pip install 'l0prune[transformers]'")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework
EPOCHS, PARTS = 24, 2


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.slow
def test_the_loop_of_the_docs(precision):
    model = gated(norm=False)
    examples = TensorDataset(clouds().inputs, clouds().targets)
    loader = DataLoader(examples, batch_size=12)
    steps = EPOCHS * len(loader) // PARTS
    pruner = l0prune.Pruner(model, budget="params=0.5", steps=steps, say=lambda text: None)

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # one a process
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=PARTS, mixed_precision=precision
    )
    optimizer = torch.optim.AdamW(pruner.param_groups(lr=1e-2))
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(nn.functional.cross_entropy(prepared(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(pruner.weights, 1.0)
                    pruner.before_step(optimizer)
                optimizer.step()
                if accelerator.sync_gradients:
                    pruner.after_step()
                optimizer.zero_grad()

    assert pruner.step == steps
    assert prepared is model
    assert ("forward" in vars(model)) == (precision == "bf16")
    small = l0prune.export(model)  # of the model itself: the autocast around it is accelerate's
    assert 0.4 < small.params / small.params_before <= 0.5
    vars(model).pop("forward", None)
    assert difference(model, small, torch.randn(2, FEATURES)) <= ROUNDED
