"""What is said while torch is being loaded, by a process that has not loaded it."""

import subprocess
import sys

CODE = """
import sys, time
from importlib.machinery import ModuleSpec
from l0prune.progress import loading
from l0prune.progress.loading import is_loading, loading_shown

loading.LONG, loading.EVERY, loading._LOOK = 0.1, 0.3, 0.02
assert "torch" not in sys.modules and is_loading("torch")
with loading_shown():
    time.sleep(0.6)
    torch = type(sys)("torch")
    torch.__spec__ = ModuleSpec("torch", None)
    torch.__spec__._initializing = True
    sys.modules["torch"] = torch
    assert is_loading("torch")
    torch.__spec__._initializing = False
    assert not is_loading("torch")
    time.sleep(0.5)
    print("loaded", file=sys.stderr)
"""


def test_a_line_after_some_time_and_none_once_it_is_loaded():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    *lines, last = done.stderr.splitlines()
    assert last == "loaded"
    assert 1 <= len(lines) <= 3
    assert all(line.startswith("loading PyTorch: ") for line in lines)
