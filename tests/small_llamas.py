"""Small networks and tokenizers for llama.cpp."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
VOCABULARY = 160
LETTERS = [chr(number) for number in range(33, 127)]
TEXTS = ["the cat sat on the mat, and the other cat sat on 12 hats in 1999."] * 3


def built(name, **settings):
    """A network with random biases, norms and weights that make the next token matter."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    more = {"num_hidden_layers": 2, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(name, **sizes | heads | more | settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / (4 if parameter.ndim == 1 else 10))
    return model


def cut(model, *layers):
    """Let each layer have the first so many heads of keys, and so wide an MLP; 0 is none."""
    size, group = model.config.head_dim, 2
    for layer, (heads, width) in zip(model.model.layers, layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        rows = {attention.q_proj: heads * group * size, mlp.gate_proj: width, mlp.up_proj: width}
        rows |= dict.fromkeys((attention.k_proj, attention.v_proj), heads * size)
        for linear, count in rows.items():
            linear.weight = torch.nn.Parameter(linear.weight[:count])
            if linear.bias is not None:
                linear.bias = torch.nn.Parameter(linear.bias[:count])
        for linear, count in ((attention.o_proj, heads * group * size), (mlp.down_proj, width)):
            linear.weight = torch.nn.Parameter(linear.weight[:, :count])
    return model


def tokenizer(folder, pre_tokenizer, alphabet=(*LETTERS, "Ġ"), size=VOCABULARY - 10):
    """Train a tokenizer on a few words, and save it as transformers does."""
    from tokenizers import Tokenizer, decoders, models, trainers

    known = Tokenizer(models.BPE())
    known.pre_tokenizer, known.decoder = pre_tokenizer, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=[*alphabet],
        show_progress=False,
    )
    known.train_from_iterator(TEXTS, trainer)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=known, **special)
    made.save_pretrained(folder)
    return made
