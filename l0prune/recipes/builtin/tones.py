"""Frames of synthetic tones whose pitch is known: harmonics, glides, vibrato, noise, silence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RATE = 16_000  # samples a second
WINDOW = 1_024  # samples a frame
REFERENCE = 10.0  # Hz, the pitch of 0 cents

_LOWEST, _HIGHEST = 50.0, 1_900.0  # Hz
_HARMONICS, _BAND = 40, 7_600.0  # at most so many, all below so many Hz
_AT_ONCE = 512  # frames


@dataclass(frozen=True)
class Tones:
    """Frames and their pitch.

    Attributes:
        frames: sound at ``RATE`` samples a second, shape (frames, ``WINDOW``), float32.
        cents: the pitch in the middle of each, in cents over ``REFERENCE``, shape (frames,),
            float32; NaN where there is none, in noise and silence.
    """

    frames: Tensor
    cents: Tensor


def cents_of(frequency: Tensor) -> Tensor:
    """Frequencies in Hz as cents over ``REFERENCE``: 1,200 are an octave."""
    return 1200 * torch.log2(frequency / REFERENCE)


def frequency_of(cents: Tensor) -> Tensor:
    """Cents over ``REFERENCE`` as frequencies in Hz."""
    return REFERENCE * torch.exp2(cents / 1200)


def tones(count: int, seed: int, unvoiced: float = 0.0) -> Tones:
    """Frames of single tones, all drawn at random; the same for the same seed.

    Pitches are uniform in cents from 50 to 1,900 Hz. A third of the tones stand still, a third
    glide by up to 2,400 cents a second, a third have vibrato (4 to 8 Hz, up to 60 cents to both
    sides). Harmonic k has a random share of k⁻ˢ, with s from 0 to 2.5, and a phase of its own. A
    quarter is clean; the others have white noise, 0 to 40 dB under the tone.

    Args:
        count: number of frames.
        seed: of all that is random.
        unvoiced: share of frames without a pitch: noise, and silence in one of three.
    """
    generator = torch.Generator().manual_seed(seed)
    silent, noisy = round(count * unvoiced / 3), round(count * unvoiced)
    parts = []
    for start in range(noisy, count, _AT_ONCE):
        parts.append(_voiced(min(_AT_ONCE, count - start), generator))
    frames = torch.cat([
        torch.zeros(silent, WINDOW),
        torch.randn(noisy - silent, WINDOW, generator=generator),
        *(part.frames for part in parts),
    ])  # fmt: skip
    cents = torch.cat([torch.full((noisy,), math.nan), *(part.cents for part in parts)])
    order = torch.randperm(count, generator=generator)
    return Tones(frames[order], cents[order])


def tone(
    cents: Tensor,
    glide: Tensor,
    vibrato: tuple[Tensor, Tensor, Tensor],
    amplitudes: Tensor,
    phases: Tensor,
) -> Tensor:
    """Frames of sounding tones, without noise.

    Args:
        cents: pitch in the middle, shape (frames,).
        glide: cents a second, shape (frames,).
        vibrato: depth in cents, rate in Hz and phase in radians, each of shape (frames,).
        amplitudes: of the harmonics from the first on, shape (frames, harmonics). Those that
            would be above ``RATE`` / 2 anywhere in the frame are left out.
        phases: of the harmonics, in radians, in the middle of the frame; shape as amplitudes.

    Returns:
        Shape (frames, ``WINDOW``), float32.
    """
    time = (torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2) / RATE
    depth, rate, start = (each.double()[:, None] for each in vibrato)
    swing = torch.sin(2 * math.pi * rate * time + start) - torch.sin(start)
    pitch = frequency_of(cents.double()[:, None] + glide.double()[:, None] * time + depth * swing)
    turns = torch.cumsum(pitch, 1) / RATE
    turns = 2 * math.pi * (turns - turns[:, WINDOW // 2, None])
    base = torch.polar(torch.ones_like(turns), turns).to(torch.complex64)  # e^{iφ(t)}
    numbers = torch.arange(1, amplitudes.shape[1] + 1)
    heard = amplitudes * (pitch.amax(1, keepdim=True) * numbers < _BAND)
    weights = torch.polar(heard.float(), phases.float())
    power, frames = torch.ones_like(base), torch.zeros(len(cents), WINDOW)
    for number in range(amplitudes.shape[1]):  # e^{ikφ} = e^{i(k-1)φ}·e^{iφ}
        power = power * base
        frames += (weights[:, number, None] * power).imag
    return frames


def _voiced(count: int, generator: torch.Generator) -> Tones:
    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    low, high = cents_of(torch.tensor([_LOWEST, _HIGHEST])).tolist()
    cents = uniform(low, high)
    kind = torch.randint(3, (count,), generator=generator)
    glide = uniform(-2400, 2400) * (kind == 1)
    vibrato = uniform(0, 60) * (kind == 2), uniform(4, 8), uniform(0, 2 * math.pi)
    numbers = torch.arange(1, _HARMONICS + 1)
    amplitudes = uniform(0, 1, _HARMONICS) * numbers ** -uniform(0, 2.5, 1)
    phases = uniform(0, 2 * math.pi, _HARMONICS)
    frames = tone(cents, glide, vibrato, amplitudes, phases)
    frames = frames / frames.square().mean(1, keepdim=True).sqrt()
    loud = 10 ** (-uniform(0, 40, 1) / 20) * (uniform(0, 1, 1) > 0.25)
    frames += loud * torch.randn(count, WINDOW, generator=generator)
    return Tones(frames, cents)
