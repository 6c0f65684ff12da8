"""Small decoders of transformers without some branches, and what they generate."""

import torch
import transformers

import l0prune

TOKENS = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(TOKENS).index_put((torch.tensor([0]), torch.tensor([0])), torch.tensor(0))


def llama():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=3, n_head=4)
    return transformers.GPT2LMHeadModel(config)


def gated(make, *closed):
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(8)  # as they come tokens hardly look at each other
    l0prune.gate(model, (), {"input_ids": TOKENS}, branches=True, include=[])
    gates = l0prune.gates(model)
    open_ = gates.open().cpu()
    for axis in gates.plan.axes:
        open_[axis.start] = axis.name not in closed
    gates.set_open(open_)
    return model


def generated(model, *, use_cache):
    """The scores of ten more tokens, the first example padded on the left."""
    found = model.generate(
        TOKENS, attention_mask=PADDED, use_cache=use_cache, max_new_tokens=10, do_sample=False,
        pad_token_id=0, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    return torch.stack(found.scores)


def gemma(*types):
    """Its layers see all tokens, or the last four."""
    config = transformers.Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=len(types),
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=4,
        layer_types=[f"{each}_attention" for each in types],
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)
