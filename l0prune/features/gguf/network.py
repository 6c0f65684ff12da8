"""Network that llama.cpp builds of a file's content, in plain torch: what a file is checked by."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from l0prune.capture.configurations import class_of_transformers
from l0prune.capture.model_checks import evaluating
from l0prune.errors import CertificateError, UsageError, in_a_line
from l0prune.exporting.certify.answers import output_of
from l0prune.exporting.certify.difference import difference
from l0prune.exporting.certify.dtypes import lent
from l0prune.features.gguf.content import Content, content_of
from l0prune.running.device import device_of

_LENGTH = 24  # tokens of each text with which a network is compared
_EXACT = torch.float64
_ROUNDING = 1e-5  # of rotary frequencies, which networks have in float32


def checked(module: nn.Module) -> Content:
    """Return the content of a network's file, of which llama.cpp's graph computes the same.

    Raises:
        CertificateError: it computes something else.
        UsageError: llama.cpp has no architecture for the network.
    """
    try:
        if not class_of_transformers(type(module)):
            raise ValueError(f"{type(module).__qualname__} is no class of transformers")
        content = content_of(module)
    except (AttributeError, KeyError, ValueError) as error:
        why = str(error) if type(error) is ValueError else in_a_line(error)
        raise UsageError(
            f"llama.cpp cannot run this network, so no GGUF file is written: {why}. "
            "loadable_by='gguf' lets gate and shrink cut only what it can"
        ) from error
    length = min(_LENGTH, content.number("context_length"))
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(content.number("vocab_size"), (2, length), generator=random)
    ids = ids.to(device_of(module))
    with evaluating(module), torch.no_grad():
        inputs = ((), {"input_ids": ids, "use_cache": False})
        expected = output_of(lent(module, _EXACT), inputs, _EXACT).logits
        found = logits(content, ids)
    if not expected.is_meta and not difference(expected, found) <= _ROUNDING:
        raise CertificateError(
            "llama.cpp would compute something else, so no GGUF file is written: the network's own "
            "code does more than a Llama's does with these weights"
        )
    return content


def logits(content: Content, ids: Tensor) -> Tensor:
    """Return what llama.cpp's graph of this architecture computes, in float64."""
    read = _Reader(content)
    x = F.embedding(ids, read("token_embd.weight"))
    counts = (content.by_layer(f"attention.head_count{kind}") for kind in ("", "_kv"))
    for number, (queries, keys) in enumerate(zip(*counts, strict=True)):
        at = f"blk.{number}"
        if queries:
            x = x + _attention(read, at, read.norm(f"{at}.attn_norm", x), queries, keys)
        inside = read.norm(f"{at}.ffn_norm", x)
        gate, up = (read.linear(f"{at}.ffn_{each}", inside) for each in ("gate", "up"))
        x = x + read.linear(f"{at}.ffn_down", F.silu(gate) * up)
    head = "output" if "output.weight" in content.tensors else "token_embd"
    return read.linear(head, read.norm("output_norm", x))


class _Reader:
    """Tensors of a content, each in float64 when it is used."""

    def __init__(self, content: Content) -> None:
        self.content = content

    def __call__(self, name: str) -> Tensor:
        return self.content.tensors[name].detach().to(_EXACT)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply a linear layer, with its bias if it has one."""
        bias = f"{name}.bias"
        known = self(bias) if bias in self.content.tensors else None
        return F.linear(x, self(f"{name}.weight"), known)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Apply an RMS norm over the last dim."""
        weight = self(f"{name}.weight")
        epsilon = self.content.numbers["attention.layer_norm_rms_epsilon"]
        return F.rms_norm(x, weight.shape, weight, epsilon)


def _attention(read: _Reader, at: str, x: Tensor, queries: int, keys: int) -> Tensor:
    content = read.content
    size = content.number("attention.key_length")
    q, k, v = (
        read.linear(f"{at}.attn_{name}", x).unflatten(-1, (heads, size)).transpose(1, 2)
        for name, heads in zip("qkv", (queries, keys, keys), strict=True)
    )
    if f"{at}.attn_q_norm.weight" in content.tensors:
        q, k = read.norm(f"{at}.attn_q_norm", q), read.norm(f"{at}.attn_k_norm", k)
    turn = _rotation(read, size, x.shape[1])
    k, v = (each.repeat_interleave(queries // keys, dim=1) for each in (turn(k), v))
    mixed = F.scaled_dot_product_attention(turn(q), k, v, is_causal=True)
    return read.linear(f"{at}.attn_output", mixed.transpose(1, 2).flatten(2))


def _rotation(read: _Reader, size: int, length: int) -> Callable[[Tensor], Tensor]:
    """Return the rotation of heads by their positions."""
    content = read.content
    device = content.tensors["token_embd.weight"].device
    powers = torch.arange(0, size, 2, device=device).float() / size
    speeds = (1.0 / content.numbers["rope.freq_base"] ** powers).to(_EXACT)
    if "rope_freqs.weight" in content.tensors:
        speeds = speeds / read("rope_freqs.weight")
    angles = torch.arange(length, device=device)[:, None] * speeds
    turned = torch.polar(torch.ones_like(angles), angles)
    are_neighbours = content.architecture in ("llama", "deci")

    def rotated(x: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (-1, 2) if are_neighbours else (2, -1))
        pairs = pairs if are_neighbours else pairs.transpose(-1, -2)
        result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turned)
        return (result if are_neighbours else result.transpose(-1, -2)).flatten(-2)

    return rotated
