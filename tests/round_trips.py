"""What was written and read again."""

import io
import pickle
import warnings
from contextlib import contextmanager

import onnx
import torch


def through_pickle(model):
    with _knowingly():
        return pickle.loads(pickle.dumps(model))


def through_torch(model):
    with _knowingly():
        return _read_again(model, torch.save, lambda file: torch.load(file, weights_only=False))


@contextmanager
def _knowingly():
    """Without the warning that l0prune is needed to load it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "l0prune: this pickle holds")
        yield


def through_pt2(program):
    """The module of a program."""
    return _read_again(program, torch.export.save, torch.export.load).module()


def _read_again(thing, save, load):
    file = io.BytesIO()
    save(thing, file)
    file.seek(0)
    return load(file)


def metadata(file):
    """What an ONNX file says beside its graph."""
    return {entry.key: entry.value for entry in onnx.load(file).metadata_props}
