"""Data sources by name: small data sets, image folders, user functions; pseudo-labels."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from l0prune.capture.model_checks import evaluating
from l0prune.capture.threads import printing_to
from l0prune.data.dataset import (
    LABELS,
    USUAL_BATCH_SIZE,
    Augmentation,
    Data,
    Loaded,
    Split,
    Tensors,
    chosen,
    inputs_and_targets,
    map_tensors,
    to_device,
    without_labels,
)
from l0prune.data.image_folder import image_folder
from l0prune.data.preprocessing import Preprocessing, shifted, shifted_and_mirrored
from l0prune.data.text import load_lines, load_windows, reads_whole_texts, source_of
from l0prune.errors import DataError, UsageError
from l0prune.files.consent import is_code
from l0prune.files.user_code import called, named
from l0prune.plan.names import no_data
from l0prune.progress.stages import steps
from l0prune.running.batches import Batch, call, count_of_batches
from l0prune.running.criteria import AUTO, IGNORED, NEXT_TOKEN, PERPLEXITY, joined, measured
from l0prune.running.device import choose_device, on_device, precision
from l0prune.running.evaluate import explain_mismatch
from l0prune.running.inputs import inputs_for
from l0prune.running.output_parts import Parts, in_parts, in_units, numbered, units_of
from l0prune.running.task import Source, Task, batch_length, is_split


def with_pseudo_labels(
    data: Any,
    network: nn.Module,
    *,
    batch_size: int = 100,
    device: str | torch.device = "auto",
    autocast: str | None = None,
    held_out: Sequence[Any] = (),
    outputs: Sequence[str] = (),
) -> Task:
    """Replace the targets by the network's answers, as pseudo-labels.

    Every example is answered once, in eval mode, and the answers are kept in memory; ``distill``
    computes them anew in each step, for data that is augmented or never ends.

    Args:
        data: what ``finetune`` takes, with targets or without; (training, test) or training alone.
        network: the dense one, before it is gated. Of several outputs all are answers, in a row for
            each example; of outputs with ``.logits`` these are.
        batch_size: examples at a time, where the source lets us choose.
        device: where it answers; see ``Settings``.
        autocast: see ``Settings``.
        held_out: batches of inputs whose examples are left out of the training part.
        outputs: names or globs of those outputs that are answers, as for ``gate``.

    Returns:
        A task with the loss and metric of ``data``, both of (outputs, answers); in place of
        ``"auto"`` the loss is ``"mse"``, since answers are numbers; with ``outputs``, of these. Of
        several outputs, and of one that is joined of parts (``in_parts``), it is the mean of each
        one's, over its answers' variance.

    Raises:
        DataError: there is nothing to learn from.
        UsageError: the network returns neither a tensor nor several with a row for each example,
            or has no output of such a name.
    """
    data = list(data) if isinstance(data, Iterator) else data  # all answers are kept, too
    task = Task.of(_batched(inputs_for(network, data)))
    names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    if task.metric == PERPLEXITY:  # needs tokens as targets, which are replaced
        task = replace(task, metric=None, metric_name="")
    place = choose_device(device, network)

    held = {each for batch in held_out for each in _examples(batch)}
    answering = _Answering(network, place, names)
    with on_device(network, place), evaluating(network), precision(place, autocast):
        train = _labelled(task.train, answering, batch_size, held)
        parts, units = answering.parts or (), answering.units()
        test = None if task.test is None else _labelled(task.test, answering, batch_size, set())
    if task.loss in (AUTO, NEXT_TOKEN):
        squared = partial(_squared, names=names, parts=parts, units=units)
        task = Task.of(task, loss=squared if names or units else "mse")
    return replace(task, train=train, test=test)


def _squared(
    outputs: Any, answers: Tensor, names: Sequence[str], parts: Parts, units: tuple[float, ...]
) -> Tensor:
    """Return the mean squared difference between the outputs that matter, in units, and answers.

    Answers are in the outputs' own units, as metrics want them.
    """
    found = _answer(outputs, names)
    if not units:
        return F.mse_loss(found, answers)
    of = numbered(measured(outputs, names), parts)
    if of is None:  # of other sizes than the first batch's, so that they have not its parts
        return F.mse_loss(found, answers)
    if int(of.max()) + 1 != len(units):
        units = units_of(answers.flatten(1), of)
    mine, theirs = (in_units(each.flatten(1), of, units) for each in (found, answers))
    return F.mse_loss(mine, theirs)


def loss_of_mean(task: Task) -> float | None:
    """Return the test loss of a network that always answers the mean of the targets.

    None if the loss is no mean square, or the targets are not in memory or of unlike sizes.
    """
    loss = task.loss
    if isinstance(loss, partial) and loss.func is _squared:
        if loss.keywords["units"]:
            return 1.0  # each part counts in its variance
    elif loss != "mse":
        return None
    source, found = task.test, list[Any]()
    if isinstance(source, Tensors):
        found = [source.targets]
    elif isinstance(source, Loaded) and isinstance(source.dataset, _WithAnswers):
        found = [source.dataset.answers]
    elif isinstance(source, list):
        found = [batch[1] if isinstance(batch, tuple) else None for batch in source]
    shapes = {each.shape[1:] if isinstance(each, Tensor) else None for each in found}
    if len(shapes) != 1 or None in shapes or not all(each.is_floating_point() for each in found):
        return None
    return float(torch.cat(found).float().var(0, correction=0).mean())


@dataclass
class _Answering:
    """A network that answers, and what it answered.

    Attributes:
        network, place, names: see ``with_pseudo_labels``.
        parts: of the outputs, of the first batch; see ``in_parts``.
        numbers: of the parts in the last answer; see ``numbered``.
        answers: all of them, where they are of several parts.
    """

    network: nn.Module
    place: torch.device
    names: Sequence[str]
    parts: Parts | None = None
    numbers: Tensor | None = None
    answers: list[Tensor] = field(default_factory=list)

    def pair(self, inputs: Any) -> tuple[Any, Tensor]:
        """Return inputs with their answers."""
        given = to_device(inputs, self.place)
        if self.parts is None:
            outputs, self.parts = in_parts(self.network, given, self.names)
        else:
            outputs = call(self.network, given)
        answer = _answer(outputs, self.names).float().cpu()
        self.numbers = numbered(measured(outputs, self.names), self.parts)
        if self.numbers is not None:
            self.answers.append(answer)
        return inputs, answer

    def units(self) -> tuple[float, ...]:
        """Return the units of several parts, by the answers that are as long as the last one."""
        if self.numbers is None:
            return ()
        shape = self.answers[-1].shape[1:]
        rows = [answer.flatten(1) for answer in self.answers if answer.shape[1:] == shape]
        return units_of(torch.cat(rows), self.numbers)


def _answer(outputs: Any, names: Sequence[str]) -> Tensor:
    """Return the outputs that matter as one tensor of float32 or float64."""
    found = joined(measured(outputs, names))
    if found is None:
        raise UsageError(
            f"the model returns a {type(outputs).__name__}; only tensors with a row for each "
            "example can be learned from. Name those that are (outputs), or put a module around "
            "it that returns them"
        )
    return found if found.dtype == torch.float64 else found.float()


def _labelled(source: Source, answering: _Answering, batch_size: int, held: set[bytes]) -> Source:
    if isinstance(source, Tensor):
        source = Tensors(source, torch.zeros(len(source)))
    if isinstance(source, Loaded):  # its examples may be inputs alone
        batches = _with_answers(source, torch.zeros(len(source))).batches(batch_size)
    else:
        batches = source.batches(batch_size) if is_split(source) else iter(source)
    pairs, left = list[tuple[Any, Tensor]](), list[Tensor]()
    for batch in steps(batches, count_of_batches(source, batch_size)):
        inputs = _inputs_of(batch)
        with explain_mismatch([Batch(inputs, None)], "network and data"):
            pairs.append(answering.pair(inputs))
        if held:
            left.append(torch.tensor([each not in held for each in _examples(pairs[-1][0])]))
    if isinstance(source, Tensors):
        source = Tensors(source.inputs, torch.cat([answers for _, answers in pairs]))
    elif isinstance(source, Loaded):
        source = _with_answers(source, torch.cat([answers for _, answers in pairs]))
    elif held:
        return [_rows_of(*each) for each in zip(pairs, left, strict=True) if bool(each[1].any())]
    else:
        return pairs
    return chosen(source, torch.cat(left).nonzero().flatten()) if held else source


def has_targets(data: Any) -> bool:
    """Return whether examples have targets: not inputs alone, nor mappings without labels.

    One example or batch of the training data is read.
    """
    data = data[0] if isinstance(data, tuple) and len(data) == 2 else data
    source = data if isinstance(data, Tensor | Mapping) else Task.of(data).train
    if isinstance(source, Tensor | Mapping):
        return False
    if is_split(source) and not isinstance(source, Loaded):
        return True
    first = source.dataset[0] if isinstance(source, Loaded) else next(iter(source), None)
    if isinstance(first, Mapping):
        return any(name in first for name in LABELS)
    return not isinstance(first, Tensor) and not (
        isinstance(first, tuple | list) and len(first) == 1
    )


def _batched(data: Any, size: int = USUAL_BATCH_SIZE) -> Any:
    """Return data in which a mapping of all examples is split into a list of batches."""
    if isinstance(data, tuple):
        return tuple(_batched(part, size) for part in data)
    if not isinstance(data, Mapping):
        return data
    parts = zip(*(tensor.split(size) for tensor in data.values()), strict=True)
    return [dict(zip(data, part, strict=True)) for part in parts]


def _inputs_of(batch: Any) -> Any:
    if isinstance(batch, tuple | list) and len(batch) == 1:  # as of TensorDataset(inputs)
        (batch,) = batch
    return map_tensors(
        batch if isinstance(batch, Tensor) else without_labels(inputs_and_targets(batch)[0])
    )


def _examples(inputs: Any) -> list[bytes]:
    """Return each example's tensor values, as bytes, in a batch of inputs."""
    length, rows = batch_length(inputs, None), list[list[bytes]]()

    def note(tensor: Tensor) -> None:
        if tensor.dim() and len(tensor) == length:
            flat = tensor.detach().cpu().contiguous().view(length, -1).view(torch.uint8)
            rows.append([row.tobytes() for row in flat.numpy()])

    map_tensors(inputs, note)
    return [b"".join(parts) for parts in zip(*rows, strict=True)]


def _rows_of(pair: tuple[Any, Tensor], rows: Tensor) -> Any:
    return map_tensors(pair, lambda each: each[rows] if each.shape[:1] == rows.shape else each)


def _with_answers(source: Loaded, answers: Tensor) -> Loaded:
    return Loaded(_WithAnswers(source.dataset, answers), source.workers, None, _Collate(source))


class _WithAnswers(Dataset):
    """Dataset of pairs: an example of another dataset and the network's answer."""

    def __init__(self, dataset: Any, answers: Tensor) -> None:
        self._dataset, self.answers = dataset, answers

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        return self._dataset[index], self.answers[index]


class _Collate:
    """Collate function of examples with answers; a class, since workers need to pickle it."""

    def __init__(self, source: Loaded) -> None:
        self._collate = source.collate

    def __call__(self, examples: list[tuple[Any, Tensor]]) -> tuple[Any, Tensor]:
        given, answers = zip(*examples, strict=True)
        return _inputs_of(self._collate(list(given))), torch.stack(answers)


_WANTED = (
    "(train, test), each a dataset, a DataLoader or a pair of tensors (inputs, targets), a "
    "l0prune.Task or, for what needs no labels, inputs (a tensor, a mapping, a list of batches)"
)


def _are_batches(found: Any) -> bool:
    """Return whether this is a list of batches of inputs."""
    is_list = isinstance(found, list) and bool(found)
    return is_list and all(isinstance(each, Tensor | Mapping) for each in found)


def _to_data(found: Any, spec: str) -> Data:
    """Convert the result of ``file.py:function``, a ``Data`` or (train, test), to a ``Data``."""
    if isinstance(found, Data):
        return replace(found, name=spec)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise DataError(f"{spec} must return {_WANTED}, not a {type(found).__name__}.")
    train, test = (_split(part, spec) for part in found)
    counts = [_class_count(part, spec) for part in (train, test)]
    if counts.count(None) == 1:
        raise DataError(f"{spec}: the labels of one part are class numbers, of the other not.")
    return Data(spec, train, test, max(count or 0 for count in counts))


def _split(part: Any, spec: str) -> Split:
    if isinstance(part, Tensors | Loaded):
        return part
    if isinstance(part, tuple | list) and len(part) == 2:
        inputs, targets = part
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            return Tensors(inputs, targets if targets.is_floating_point() else targets.long())
    if isinstance(part, DataLoader) and not isinstance(part.dataset, IterableDataset):
        return Loaded(part.dataset, part.num_workers, collate=part.collate_fn)
    is_dataset = hasattr(part, "__getitem__") and hasattr(part, "__len__")
    if is_dataset and not isinstance(part, Tensor | dict | str):
        return Loaded(part)
    raise DataError(
        f"{spec} returned a {type(part).__name__} where a dataset with a length should be. It must "
        f"return {_WANTED}."
    )


def _class_count(split: Split, spec: str) -> int | None:
    """Return the number of classes seen in this part; None if targets are not classes."""
    if not len(split):
        return 0  # Data raises an error for an empty part
    if isinstance(split, Tensors):
        return _count(split.targets, spec)
    assert isinstance(split, Loaded)
    classes = getattr(split.dataset, "classes", None)
    if isinstance(classes, list | tuple):
        return len(classes)
    known = _known_targets(split.dataset)
    if known is not None:
        return _count(known, spec)
    counts = [_count(targets, spec) for _, targets in split.batches(256)]
    return None if None in counts else max(count or 0 for count in counts)


def _known_targets(dataset: Any) -> Tensor | None:
    """Return all labels of a dataset if it stores them apart from its examples, else None."""
    if isinstance(dataset, Subset):
        whole = _known_targets(dataset.dataset)
        return None if whole is None else whole[torch.as_tensor(dataset.indices)]
    targets = getattr(dataset, "targets", None)
    if isinstance(targets, Tensor):
        return targets
    is_numbers = isinstance(targets, list) and all(isinstance(t, int) for t in targets)
    return torch.tensor(targets) if is_numbers else None


def _count(targets: Any, spec: str) -> int | None:
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    numbers = targets[targets != IGNORED]
    if numbers.numel() and int(numbers.min()) < 0:
        raise DataError(f"{spec}: labels must be class numbers: whole, from 0 up.")
    return int(numbers.max()) + 1 if numbers.numel() else 0


def _fixed_size(
    color: Literal["RGB", "L"],
    side: int,
    mean: list[float],
    std: list[float],
    pixel_max: float = 255.0,
) -> Preprocessing:
    """Return the preprocessing of square images that are not resized."""
    shape = [len(color), side, side]
    return Preprocessing(input_size=shape, color=color, pixel_max=pixel_max, mean=mean, std=std)


_CIFAR = _fixed_size("RGB", 32, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
# Class of torchvision, and preprocessing of its images.
_KNOWN = {
    "mnist": ("MNIST", _fixed_size("L", 28, [0.1307], [0.3081])),
    "fashion-mnist": ("FashionMNIST", _fixed_size("L", 28, [0.2860], [0.3530])),
    "cifar10": ("CIFAR10", _CIFAR),
    "cifar100": ("CIFAR100", _CIFAR),
}
_DIGITS = _fixed_size("L", 8, [0.5], [0.5], pixel_max=16.0)  # from −1 to 1
_DIGITS_TRAIN = 1437  # four of five


def _digits(name: str, root: Path) -> Data:
    """Return scikit-learn's 1,797 handwritten digits of 8×8 pixels, with values from −1 to 1."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("The digits come with scikit-learn: pip install 'l0prune[demo]'") from error
    images, labels = load_digits(return_X_y=True)
    inputs = _DIGITS.scaled(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8))
    targets = torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    train, test = order[:_DIGITS_TRAIN], order[_DIGITS_TRAIN:]
    learned, tested = (Tensors(inputs[part], targets[part]) for part in (train, test))
    return Data(name, learned, tested, 10, _DIGITS)


def _mnist(name: str, root: Path) -> Data:
    """Return MNIST or Fashion-MNIST: images of 28×28 pixels in ten classes."""
    sets = [_torchvision(name, root, train) for train in (True, False)]
    train, test = (_scaled(name, found.data[:, None], found.targets, shifted) for found in sets)
    return Data(name, train, test, 10, _KNOWN[name][1])


def _cifar(name: str, root: Path) -> Data:
    """Return CIFAR-10 or CIFAR-100; CIFAR-10 also from JPEG files packed in ``cifar10-jpeg``."""
    classes = 100 if name == "cifar100" else 10
    packed = root / "cifar10-jpeg"
    if name == "cifar10" and (packed / "train.npz").exists():
        pairs = [_unpacked(packed / f"{part}.npz") for part in ("train", "test")]
    else:
        sets = [_torchvision(name, root, train) for train in (True, False)]
        pairs = [(torch.from_numpy(found.data), torch.tensor(found.targets)) for found in sets]
    train, test = (
        _scaled(name, images.permute(0, 3, 1, 2), labels, shifted_and_mirrored)
        for images, labels in pairs
    )
    return Data(name, train, test, classes, _KNOWN[name][1])


def _torchvision(name: str, root: Path, train: bool) -> Any:
    """Return a torchvision dataset, downloaded only if it cannot be read from ``root``."""
    from torchvision import datasets

    build = getattr(datasets, _KNOWN[name][0])
    failure: Exception | None = None
    for download in (False, True):
        try:
            with printing_to(sys.stderr):  # stdout is for results
                return build(str(root), train=train, download=download)
        except Exception as error:  # torchvision raises whatever its parsers meet
            failure = error
    raise DataError(
        f"{name} can neither be read from {root} nor downloaded to it ({failure}). Say where it is "
        "with --data-root DIR or the environment variable L0PRUNE_DATA."
    ) from failure


def _scaled(name: str, images: Tensor, labels: Tensor, augmentation: Augmentation) -> Tensors:
    """Scale bytes to floats of about zero mean and unit deviation.

    Shape: images ``(n, channels, height, width)``, uint8.
    """
    return Tensors(_KNOWN[name][1].scaled(images), labels.to(torch.int64), augmentation)


def _unpacked(path: Path) -> tuple[Tensor, Tensor]:
    """Read images packed as JPEG files one after another (arrays jpeg, length, label).

    Shape: images ``(n, height, width, channels)``, uint8; labels ``(n,)``.
    """
    try:
        with path.open("rb") as archive, np.load(archive) as arrays:
            jpeg, lengths, labels = arrays["jpeg"], arrays["length"], arrays["label"]
        files = np.split(jpeg, np.cumsum(lengths)[:-1])
        pixels = [np.asarray(Image.open(io.BytesIO(file.tobytes()))) for file in files]
        images = torch.from_numpy(np.stack(pixels))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(f"{path} is missing or damaged: {error}") from error
    return images, torch.from_numpy(labels)


_NAMED: dict[str, Callable[[str, Path], Data]] = {
    "digits": _digits,
    "mnist": _mnist,
    "fashion-mnist": _mnist,
    "cifar10": _cifar,
    "cifar100": _cifar,
}


_TOKENS = 4096  # tokens per batch of text: each has scores for a whole vocabulary


def _text(name: str, paths: Sequence[Path], length: int, tokenizer: Any, model: Any) -> Any:
    """Return the task of predicting each next token in windows of text, which are the targets.

    For a model that reads whole texts, the inputs alone.
    """
    if reads_whole_texts(model):
        return load_lines(paths, tokenizer, length, model)
    parts = load_windows(paths, tokenizer, length, model)
    size = max(1, _TOKENS // parts[0].shape[1])
    train, test = (Tensors(rows, rows, usual_batch_size=size) for rows in parts)
    return Task(train, test, loss=NEXT_TOKEN, metric=PERPLEXITY, name=name)


def load_data(
    spec: str,
    root: str | os.PathLike[str] | None = None,
    *,
    tokenizer: Any = None,
    model: nn.Module | None = None,
) -> Any:
    """Load the data that ``spec`` names: a ``Data``, a ``Task``, or inputs alone.

    Args:
        spec: ``mnist``, ``fashion-mnist``, ``cifar10``, ``cifar100``, ``digits``,
            ``imagefolder:DIR`` (with ``train`` and ``test`` or ``val`` inside, or else a folder
            for each class, of which every fifth image is for the test, or else images alone, which
            are inputs without labels; inputs of the images' own
            size where all are squares of one size, else of 224×224 pixels, or of as many as in
            ``imagefolder:DIR:64``, grey ones in ``imagefolder:DIR:1x64``: see
            ``preprocessing``), a text (``FILE.txt``, ``text:PATH``, a folder
            of ``.txt`` files; in windows of 1,024 tokens, or as many as in ``FILE.txt:256``, or
            as the model takes if these are fewer; see below), or ``file.py:function`` that returns
            two datasets (train, test), a ``Data``, a ``Task`` with its own loss, or, for what wants
            no labels, a tensor or mapping of inputs, or a list of batches of these.
        root: folder of the downloaded sets; else ``$L0PRUNE_DATA``, else a cache folder, where
            torchvision downloads what is not there.
        tokenizer: of a text: a tokenizer of transformers, the folder or name of one, or the model
            that came from there.
        model: that reads the text; by default the one that is given as ``tokenizer``. One that
            gives no scores of tokens, such as a classifier, gets each line as a text of its own,
            padded with a mask where lengths differ: inputs alone, without labels.

    A text of a language model has two parts: ``train.txt,test.txt``, or two folders so; a folder
    with ``train`` and ``test`` or ``val`` inside; else every eighth file of a folder is for the
    test, or the last eighth of fewer files. The loss is ``"next-token"``, the metric
    ``"perplexity"``.

    Raises:
        DataError: the data is missing, empty or damaged.
        FileError: the Python file is missing, or fails.
        UsageError: the spec names nothing, or the function fails.
    """
    kind, _, rest = spec.partition(":")
    if spec in _NAMED:
        cache = Path.home() / ".cache" / "l0prune"
        return _NAMED[spec](spec, Path(root or os.environ.get("L0PRUNE_DATA") or cache))
    if kind == "imagefolder" and rest:
        return image_folder(spec, rest)
    if is_code(spec):
        found = called(named(spec), spec)
        if isinstance(found, Tensor | Mapping) or _are_batches(found):
            return found
        return replace(found, name=spec) if isinstance(found, Task) else _to_data(found, spec)
    if text := source_of(spec):
        if model is None and isinstance(tokenizer, nn.Module):
            model = tokenizer
        return _text(spec, *text, tokenizer=tokenizer or model, model=model)
    raise no_data(spec)
