"""Typed keywords are made from the settings: for editors, and for mypy in a user's script."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import l0prune

PACKAGE = Path(l0prune.__file__).parent
KEYWORDS = PACKAGE / "training" / "keywords.py"
FILES = [
    "__init__.py", "report/live.py", "training/pruner.py", "training/keywords.py",
    "training/settings.py", "training/gate_settings.py", "training/fields.py",
]  # fmt: skip
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
NAMES = {"GateSettings": "GateKeywords", "DenseSettings": "DenseKeywords", "Settings": "Keywords"}


def generated():
    """The file of keywords: its first lines as they are, and each class as the settings have it."""
    files = [PACKAGE / "training" / f"{name}.py" for name in ("gate_settings", "settings")]
    trees = [ast.parse(path.read_text()) for path in files]
    nodes = [each for tree in trees for each in tree.body]
    classes = {each.name: each for each in nodes if isinstance(each, ast.ClassDef)}
    text = KEYWORDS.read_text()
    parts = [text[: text.index("\n\nclass ")]]
    for name, keywords in NAMES.items():
        bases = ", ".join(NAMES.get(b.id, "TypedDict") for b in classes[name].bases)
        lines = [f"class {keywords}({bases}, total=False):"]
        lines += [f'    """Keywords of ``{name}``."""', ""]
        fields = (each for each in classes[name].body if isinstance(each, ast.AnnAssign))
        lines += [f"    {each.target.id}: {ast.unparse(each.annotation)}" for each in fields]
        parts.append("\n".join(lines).replace("'", '"'))
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def test_the_keywords_are_those_of_the_settings():
    assert KEYWORDS.read_text() == generated(), f"write them anew: python {__file__}"


def test_mypy_refuses_a_misspelt_setting(tmp_path):
    pytest.importorskip("mypy")
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


if __name__ == "__main__":
    KEYWORDS.write_text(generated())
