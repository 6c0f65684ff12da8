"""Frames of synthetic speech, by Debian's ``espeak-ng`` where it is installed."""

from __future__ import annotations

import io
import shutil
import subprocess
import wave
from itertools import cycle

import torch
from torch import Tensor

from l0prune.errors import DataError
from l0prune.recipes.builtin.tones import RATE, WINDOW

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
