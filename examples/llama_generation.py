"""A small Llama that continues sequences: gated, trained by transformers' Trainer, cut, loaded.

The model is random, its language is made up: words are numbers, each is the one before and a step,
the same in all of a text. Run it with a folder to work in:
python examples/llama_generation.py runs/llama
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnxruntime
import torch
import transformers
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

import l0prune
from l0prune.integrations.transformers import L0Callback

WORDS, LENGTH, STEPS, STOP = 24, 12, 120, 50


def texts(count: int, seed: int) -> Tensor:
    """Texts as numbers, shape ``(count, LENGTH)``."""
    draw = torch.Generator().manual_seed(seed)
    first = torch.randint(0, WORDS, (count, 1), generator=draw)
    step = torch.randint(1, 4, (count, 1), generator=draw)
    return 1 + (first + step * torch.arange(LENGTH)) % (WORDS - 1)  # 0 is padding


def gated_model() -> transformers.LlamaForCausalLM:
    """Llama with a gate on every channel, head and neuron. Texts stay free in their length."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, max_position_embeddings=64,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    inputs = {"input_ids": texts(2, seed=0)}
    return l0prune.gate(model, (), inputs, dynamic_shapes={"input_ids": {1: "length"}})


class Outage(TrainerCallback):
    """What may happen to any run."""

    def on_step_end(self, args: object, state: TrainerState, *_: object, **given: object) -> None:
        """Stop without a word."""
        if state.global_step == STOP + 5:
            raise KeyboardInterrupt


def train(folder: Path, *others: TrainerCallback, resume: bool = False) -> nn.Module:
    """Train weights and gates: accumulated, in bf16. A run that was stopped goes on."""
    model = gated_model()
    pruner = l0prune.Pruner(model, budget="params=0.6", steps=STEPS, gate_lr=0.2, say=print)
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=16, gradient_accumulation_steps=2,
        learning_rate=1e-2, bf16=True, use_cpu=True, save_steps=STOP, logging_steps=40,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": text, "labels": text.clone()} for text in texts(1024, seed=1)]
    callbacks = [L0Callback(pruner), *others]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return model


def main(folder: Path) -> float:
    """All of it; the share of new texts that the loaded model continues rightly."""
    try:
        train(folder / "run", Outage())
    except KeyboardInterrupt:
        model = train(folder / "run", resume=True)

    small = l0prune.export(model)
    print(small)
    print(small.save_pretrained(folder / "small"))

    loaded = l0prune.from_pretrained(folder / "small")
    new = texts(64, seed=2)
    found = loaded.generate(new[:, :4], max_new_tokens=LENGTH - 4, do_sample=False)
    slow = loaded.generate(new[:, :4], max_new_tokens=LENGTH - 4, do_sample=False, use_cache=False)
    print("the same with and without a cache:", bool(torch.equal(found, slow)))

    (file,) = small.save_onnx(folder / "small.onnx")
    session = onnxruntime.InferenceSession(file)
    (scores, *_) = session.run(None, {"input_ids": new[:, :5].numpy()})
    with torch.no_grad():
        apart = float((torch.from_numpy(scores) - loaded(new[:, :5]).logits).abs().max())
    print(f"ONNX, five words each: {apart:.0e} apart")
    return float((found == new).all(dim=1).float().mean())


if __name__ == "__main__":
    print(f"{main(Path(sys.argv[1] if len(sys.argv) > 1 else 'runs/llama')):.0%} right")
