"""What is loaded before there is work for it: each is seconds that a user waits."""

import os
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

LIBGOMP = """
import ctypes, importlib.util, pathlib, sys
from l0prune.cli.app import main
sys.argv = ["l0prune", "--help"]
try:
    main()
except SystemExit:
    folder = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "lib"
    ctypes.CDLL(next(folder.glob("libgomp*")))
"""

LOGS = """
import logging, sys
from l0prune.cli.app import main
sys.argv = ["l0prune", "--help"]
try:
    main()
except SystemExit:
    import torch
    for name in ("torch.utils._pytree", "torch.onnx", "torch.fx"):
        logging.getLogger(name).warning("about torch itself")
        logging.getLogger(name).error("of " + name)
"""

NAMES = """
import sys
import l0prune
for name in l0prune.__all__:
    getattr(l0prune, name)
print([name for name in {heavy} if name in sys.modules])
"""


def python(code, folder, **variables):
    # a command that ran in this process has set it
    inherited = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_help_and_wrong_use_are_answered_without_torch(tmp_path):
    python(ANSWERS.format(small_talk=SMALL_TALK), tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="torch comes with libgomp on Linux alone")
@pytest.mark.parametrize(
    ("own", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")],
)
def test_threads_of_libgomp_wait_shortly_unless_the_user_says_how_long(tmp_path, own, spins):
    said = python(LIBGOMP, tmp_path, OMP_DISPLAY_ENV="VERBOSE", **own)
    assert f"GOMP_SPINCOUNT = '{spins}'" in said


@pytest.mark.slow
def test_torch_does_not_warn_of_itself_unless_the_user_wants_it_to(tmp_path):
    said = python(LOGS, tmp_path)
    assert "of torch.onnx" in said
    assert "about torch itself" not in said
    assert "about torch itself" in python(LOGS, tmp_path, TORCH_LOGS="-dynamo")


@pytest.mark.slow
def test_public_names_load_nothing_that_they_do_not_need_yet(tmp_path):
    assert python(NAMES.format(heavy=HEAVY), tmp_path).strip() == "[]"
