"""What is loaded before there is work for it: each is seconds that a user waits."""

import subprocess
import sys

import pytest
from processes import LONGEST

HEAVY = ("torchvision", "torch._dynamo", "onnx", "onnxruntime", "onnxscript", "transformers")
SMALL_TALK = [
    ["--help"], ["finetune", "--help"], ["export", "--help"], ["recipes", "--help"],
    ["nonsense"], ["export", "--nonsense"], ["survey"], ["gate"], ["fit"], ["finetune"], ["export"],
]  # fmt: skip

ANSWERS = """
import sys
from l0prune.cli.app import main
for arguments in {small_talk}:
    sys.argv = ["l0prune", *arguments]
    try:
        main()
    except SystemExit as stop:
        assert stop.code == (0 if "--help" in arguments else 2), arguments
    assert "torch" not in sys.modules, arguments
"""

NAMES = """
import sys
import l0prune
for name in l0prune.__all__:
    getattr(l0prune, name)
print([name for name in {heavy} if name in sys.modules])
"""


def python(code, folder):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=LONGEST
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_and_wrong_use_are_answered_without_torch(tmp_path):
    python(ANSWERS.format(small_talk=SMALL_TALK), tmp_path)


@pytest.mark.slow
def test_public_names_load_nothing_that_they_do_not_need_yet(tmp_path):
    assert python(NAMES.format(heavy=HEAVY), tmp_path).strip() == "[]"
