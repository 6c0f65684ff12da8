"""Frames of sound: synthetic tones whose pitch is known, and synthetic speech.

Tones have harmonics, glides, vibrato, noise and silence. Speech is that of Debian's ``espeak-ng``,
where it is installed.
"""

from __future__ import annotations

import io
import math
import shutil
import subprocess
import wave
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from l0prune.errors import DataError

RATE = 16_000  # samples a second
WINDOW = 1_024  # samples a frame
REFERENCE = 10.0  # Hz, the pitch of 0 cents

_LOWEST, _HIGHEST = 50.0, 1_900.0  # Hz
_HARMONICS, _BAND = 40, 7_600.0  # at most so many, all below so many Hz
_AT_ONCE = 512  # frames

_PROGRAM = "espeak-ng"
# What is said to learn from, by language, and what is held out, which other voices say.
_LEARNED = {
    "en-gb": "The quick brown fox jumps over the lazy dog while nine old men row home slowly.",
    "en-us": "Are you really sure that we may leave now? I was wondering all morning long.",
    "de": "Am Abend wehen warme Winde über weite Wiesen, und alle Leute gehen heim.",
    "fr": "Nous allons voir un grand jardin où l'on vend des oranges et du bon vin.",
    "es": "La luna ilumina el valle mientras una niña mira el río desde la ventana.",
    "it": "Domani andremo al mare insieme, e mangeremo un gelato vicino alla riva.",
}
_HELD_OUT = {
    "en-gb": "We were away a year ago, in a small house above the harbour. Do you remember?",
    "de": "Ein junger Löwe ruhte neben einem alten Baum und wollte gar nichts wissen.",
    "sv": "Många små båtar ligger vid ön, och en gammal man lagar sina nät i solen.",
    "pt": "O avião voa muito longe, e a menina olha para o mundo lá em baixo.",
}
_VOICES = {False: ("m2", "m3", "m5", "m6", "m7", "f1", "f4", "f5"), True: ("m1", "m4", "f2", "f3")}
# Words a minute, and espeak's pitch from 0 to 99; each voice has the next of them.
_WAYS = ((150, 20), (175, 50), (120, 80), (140, 40), (200, 65))


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


def is_installed() -> bool:
    """Return whether there is an ``espeak-ng`` on this machine."""
    return shutil.which(_PROGRAM) is not None


def speech(held_out: bool, hop: int = RATE // 100) -> Tensor:
    """Frames of sentences that espeak-ng reads, one behind the other; none where it is missing.

    Args:
        held_out: sentences and voices that nothing is learned from.
        hop: samples from one frame to the next.

    Returns:
        Shape (frames, ``WINDOW``), float32, at ``RATE`` samples a second.
    """
    if not is_installed():
        return torch.empty(0, WINDOW)
    ways = cycle(_WAYS)
    said = [
        spoken(text, f"{language}+{voice}", *next(ways)).unfold(0, WINDOW, hop)
        for language, text in (_HELD_OUT if held_out else _LEARNED).items()
        for voice in _VOICES[held_out]
    ]
    return torch.cat(said)


def spoken(text: str, voice: str, speed: int, pitch: int) -> Tensor:
    """One text as sound at ``RATE`` samples a second, shape (samples,); 1 is its loudest.

    Raises:
        DataError: espeak-ng fails, for instance since it lacks the voice.
    """
    command = [_PROGRAM, "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", text]
    done = subprocess.run(command, capture_output=True)
    if done.returncode or not done.stdout:
        reason = done.stderr.decode(errors="replace").strip()
        raise DataError(
            f"{' '.join(command[:-2])} failed: {reason}. Install all of espeak-ng and its data, or "
            "take it away: without it there are only tones"
        )
    with wave.open(io.BytesIO(done.stdout)) as file:
        content = bytearray(file.readframes(file.getnframes()))
        sound = torch.frombuffer(content, dtype=torch.int16).float() / 2**15
        return resampled(sound, file.getframerate(), RATE)


def resampled(sound: Tensor, rate: int, wanted: int) -> Tensor:
    """The sound at another rate, by its spectrum: exact for what is below both rates' halves.

    Shape: (samples,) to (whole seconds' worth or less: samples · wanted / rate, rounded down).
    """
    length = len(sound) * wanted // rate
    spectrum = torch.fft.rfft(sound)
    short = spectrum[: length // 2 + 1]
    padded = torch.zeros(length // 2 + 1, dtype=spectrum.dtype)
    padded[: len(short)] = short
    return torch.fft.irfft(padded, length) * (length / len(sound))
