"""BERT for classification: gated, trained by transformers' Trainer, cut, saved, loaded, served.

The model is small and random, the texts are made up: a text is good if most of its words are.
Run it with a folder to work in: python examples/bert_classification.py runs/bert
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import onnxruntime
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

import l0prune
from l0prune.integrations.transformers import L0Callback

GOOD = ["bright", "calm", "fair", "glad", "kind", "keen", "warm", "wise"]
BAD = ["bleak", "cold", "cruel", "dull", "grim", "harsh", "sour", "vain"]
STEPS, STOP, LENGTH = 100, 40, 12


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One number a word."""
    vocabulary = {word: n for n, word in enumerate(["[PAD]", "[UNK]", *GOOD, *BAD])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    )


def texts(count: int, seed: int) -> list[tuple[str, int]]:
    """Made-up texts, and 1 for a good one."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        good = draw.randrange(LENGTH + 1)
        words = draw.choices(GOOD, k=good) + draw.choices(BAD, k=LENGTH - good)
        found.append((" ".join(draw.sample(words, LENGTH)), int(2 * good > LENGTH)))
    return found


def examples(count: int, seed: int) -> list[dict[str, object]]:
    """The same as a Trainer takes them."""
    words = tokenizer()
    return [{**words(text), "labels": label} for text, label in texts(count, seed)]


def gated_model() -> transformers.BertForSequenceClassification:
    """BERT with a gate on every neuron, head and channel. Texts stay free in their length."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=18, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32,
        id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1},
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    batch = tokenizer()([text for text, _ in texts(2, seed=0)], return_tensors="pt")
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    return l0prune.gate(model, (), inputs, dynamic_shapes={name: {1: "length"} for name in inputs})


class Outage(TrainerCallback):
    """What may happen to any run."""

    def on_step_end(self, args: object, state: TrainerState, *_: object, **given: object) -> None:
        """Stop without a word."""
        if state.global_step == STOP + 5:
            raise KeyboardInterrupt


def train(folder: Path, *others: TrainerCallback, resume: bool = False) -> nn.Module:
    """Train weights and gates: accumulated, in bf16. A run that was stopped goes on."""
    model = gated_model()
    pruner = l0prune.Pruner(model, budget="macs=0.5", steps=STEPS, gate_lr=0.2, say=print)
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        learning_rate=5e-3, bf16=True, use_cpu=True, save_steps=STOP, logging_steps=20,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model,
        arguments,
        train_dataset=examples(512, seed=1),
        processing_class=tokenizer(),
        callbacks=[L0Callback(pruner), *others],
    )
    trainer.train(resume_from_checkpoint=resume)
    return model


def main(folder: Path) -> float:
    """All of it; the share of new texts that the loaded model gets right."""
    try:
        train(folder / "run", Outage())
    except KeyboardInterrupt:
        model = train(folder / "run", resume=True)

    small = l0prune.export(model)
    print(small)
    print(small.save_pretrained(folder / "small"))
    tokenizer().save_pretrained(folder / "small")

    loaded = l0prune.from_pretrained(folder / "small")
    words = transformers.AutoTokenizer.from_pretrained(folder / "small")
    classify = transformers.pipeline("text-classification", model=loaded, tokenizer=words)
    new = texts(100, seed=2)
    told = classify([text for text, _ in new])
    right = [(each["label"] == "good") == label for each, (_, label) in zip(told, new, strict=True)]

    (file,) = small.save_onnx(folder / "small.onnx")
    batch = words(["warm wise", "harsh sour"], return_tensors="np")
    session = onnxruntime.InferenceSession(file)
    given = {i.name: batch[i.name].astype("int64") for i in session.get_inputs()}
    print("ONNX, two words each:", session.run(None, given)[0].argmax(1))
    return sum(right) / len(right)


if __name__ == "__main__":
    print(f"{main(Path(sys.argv[1] if len(sys.argv) > 1 else 'runs/bert')):.0%} right")
