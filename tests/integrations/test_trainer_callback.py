"""Gates in the real ``transformers.Trainer``, on tiny models of its own library."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from differences import ROUNDED, of_scale
from small_task import differing

import l0prune
from l0prune.errors import FileError, UsageError
from l0prune.gating.kinds.continuous_sparsification import ContinuousSparsification

transformers = pytest.importorskip("transformers", reason="pip install 'l0prune[transformers]'")
pytest.importorskip("accelerate", reason="pip install 'l0prune[transformers]'")

from l0prune.integrations.transformers import L0Callback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks
STEPS, WORDS, LENGTH = 30, 50, 12
IDS = torch.randint(3, WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(0))
CLASSES = [{"input_ids": row, "labels": (row[0] > WORDS // 2).long()} for row in IDS]
TEXTS = [{"input_ids": row, "labels": row.clone()} for row in IDS]


def bert():
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=24, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, intermediate_size=96, tie_word_embeddings=True,
        )
    )  # fmt: skip


@functools.cache
def gated_once(make, kind):
    return l0prune.gate(make(), (), {"input_ids": IDS[:2]}, gate=kind)


def gated(make=bert, kind=None):
    return copy.deepcopy(gated_once(make, kind))


def trainer(
    folder,
    model,
    data=CLASSES,
    steps=STEPS,
    callbacks=None,
    metrics=None,
    compact="never",
    **arguments,
):
    pruner = l0prune.Pruner(
        model, budget="params=0.6", steps=steps, gate_lr=0.3, say=print, compact=compact
    )
    given = {
        "max_steps": steps, "per_device_train_batch_size": 8, "logging_steps": 10,
        "save_steps": 10, "report_to": [], "disable_tqdm": True, "use_cpu": True,
        "learning_rate": 1e-3, **arguments,
    }  # fmt: skip
    made = transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **given),
        train_dataset=data,
        eval_dataset=data[:16],
        callbacks=[L0Callback(pruner)] if callbacks is None else callbacks,
        compute_metrics=metrics,
    )
    return pruner, made


def trained(folder, model=None, resume=None, **arguments):
    model = gated() if model is None else model
    pruner, made = trainer(folder, model, **arguments)
    made.train(resume_from_checkpoint=resume)
    return model, pruner, made


def tensors(model):
    return {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}


@torch.no_grad()
def logits_apart(model, dense):
    model.eval()
    other = IDS[5:9]
    return float(of_scale(model(other).logits, dense.module(other)["logits"]).max())


def test_a_run_meets_its_budget_and_exports(tmp_path):
    model, pruner, made = trained(tmp_path)
    small = l0prune.export(model)
    assert pruner.phase == "settle"
    assert 0.5 < small.params / small.params_before <= 0.6
    assert logits_apart(model, small) <= ROUNDED
    logged = made.state.log_history[-2]
    assert logged["l0/params"] == pytest.approx(small.params / small.params_before, abs=1e-5)
    assert {"l0/open", "l0/expected_macs", "l0/multiplier:params=0.6"} <= logged.keys()


@pytest.mark.slow
def test_accumulation_gives_the_same_gates(tmp_path):
    """With gates that draw nothing; of BERT's loss the Trainer itself makes a sum."""
    ends = []
    for parts in (1, 4):
        model = gated(llama, kind=ContinuousSparsification())
        _, pruner, _ = trained(
            tmp_path / str(parts), model, data=TEXTS, per_device_train_batch_size=8 // parts,
            gradient_accumulation_steps=parts, save_strategy="no", steps=8, max_grad_norm=0.1,
        )  # fmt: skip
        ends.append(pruner.gates.log_alpha.detach())
    torch.testing.assert_close(*ends, atol=1e-3, rtol=1e-3)


class Norms(transformers.TrainerCallback):
    """What is clipped, and what the Trainer's optimizer has of the gates."""

    def __init__(self, pruner):
        self.pruner, self.seen, self.states = pruner, [], []

    def on_pre_optimizer_step(self, *_, **given):
        gradients = [p.grad for p in self.pruner.weights if p.grad is not None]
        self.seen.append(float(torch.nn.utils.get_total_norm(gradients)))

    def on_optimizer_step(self, *_, optimizer, **given):
        self.states.append(self.pruner.gates.log_alpha in optimizer.optimizer.state)


@pytest.mark.slow
def test_weights_alone_are_clipped_and_decayed(tmp_path):
    """The norm of the weights after clipping is the one that was asked: the gates had no part."""
    model = gated()
    start = l0prune.gates(model).log_alpha.detach().clone()
    pruner, made = trainer(
        tmp_path, model, max_grad_norm=1e-3, weight_decay=0.9, save_strategy="no", steps=10
    )
    norms = Norms(pruner)
    made.add_callback(norms)
    made.callback_handler.callbacks.insert(0, made.callback_handler.callbacks.pop())
    made.train()
    assert norms.seen == pytest.approx([1e-3] * 10, rel=1e-2)
    assert not any(norms.states)
    moved = (l0prune.gates(model).log_alpha - start).abs().max()
    assert moved > 0.5  # at their own rate, not at 1e-3


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"bf16": True}, id="bf16"),
        pytest.param({"activation_checkpointing": True}, id="checkpointing"),
        pytest.param(
            {"torch_compile": True, "torch_compile_backend": "eager"},
            id="compile",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_ways_of_computing(arguments, tmp_path):
    model, _, _ = trained(tmp_path, save_strategy="no", **arguments)
    small = l0prune.export(model)
    assert 0.5 < small.params / small.params_before <= 0.6
    casts = [n for n in small.program.graph.nodes if torch.bfloat16 in n.args]
    assert casts == []  # autocast was the Trainer's, not the model's
    vars(model).pop("forward", None)
    assert logits_apart(model, small) <= ROUNDED


@pytest.mark.parametrize(
    ("make", "data", "compact", "stop"),
    [(bert, CLASSES, "settle", 25), (llama, TEXTS, "never", 30)],
)
@pytest.mark.slow
def test_a_stop_and_a_resume_are_the_same_to_the_bit(make, data, compact, stop, tmp_path):
    """Of tied weights a safetensors checkpoint has one; of a model that is cut all are whole."""
    settings = {"data": data, "compact": compact, "save_steps": 5}
    whole, _, _ = trained(tmp_path, gated(make), **settings)
    for step in (10, stop):
        again, pruner, _ = trained(
            tmp_path, gated(make), **settings, resume=str(tmp_path / f"checkpoint-{step}")
        )
        assert differing(tensors(whole), tensors(again)) == []
        assert pruner.phase == "settle"
        assert (pruner.record()["training_macs"] < 1) == (compact == "settle")


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_of_another_folder_that_is_named(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    settings = {"steps": 12, "save_steps": 6}
    whole, _, _ = trained(first, gated(bert), **settings)
    start = str(first / "checkpoint-6")
    with pytest.raises(FileError, match="name it in TrainingArguments"):
        trained(second, gated(bert), **settings, resume=start)
    again, _, _ = trained(
        second, gated(bert), **settings, resume=start, resume_from_checkpoint=start
    )
    assert differing(tensors(whole), tensors(again)) == []


@pytest.mark.slow
def test_a_language_model_is_exported_as_it_was_gated(tmp_path):
    """The Trainer switches its cache off, which would make another graph."""
    model, _, made = trained(tmp_path, gated(llama), data=TEXTS, save_strategy="no")
    assert made.args.use_cache is False
    assert model.config.use_cache is True
    small = l0prune.export(model)
    assert small.params < 0.61 * small.params_before
    with torch.no_grad():
        found = small.module(input_ids=IDS[5:9])
        assert of_scale(model.eval()(IDS[5:9]).logits, found["logits"]).max() <= ROUNDED


@pytest.mark.slow
def test_the_best_model_meets_the_budget_too(tmp_path):
    """Here the first checkpoint is best, from before the gates stood."""
    evaluations = itertools.count()
    model, pruner, made = trained(
        tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=10,
        metrics=lambda _: {"rank": float(next(evaluations))},
        metric_for_best_model="rank", greater_is_better=False,
    )  # fmt: skip
    assert made.state.best_model_checkpoint.endswith("checkpoint-10")
    assert pruner.gates.fixed
    small = l0prune.export(model)
    assert small.params <= 0.6 * small.params_before


def test_what_is_wrong_is_said_in_words(tmp_path):
    model = gated()
    _, made = trainer(tmp_path, model, save_strategy="no", max_steps=7)
    with pytest.raises(UsageError, match="steps=7"):
        made.train()
    other = L0Callback(l0prune.Pruner(gated(), budget="params=0.6", steps=STEPS))
    _, made = trainer(tmp_path, model, callbacks=[other], save_strategy="no")
    with pytest.raises(UsageError, match="Pruner was made with"):
        made.train()


@pytest.mark.slow
def test_a_checkpoint_without_gates(tmp_path):
    trained(tmp_path, callbacks=[], steps=2, save_steps=2)
    with pytest.raises(FileError, match=r"l0prune\.pt"):
        trained(tmp_path, resume=str(tmp_path / "checkpoint-2"))
