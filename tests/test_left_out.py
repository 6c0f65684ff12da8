"""Each feature can be left out: without its folder all else is whole, and asking for it is told."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import LONGEST

import l0prune
from l0prune.cli.more import added_options
from l0prune.doors import BUILT_IN, features

ROOT = Path(l0prune.__file__).parents[1]

# Imports all that is left, and does the whole way on a small network.
REST = """
import importlib, pkgutil, sys
import torch
from torch import nn
import l0prune
from l0prune.doors import BUILT_IN, features

gone = sys.argv[1]
assert gone not in features()
left_out = {f"l0prune.features.{name}" for name in BUILT_IN if name not in features()}
for each in pkgutil.walk_packages(l0prune.__path__, "l0prune."):
    if ".".join(each.name.split(".")[:3]) in left_out or each.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(each.name)
    except ImportError as error:  # of an optional package
        assert not (error.name or "l0prune").startswith("l0prune"), each.name

asked = {word for name, words in BUILT_IN.items() if name not in features() for word in words}
for name in l0prune.__all__:
    try:
        getattr(l0prune, name)
        assert name not in asked
    except AttributeError as error:
        assert name in asked, error
        assert "this installation of l0prune has no feature" in str(error)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
x = torch.randn(64, 8)
pairs = torch.utils.data.TensorDataset(x, x.argmax(1) % 3)
data = torch.utils.data.DataLoader(pairs, 16, shuffle=True)
l0prune.gate(model, x[:2])
l0prune.finetune(model, data, budget="macs=0.5", epochs=2)
l0prune.save(model, "model.gated.pt")
small = l0prune.export(l0prune.load("model.gated.pt"))
assert small.macs <= 0.5 * small.macs_before
small.save_onnx("model.onnx")
small.save("model.pt2")
"""


def python(*words, folder):
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )


def left_out(name, folder):
    """The package in this folder, without the folder of a feature."""
    for each in ("l0prune", "recipes"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / each, folder / each, ignore=ignored)
    shutil.rmtree(folder / "l0prune" / "features" / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
def test_without_a_feature_the_rest_is_whole(name, tmp_path):
    left_out(name, tmp_path)
    done = python("-c", REST, name, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rest = {each for each in features() if not needs(each, name)}
    shown = python("-m", "l0prune", "--help", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    listed = {*re.findall(r"^  ([a-z]+)  ", shown.stdout, re.MULTILINE)}
    with_it = {*re.findall(r"^  ([a-z]+)  ", whole_help(), re.MULTILINE)}
    gone = {word for each in features() if each not in rest for word in features()[each].commands}
    assert listed == with_it - gone
    more = [(command, features()[name].load("more", command)) for command in features()[name].more]
    options = [(c, o.name) for c, function in more for o in added_options(function)]
    commands = [[each] for each in features()[name].commands]
    commands += [[command, f"--{option.replace('_', '-')}"] for command, option in options]
    for words in commands:
        asked = python("-m", "l0prune", *words, folder=tmp_path)
        assert asked.returncode == 2
        assert asked.stderr.split() == (
            f"error: this installation of l0prune has no feature {name!r}".split()
        )


def needs(one, other):
    """Whether a feature is there only with another one."""
    return one == other or any(needs(each, other) for each in features()[one].needs)


def whole_help():
    return python("-m", "l0prune", "--help", folder=ROOT).stdout
