import math

import pytest
import torch
from sounds import (
    RATE,
    WINDOW,
    cents_of,
    frequency_of,
    is_installed,
    resampled,
    speech,
    spoken,
    tone,
    tones,
)

from l0prune.errors import DataError


def still(frequency, amplitudes):
    zero = torch.zeros(1)
    phases = torch.zeros(1, len(amplitudes))
    return tone(
        cents_of(torch.tensor([frequency])),
        zero,
        (zero, zero, zero),
        torch.tensor([amplitudes]),
        phases,
    )


def spectrum(frames):
    return torch.fft.rfft(frames.double()).abs() / (WINDOW / 2)


@pytest.mark.parametrize("number", [4, 28, 100])
def test_harmonics_are_where_they_belong_and_as_loud(number):
    """Frequencies that fill the frame in whole periods lie in one bin of its spectrum each."""
    found = spectrum(still(number * RATE / WINDOW, [1.0, 0.5, 0.0, 0.25]))[0]
    expected = torch.zeros(WINDOW // 2 + 1).double()
    expected[[number, 2 * number, 4 * number]] = torch.tensor([1.0, 0.5, 0.25]).double()
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_harmonics_that_would_alias_are_left_out():
    found = spectrum(still(200 * RATE / WINDOW, [1.0, 1.0, 1.0]))[0]  # 3,125 Hz
    assert found.argsort(descending=True)[:2].sort().values.tolist() == [200, 400]
    assert found.sort(descending=True).values[2] < 1e-3


def test_cents():
    assert cents_of(torch.tensor([10.0, 20.0, 5.0])).tolist() == [0, 1200, -1200]
    notes = torch.tensor([27.5, 440.0, 4186.0])
    torch.testing.assert_close(frequency_of(cents_of(notes)), notes)


def test_a_tone_has_its_pitch_in_the_middle_whatever_it_does_elsewhere():
    """A sine's phase there, by the zeros around: the slope of φ is 2πf."""
    cents = torch.full((3,), cents_of(torch.tensor(200.0)).item())
    depth = torch.tensor([0.0, 0.0, 60.0]), torch.full((3,), 6.0), torch.tensor([0.0, 0.0, 1.0])
    glide = torch.tensor([0.0, 2400.0, 0.0])
    one = torch.ones(3, 1)
    sine = tone(cents, glide, depth, one, torch.zeros(3, 1)).double()
    cosine = tone(cents, glide, depth, one, torch.full((3, 1), math.pi / 2)).double()
    turned = torch.atan2(sine, cosine)[:, [WINDOW // 2 - 1, WINDOW // 2, WINDOW // 2 + 1]]
    slope = (turned[:, 2] - turned[:, 0]) / 2 * RATE / (2 * math.pi)
    assert turned[:, 1].tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert cents_of(slope).tolist() == pytest.approx(cents.tolist(), abs=0.2)
    assert not torch.allclose(sine[0], sine[1], atol=0.1)
    assert not torch.allclose(sine[0], sine[2], atol=0.1)


def test_silence_is_zero_and_has_no_pitch_and_noise_has_none_either():
    drawn = tones(60, seed=0, unvoiced=0.5)
    unvoiced = drawn.cents.isnan()
    silent = (drawn.frames == 0).all(1)
    assert (unvoiced.sum(), silent.sum()) == (30, 10)
    assert not (silent & ~unvoiced).any()
    assert drawn.frames.shape == (60, WINDOW)
    inside = drawn.cents[~unvoiced]
    assert inside.min() >= cents_of(torch.tensor(49.9))
    assert inside.max() <= cents_of(torch.tensor(1901.0))


def test_a_seed_gives_the_same_tones_again_and_another_one_others():
    one, again, other = tones(8, seed=1), tones(8, seed=1), tones(8, seed=2)
    assert torch.equal(one.frames, again.frames)
    assert torch.equal(one.cents, again.cents)
    assert not torch.equal(one.cents, other.cents)


@pytest.mark.parametrize("rate", [22_050, 8_000])
def test_resampling_keeps_what_both_rates_can_hold(rate):
    given, expected = (
        torch.sin(2 * math.pi * 440 * torch.arange(each // 10).double() / each)
        for each in (rate, RATE)
    )
    torch.testing.assert_close(resampled(given, rate, RATE), expected, atol=1e-9, rtol=0)


@pytest.mark.skipif(not is_installed(), reason="espeak-ng is not installed")
def test_speech_is_frames_that_overlap_and_none_is_held_out_and_learned():
    held_out = speech(held_out=True, hop=WINDOW // 2)
    assert held_out.shape[1] == WINDOW
    assert 0.1 < held_out.abs().max() < 1.1
    assert torch.equal(held_out[0, WINDOW // 2 :], held_out[1, : WINDOW // 2])


@pytest.mark.skipif(not is_installed(), reason="espeak-ng is not installed")
def test_a_voice_that_is_missing_is_said():
    with pytest.raises(DataError, match=r"espeak-ng -v xx-none .* failed: .*voice"):
        spoken("a", "xx-none", 150, 50)


def test_no_speech_without_espeak(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert speech(held_out=True).shape == (0, WINDOW)
