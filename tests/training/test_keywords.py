"""Typed keywords are the settings: for editors, and for mypy in a user's script."""

import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import l0prune
from l0prune.training.gate_settings import GateSettings
from l0prune.training.keywords import DenseKeywords, GateKeywords, Keywords
from l0prune.training.run import OF_GATES
from l0prune.training.settings import Settings

PACKAGE = Path(l0prune.__file__).parent
FILES = ["__init__.py", "report/live.py", "training/pruner.py", "training/keywords.py"]
SCRIPT = """
import torch
import l0prune

model, data = torch.nn.Linear(3, 4), [(torch.zeros(2, 3), torch.zeros(2))]
l0prune.finetune(model, data, budget="macs=0.5", loss="mse", metric=lambda y, t: 0, epochs=3)
l0prune.train_dense(model, data, lr=0.1, loss=torch.nn.functional.mse_loss)
l0prune.Pruner(model, steps=9, n=100, lam="0.1/N", gate_lr=0.1).before_step()
"""
WRONG = {
    'finetune(model, data, bugdet="macs=0.5")': 'did you mean "budget"?',
    'finetune(model, data, epochs="3")': 'incompatible type "str"; expected "int"',
    'train_dense(model, data, lam="1/N")': 'Unexpected keyword argument "lam"',
    "Pruner(model, steps=9, gate_rl=0.1)": 'did you mean "gate_lr"?',
    "finetun(model, data)": 'maybe "finetune"?',
}


def test_they_are_the_settings():
    assert get_type_hints(GateKeywords).keys() == GateSettings.model_fields.keys()
    assert get_type_hints(Keywords).keys() == Settings.model_fields.keys()
    assert get_type_hints(DenseKeywords).keys() == Settings.model_fields.keys() - set(OF_GATES)


@pytest.mark.parametrize("name", Settings.model_fields)
def test_their_types_are_those_of_the_settings(name):
    annotation = Settings.model_fields[name].annotation
    if annotation is Any:  # what settings check by themselves, since it has many forms
        assert get_type_hints(Keywords)[name] is not Any
    else:
        assert get_type_hints(Keywords)[name] == annotation


def test_mypy_refuses_a_misspelt_setting(tmp_path):
    script = tmp_path / "script.py"
    lines = [*SCRIPT.splitlines(), *(f"l0prune.{call}" for call in WRONG)]
    script.write_text("\n".join(lines))
    # No other file is followed: it takes a second, not half a minute.
    alone = ["--config-file=", "--follow-imports=skip", f"--cache-dir={tmp_path / 'cache'}"]
    files = [script, *(PACKAGE / name for name in FILES)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *alone, "--no-site-packages", *files],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
    )
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith(str(script)) and "error" in line and '"torch"' not in line:
            number, _, text = line.removeprefix(f"{script}:").partition(":")
            found[lines[int(number) - 1].removeprefix("l0prune.")] = text
    assert found.keys() == WRONG.keys(), done.stdout + done.stderr
    for call, text in WRONG.items():
        assert text in found[call]
