"""Small networks with Fourier transforms, complex numbers, simulated quantisation.

Each case is as in ``networks.CASES``: module, input shape, sizes of the axes in order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from networks import FLAT, IMAGE, TOKENS, Fn, conv
from torch import nn


def global_filter(m, x):
    """GFNet's: every channel times a filter of its own, in frequencies."""
    y = m.a(x)
    waves = torch.fft.rfft2(y, norm="ortho") * torch.view_as_complex(m.w)
    return m.b(torch.fft.irfft2(waves, s=(6, 6), norm="ortho") + y)


def neural_operator(m, x):
    """FNO's: channels mixed at each of the lowest frequencies, the others left out."""
    waves = torch.fft.rfft2(y := m.a(x))
    out = torch.zeros(y.shape[0], 6, 6, 4, dtype=waves.dtype)
    low = torch.view_as_complex(m.w)
    out[:, :, :2, :2] = torch.einsum("bixy,ioxy->boxy", waves[:, :, :2, :2], low)
    return m.b(F.gelu(torch.fft.irfft2(out, s=(6, 6)) + m.c(y)))


def turned(x, turns):
    """Rotary positions as Llama's reference code has them."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.view_as_complex(turns)).flatten(3)


def rotary_by_complex_numbers(m, x):
    b, t, _ = x.shape
    q, k, v = (f(x).view(b, t, 4, 8) for f in (m.q, m.k, m.v))
    q, k, v = (y.transpose(1, 2) for y in (turned(q, m.turns), turned(k, m.turns), v))
    return m.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


torch.manual_seed(0)  # the networks below are the same in every run
SPECTRA = {
    "global_filter": (
        Fn(global_filter, a=conv(3, 8), b=conv(8, 2), w=nn.Parameter(torch.randn(8, 6, 4, 2))),
        IMAGE,
        {"a": 8},
    ),
    "neural_operator": (
        Fn(
            neural_operator,
            a=conv(3, 8),
            b=conv(6, 2),
            c=conv(8, 6, 1),
            w=nn.Parameter(torch.randn(8, 6, 2, 2, 2)),
        ),
        IMAGE,
        {"a.head_dim": 8, "c.head_dim": 6},
    ),
    "waves_over_tokens": (
        Fn(
            lambda m, x: m.b(torch.fft.fft(m.a(x), dim=1, norm="ortho").abs()),
            a=nn.Linear(32, 8),
            b=nn.Linear(8, 3),
        ),
        TOKENS,
        {"a": 8, "a.in": 32},
    ),
    "rotary_by_complex_numbers": (
        Fn(
            rotary_by_complex_numbers,
            q=nn.Linear(32, 32),
            k=nn.Linear(32, 32),
            v=nn.Linear(32, 32),
            o=nn.Linear(32, 7),
            turns=torch.view_as_real(torch.polar(torch.ones(5, 1, 4), torch.rand(5, 1, 4))),
        ),
        TOKENS,
        {},
    ),
    "simulated_quantisation": (
        Fn(
            lambda m, x: m.b(torch.fake_quantize_per_tensor_affine(m.a(x), 0.01, 3, -128, 127)),
            a=nn.Linear(10, 8),
            b=nn.Linear(8, 3),
        ),
        FLAT,
        {"a": 8, "a.in": 10},
    ),
}
