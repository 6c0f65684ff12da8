"""Content of a GGUF file: a network's tensors by the names of llama.cpp, and its numbers.

The rules are from llama.cpp's source, ``src/models/`` of 2026. Its architectures ``llama``,
``qwen2`` and ``qwen3`` have layers that are alike. Of ``deci`` the heads and the MLP's width are
arrays with a number for each layer, and a layer without heads has no attention. What that one
lacks is written as zeros: a layer has an MLP (without one, llama.cpp leaves its attention out,
too), and the first one has heads, since the size of all heads is read there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.configurations import configuration_of

Layer = dict[str, Tensor]  # tensors by name, without the layer's number
_PARTS = (
    {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.o_proj": "attn_output",
    },
    {
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
)
_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_Q, _K, _OUT, _DOWN = (f"{each}.weight" for each in ("attn_q", "attn_k", "attn_output", "ffn_down"))
_STEADY = ("default", "linear", "llama3")  # rotary positions that no text's length changes
_ZEROS = 32  # width of an MLP of zeros, a block of Q8_0
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Content:
    """Content of a file, without the tokenizer.

    Attributes:
        architecture: llama.cpp's name for it.
        numbers: by the keys of the metadata, without the architecture: a number, or one by layer.
        tensors: by llama.cpp's names, in the dtypes of the network.
    """

    architecture: str
    numbers: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def by_layer(self, key: str) -> list[int]:
        """Return a number of each layer."""
        value = self.numbers[key]
        return value if isinstance(value, list) else [value] * self.number("block_count")

    def number(self, key: str) -> int:
        """Return a whole number."""
        return int(self.numbers[key])


def content_of(module: nn.Module) -> Content:
    """Return the content for a network.

    Raises:
        ValueError: llama.cpp has no architecture for it; the text says why.
    """
    state = {name: tensor for name, tensor in module.state_dict().items() if tensor.numel()}
    tensors, size, factors = _ends(module, state), _head_dim(module), _factors(module)
    layers = _packed([*_parts(state)], tensors["token_embd.weight"], size)
    shapes = [_shape(layer, size) for layer in layers]
    architecture = _architecture(layers, shapes, factors is not None)
    if architecture in ("llama", "deci"):
        layers = [_reordered(layer, size) for layer in layers]
        if factors is not None:
            tensors["rope_freqs.weight"] = factors
    queries, keys, widths = ([*each] for each in zip(*shapes, strict=True))
    arrays = {
        "attention.head_count": queries,
        "attention.head_count_kv": keys,
        "feed_forward_length": widths,
    }
    named = {
        f"blk.{n}.{name}": each for n, layer in enumerate(layers) for name, each in layer.items()
    }
    vocabulary, hidden = tensors["token_embd.weight"].shape
    return Content(
        architecture,
        {
            "vocab_size": vocabulary,
            "context_length": _context(module),
            "embedding_length": hidden,
            "block_count": len(layers),
            **{k: v if architecture == "deci" else v[0] for k, v in arrays.items()},
            "attention.key_length": size,
            "attention.value_length": size,
            "attention.layer_norm_rms_epsilon": _epsilon(module, state),
            "rope.dimension_count": size,
            "rope.freq_base": _base(module),
        },
        {**tensors, **named},
    )


# --- tensors -------------------------------------------------------------------------------------


def _ends(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    known = {f"{path}.{kind}" for of in _PARTS for path in of for kind in ("weight", "bias")}
    for name in state:
        layer = re.fullmatch(r"model\.layers\.\d+\.(.+)", name)
        if name not in _ENDS and not (layer and layer[1] in known):
            raise ValueError(f"{name} is no weight of a Llama, Mistral, Qwen2 or Qwen3")
    for name in _ENDS:
        if name not in state and name != "lm_head.weight":
            raise ValueError(f"it has no {name}, as a Llama with a head for the next token has")
    found = {_ENDS[name]: state[name] for name in _ENDS if name in state}
    head = module.get_submodule("lm_head").weight
    if head is module.get_parameter("model.embed_tokens.weight"):
        del found["output.weight"]
    return found


def _parts(state: Mapping[str, Tensor]) -> Iterator[Layer]:
    """Yield the attentions and MLPs that are left, in the order in which they run."""
    numbers = {int(m[1]) for name in state if (m := re.match(r"model\.layers\.(\d+)\.", name))}
    for number in sorted(numbers):
        for of, last in zip(_PARTS, (_OUT, _DOWN), strict=True):
            part = {
                f"{ours}.{kind}": state[name]
                for path, ours in of.items()
                for kind in ("weight", "bias")
                if (name := f"model.layers.{number}.{path}.{kind}") in state
            }
            if last in part:
                yield part
            elif any(not name.endswith("_norm.weight") for name in part):
                raise ValueError(
                    f"model.layers.{number} adds a bias where {last.split('.')[0]} has no weights"
                )


def _packed(parts: list[Layer], embedding: Tensor, size: int) -> list[Layer]:
    """Return the parts as layers of an attention and an MLP, with zeros where one has to be."""
    layers: list[Layer] = []
    for part in parts:
        if _DOWN in part and layers and _DOWN not in layers[-1]:
            layers[-1] |= part
        else:
            layers.append(dict(part))
    layers = layers or [{}]
    hidden = embedding.shape[1]
    wide, narrow = embedding.new_zeros(_ZEROS, hidden), embedding.new_zeros(size, hidden)
    norm = embedding.new_ones(hidden)
    for layer in layers:
        if _DOWN not in layer:
            layer |= {"ffn_norm.weight": norm, "ffn_gate.weight": wide, "ffn_up.weight": wide}
            layer[_DOWN] = wide.T
    if _Q not in layers[0]:
        layers[0] |= {"attn_norm.weight": norm, _Q: narrow, _K: narrow, "attn_v.weight": narrow}
        layers[0][_OUT] = narrow.T
    return layers


def _shape(layer: Layer, size: int) -> tuple[int, int, int]:
    """Return a layer's heads of queries and of keys, and its MLP's width."""
    width = layer[_DOWN].shape[1]
    if _Q not in layer:
        return 0, 0, width
    queries, keys, values = (len(layer[f"attn_{each}.weight"]) / size for each in "qkv")
    if not keys == values == int(keys) or queries % keys:
        raise ValueError(
            f"an attention has {queries:g} query heads, {keys:g} of keys and {values:g} of values "
            f"by heads of {size}, the one size that llama.cpp has for all"
        )
    return int(queries), int(keys), width


def _reordered(layer: Layer, size: int) -> Layer:
    """Return a layer whose queries and keys have the two halves of each head in turn.

    Rotary positions turn neighbours in llama.cpp's ``llama`` and ``deci``, and there halves.
    """
    return {
        name: each.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).reshape(each.shape)
        if re.fullmatch(r"attn_[qk]\.(weight|bias)", name)
        else each
        for name, each in layer.items()
    }


# --- architecture and numbers --------------------------------------------------------------------


def _architecture(layers: list[Layer], shapes: list[tuple[int, int, int]], scaled: bool) -> str:
    names = set().union(*layers)
    are_alike = len({*shapes}) == 1 and all(layer.keys() == names for layer in layers)
    if any(name.endswith("_norm.weight") and name[:6] in ("attn_q", "attn_k") for name in names):
        if not are_alike:
            raise ValueError(
                "it has a norm of queries and keys, as a Qwen3 has, and layers that differ; "
                "llama.cpp has no architecture with both"
            )
        if scaled or any(name.endswith(".bias") for name in names):
            raise ValueError("llama.cpp's qwen3 has no biases and no scaled rotary positions")
        return "qwen3"
    if not are_alike:
        return "deci"
    biased = {name for name in names if name.endswith(".bias")}
    is_qwen2 = biased == {"attn_q.bias", "attn_k.bias", "attn_v.bias"}
    return "qwen2" if is_qwen2 and not scaled else "llama"


def _rotary(module: nn.Module) -> Any:
    found = [
        each for each in module.modules() if isinstance(getattr(each, "inv_freq", None), Tensor)
    ]
    if len(found) != 1:
        raise ValueError("it has no rotary positions that are common to all layers")
    kind = getattr(found[0], "rope_type", "default")
    if kind not in _STEADY or getattr(found[0], "attention_scaling", 1.0) != 1.0:
        raise ValueError(f"its rotary positions are scaled by {kind!r}, which is not written")
    return found[0]


def _head_dim(module: nn.Module) -> int:
    return 2 * len(_rotary(module).inv_freq)


def _base(module: nn.Module) -> float:
    config = configuration_of(module)
    return float((config.get("rope_parameters") or config)["rope_theta"])


def _factors(module: nn.Module) -> Tensor | None:
    """Return by what each rotary frequency is divided; None for those of the base alone."""
    found = _rotary(module).inv_freq.double()
    powers = torch.arange(len(found), dtype=torch.float64, device=found.device) / len(found)
    factors = _base(module) ** -powers / found
    return None if (factors - 1).abs().max() < _ROUNDING else factors.float()


def _context(module: nn.Module) -> int:
    """Return how many tokens the network sees; of a sliding window, those that it always sees."""
    config = configuration_of(module)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return min(int(config["max_position_embeddings"]), int(window or 1 << 31))


def _epsilon(module: nn.Module, state: Mapping[str, Tensor]) -> float:
    found = {
        value
        for path, norm in module.named_modules()
        for name, value in vars(norm).items()
        if "eps" in name and type(value) is float and f"{path}.weight" in state
    }
    if len(found) != 1:
        raise ValueError(f"its norms have {len(found)} different ε, and llama.cpp has one for all")
    return found.pop()
