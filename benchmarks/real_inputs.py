"""Inputs that need no download: rendered text, speech, files of this machine, photographs.

All are the same each time, but for the files of the machine.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.language import documents

FOLDERS = ("/usr/share", "/usr/lib", "/usr/bin", "/usr/include", "/etc")


@cache
def words() -> list[str]:
    """All words of Python's documentation, in its order."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in documents())
    return re.findall(r"[A-Za-z][A-Za-z'.,-]+", text)


@cache
def fonts() -> list[str]:
    """Font files of letters, those of matplotlib."""
    import matplotlib

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    return sorted(str(path) for path in folder.glob("DejaVuS*.ttf") if "Display" not in path.name)


def lines(count: int, most: int, seed: int) -> list[str]:
    """Parts of Python's documentation of at most so many letters."""
    drawn, found = random.Random(seed), list[str]()
    while len(found) < count:
        start = drawn.randrange(len(words()) - 20)
        line = " ".join(words()[start : start + drawn.randint(1, 5)])
        if len(line) <= most:
            found.append(line)
    return found


def rendered(text: str, height: int, width: int, drawn: random.Random) -> Tensor:
    """One line of text on a plain ground, as large as fits; (3, height, width), from -1 to 1."""
    from PIL import Image, ImageDraw, ImageFont

    back, ink = drawn.randint(150, 255), drawn.randint(0, 90)
    font = ImageFont.truetype(drawn.choice(fonts()), 40)
    left, top, right, bottom = font.getbbox(text)
    image = Image.new("L", (int(right - left) + 12, int(bottom - top) + 12), back)
    ImageDraw.Draw(image).text((6 - left, 6 - top), text, fill=ink, font=font)
    image = image.resize((min(width, round(image.width * height / image.height)), height))
    whole = np.full((height, width), 127.5, dtype=np.float32)
    whole[:, : image.width] = np.asarray(image, dtype=np.float32)
    whole += np.random.default_rng(drawn.randrange(1 << 30)).normal(0, 4, whole.shape)
    return torch.from_numpy(whole / 127.5 - 1).float().expand(3, -1, -1).contiguous()


def page(size: tuple[int, int], drawn: random.Random) -> Tensor:
    """A page of lines in several sizes; (3, height, width), from 0 to 1."""
    from PIL import Image, ImageDraw, ImageFont

    height, width = size
    image = Image.new("L", (width, height), drawn.randint(190, 255))
    draw, top = ImageDraw.Draw(image), drawn.randint(5, 30)
    while top < height - 40:
        font = ImageFont.truetype(drawn.choice(fonts()), drawn.randint(12, 34))
        (line,) = lines(1, 40, drawn.randrange(1 << 30))
        draw.text((drawn.randint(4, width // 3), top), line, fill=drawn.randint(0, 100), font=font)
        top += int(font.size * drawn.uniform(1.2, 2.5))
    pixels = torch.from_numpy(np.array(image, dtype=np.float32)) / 255
    return pixels.expand(3, -1, -1).contiguous()


def utterances(held_out: bool, seconds: float) -> Tensor:
    """Sentences that espeak-ng reads with silence around, cut to pieces; (pieces, samples)."""
    from sounds import _HELD_OUT, _LEARNED, _VOICES, RATE, spoken

    found, noise = list[Tensor](), torch.Generator().manual_seed(int(held_out))
    for language, text in (_HELD_OUT if held_out else _LEARNED).items():
        for number, voice in enumerate(_VOICES[held_out]):
            sound = spoken(text, f"{language}+{voice}", 130 + 15 * (number % 5), 20 + 12 * number)
            pause = int(RATE * (0.3 + 0.2 * number))
            sound = torch.cat([torch.zeros(pause), 0.7 * sound / sound.abs().max()])
            sound += 0.003 * (number % 4) * torch.randn(len(sound), generator=noise)
            found.extend(sound.split(int(RATE * seconds)))
    return torch.stack([each for each in found if len(each) == int(RATE * seconds)])


def first_and_last_bytes(count: int, seed: int) -> Tensor:
    """Of files of this machine, of as many kinds as there are, the bytes that magika looks at."""
    kinds: dict[str, list[Path]] = {}
    for folder in FOLDERS:
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file() and not path.is_symlink():
                kinds.setdefault(path.suffix, []).append(path)
    drawn, rows = random.Random(seed), list[Tensor]()
    paths = [path for each in kinds.values() for path in drawn.sample(each, min(len(each), 40))]
    for path in drawn.sample(paths, len(paths)):
        content = path.read_bytes()
        if len(content) >= 16 and len(rows) < count:
            first, last = content[:4096].lstrip()[:1024], content[-4096:].rstrip()[-1024:]
            rows.append(torch.tensor([*_padded(first, False), *_padded(last, True)]))
    return torch.stack(rows).int()


def _padded(content: bytes, before: bool) -> list[int]:
    rest = [256] * (1024 - len(content))
    return [*rest, *content] if before else [*content, *rest]


def photographs(count: int, size: int, seed: int) -> Tensor:
    """Random parts of three photographs, one of a person; (count, 3, size, size), from 0 to 1."""
    import matplotlib
    from PIL import Image
    from sklearn.datasets import load_sample_images

    person = Path(matplotlib.get_data_path(), "sample_data", "grace_hopper.jpg")
    sources: Sequence[Any] = [
        Image.open(person),
        *map(Image.fromarray, load_sample_images().images),
    ]
    drawn, found = random.Random(seed), list[Tensor]()
    for number in range(count):
        image = sources[0 if number % 3 else 1 + number // 3 % 2]
        side = int(min(image.size) * drawn.uniform(0.35, 1))
        left, top = drawn.randint(0, image.width - side), drawn.randint(0, image.height - side)
        part = image.crop((left, top, left + side, top + side)).resize((size, size))
        pixels = np.asarray(part, dtype=np.float32) * drawn.uniform(0.6, 1.1)
        pixels = pixels[:, ::-1] if drawn.random() < 0.5 else pixels
        found.append(torch.from_numpy(pixels.clip(0, 255).copy()).permute(2, 0, 1) / 255)
    return torch.stack(found)


def mels(sounds: Tensor) -> Tensor:
    """Mel spectrograms as Resemblyzer takes them; (pieces, samples) to (pieces, frames, 40)."""
    return mels_of(sounds, 400, 40, power=2)[:, :160]


def mels_of(sounds: Tensor, window: int, bands: int, power: int, is_centred: bool = True) -> Tensor:
    """Mel spectrograms at 16 kHz, each 10 ms; (pieces, samples) to (pieces, frames, bands)."""
    from transformers.audio_utils import mel_filter_bank

    shape = torch.hann_window(window)
    spectra = torch.stft(
        sounds, window, 160, window=shape, center=is_centred, return_complex=True
    ).abs()
    bank = mel_filter_bank(window // 2 + 1, bands, 0.0, 8000.0, 16000, "slaney", "slaney")
    return (spectra**power).transpose(1, 2) @ torch.from_numpy(bank).float()


def steady_tones(count: int, samples: int, rate: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tones of one pitch in a little noise, and their pitches from 70 to 1,000 Hz."""
    random_ = torch.Generator().manual_seed(seed)
    pitch = 70 * (1000 / 70) ** torch.rand(count, generator=random_)
    phases = 2 * torch.pi * pitch[:, None] * torch.arange(samples) / rate
    sounds = 10 ** (-1.5 - 2 * torch.rand(count, 1, generator=random_))
    sounds = sounds * torch.randn(count, samples, generator=random_)
    for number in range(1, 13):
        loud = torch.rand(count, generator=random_) / number * (pitch * number < rate / 2)
        turned = 2 * torch.pi * torch.rand(count, 1, generator=random_)
        sounds = sounds + 0.3 * loud[:, None] * torch.sin(number * phases + turned)
    return sounds, pitch


def chords(count: int, samples: int, rate: int) -> Tensor:
    """Some notes of a few harmonics that begin and fade at random; (count, samples, 1)."""
    random_ = torch.Generator().manual_seed(0)
    time, found = torch.arange(samples) / rate, torch.zeros(count, samples)
    for sound in found:
        for _ in range(int(torch.randint(3, 9, (), generator=random_))):
            pitch = 440 * 2 ** ((int(torch.randint(40, 84, (), generator=random_)) - 69) / 12)
            begin, fade = torch.rand(2, generator=random_).tolist()
            passed = (time - 1.6 * begin).clamp(min=0)
            loud = (passed > 0) * torch.exp(-passed * (1 + 4 * fade))
            parts = torch.rand(8, generator=random_) / torch.arange(1, 9)
            for number, part in enumerate(parts, 1):
                if pitch * number < rate / 2:
                    sound += 0.1 * part * loud * torch.sin(2 * torch.pi * pitch * number * time)
    return found[:, :, None]
