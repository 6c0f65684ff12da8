"""Mixtures of fewer experts: that what is left is exact, and what each score keeps of the model.

First mixtures of the kinds that transformers has, with random weights, cut to six of eight experts:
the largest difference from the model whose other experts are never chosen, as ``shrink_experts``
measures it. Then a Mixtral of 8 experts that has learned the text of Python's documentation (every
eighth file is for the test), and its perplexity with fewer of them.

    pip install 'l0prune[transformers]'
    python -m benchmarks.experts [--steps 600] [--experts 6 4] [--seeds 3]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from statistics import mean
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn

import l0prune
from benchmarks.language import documents, perplexity
from benchmarks.runner import options, table
from l0prune.features.experts.choosing import OUTPUT, SCORES

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"intermediate_size": 96, "num_key_value_heads": 2, "num_experts_per_tok": 2}
_MOE = {"moe_intermediate_size": 48}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_LATENT |= {"qk_nope_head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen2Moe": {"num_experts": 8, **_MOE, "shared_expert_intermediate_size": 80},
    "Qwen3Moe": {"num_experts": 8, **_MOE, "head_dim": 16},
    "Olmoe": {"num_experts": 8},
    "GptOss": {"num_local_experts": 8, "head_dim": 16},
    "GraniteMoe": {"num_local_experts": 8},
    "DeepseekV3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, **_MOE, **_LATENT},
}
_TOKENS, _WINDOW, _BATCH = 1024, 64, 16


def built(family: str, tokens: int = 256) -> nn.Module:
    """A small model of a family, its weights as the library draws them."""
    config = getattr(transformers, f"{family}Config")
    kind = getattr(transformers, f"{family}ForCausalLM")
    model: nn.Module = kind(config(vocab_size=tokens, **_SIZES, **FAMILIES[family])).eval()
    return model


def exact() -> Iterator[tuple[str, ...]]:
    """Yield a row for each family."""
    torch.manual_seed(0)
    ids = torch.randint(256, (16, 32))
    for family in FAMILIES:
        model, start = built(family), time.perf_counter()
        found = l0prune.shrink_experts(model, ids, 6)
        seconds = time.perf_counter() - start
        stored = f"{found.params_before:,} → {found.params:,}"
        active = f"{found.active_before:,} → {found.active:,}"
        yield family, "8 → 6", stored, active, f"{found.error:.1e}", f"{seconds:.1f}"


def rows() -> tuple[Tensor, Tensor]:
    """Windows to learn from, and to test on."""
    files = [file.read_text(encoding="utf-8") for file in documents()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(files[:40], trainer)

    def windows(texts: list[str]) -> Tensor:
        ids = torch.tensor([n for each in tokenizer.encode_batch(texts) for n in each.ids])
        return ids[: len(ids) // _WINDOW * _WINDOW].view(-1, _WINDOW)

    train = [text for number, text in enumerate(files) if number % 8]
    return windows(train[::4]), windows(files[::32])


def learned(train: Tensor, steps: int) -> nn.Module:
    """A Mixtral that has learned so many batches."""
    model: Any = built("Mixtral", _TOKENS).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for index in torch.randint(len(train), (steps, _BATCH)):
        loss = model(input_ids=train[index], labels=train[index], output_router_logits=True).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    result: nn.Module = model.eval()
    return result


def ways(model: nn.Module, given: Tensor, experts: int) -> Iterator[tuple[str, nn.Module]]:
    """The model with so many experts, by each score."""
    for score in (*SCORES, OUTPUT):
        yield score, l0prune.shrink_experts(model, given, experts, score=score).model


def print_learned(given: argparse.Namespace) -> None:
    train, test = rows()
    found: dict[tuple[int, str], list[float]] = {}
    dense = []
    for seed in range(given.seeds):
        torch.manual_seed(seed)
        model = learned(train, given.steps)
        dense.append(perplexity(model, test))
        for experts in given.experts:
            for score, small in ways(model, train[:64], experts):
                found.setdefault((experts, score), []).append(perplexity(small, test))
    print(f"\n{given.seeds} runs of {given.steps} steps; 8 experts: perplexity {mean(dense):.2f}")
    rows_of_all = (
        (*key, f"{mean(values):.2f}", ", ".join(f"{value:.2f}" for value in values))
        for key, values in found.items()
    )
    table("experts | score | perplexity | by seed", rows_of_all)


def main() -> None:
    given = options(
        __doc__, threads=None, steps=(600, "of learning; 0 leaves that out"),
        experts=([6, 4], "that stay"), seeds=(3, "models that learn"),
    )  # fmt: skip
    table("family | experts | stored | meet one input | difference | seconds", exact())
    if given.steps:
        print_learned(given)


if __name__ == "__main__":
    main()
