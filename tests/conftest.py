"""How the tests are run, and the conventions that keep them quick.

- ``python -m pytest`` gives the tests to as many processes as there are cores, each with one torch
  thread. What names files or tests (``python -m pytest tests/plan``, a debugger) runs in one.
- What takes more than a few seconds is marked ``slow``, and there is a smaller case of it by
  default. Of many cases of one kind, each a second, ``one_in(n)`` takes one in n by default.
  ``python -m pytest -m slow`` runs the others, and all properties on more examples.
- Properties (hypothesis) say no number of examples: it is 30, and 200 with ``-m slow``. Where one
  example costs much, ``@costly`` of ``example_counts.py`` takes a quarter of that.
- The command line is called inside the process by the fixture ``command``, or by ``done`` and
  ``refused``, which check how it ends. A process of its own (``commands.run``) loads torch for
  seconds: it is for a first start. What is about processes (groups, signals, hash seeds) has them
  forked from one that has loaded it (``processes.py``).
- Networks are in ``zoo.py`` and its tables, and go through ``conformance`` all the way. What
  is only read is captured or exported once a file; who changes a network makes its own.
- That an export is exact is measured by the test itself (``differences.py``): a certificate exists
  only where it passed, so that looking at its numbers shows nothing.
- What is imported by several tests is a plain module beside this file, named for what is in it.
"""

import atexit
import collections
import functools
import gc
import importlib
import inspect
import itertools
import json
import logging
import math
import os
import sys
import zlib

# Before torch is loaded, here and in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
# An error in a rule or a pass fails the test, and does not hide as a pin.
os.environ["L0PRUNE_STRICT"] = "1"
# Any width is as fast as another, on each machine: tests of blocks bring times of their own.
os.environ["L0PRUNE_WIDTHS"] = os.path.join(os.path.dirname(__file__), "any_width.json")
# Triton runs its kernels on the CPU where there is no GPU; it asks for this when it is loaded.
if not os.path.exists("/dev/nvidia0"):
    os.environ["TRITON_INTERPRET"] = "1"

# Else pytest rewrites the assertions of each file anew, in each worker, and what tests start
# compiles all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
from hypothesis import HealthCheck, settings

sys.dont_write_bytecode = False
gc.disable()  # until all is imported, of which nothing goes

# ONNX files are tried in OpenVINO where that is installed: not those of tests, but for the fixture.
sys.modules.setdefault("openvino", None)

EXAMPLES = {"default": 30, "slow": 200}
LONG = {"test_wrappers", "test_random_networks", "test_commands", "test_torchrun"}
MOST_WORKERS = 8  # each holds torch and what it compiled: about a gigabyte

for name, count in EXAMPLES.items():
    settings.register_profile(
        f"l0prune-{name}",
        max_examples=count,
        deadline=None,  # a first capture loads much
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


def pytest_configure(config):
    settings.load_profile(f"l0prune-{'slow' if wants_slow(config) else 'default'}")
    if hasattr(config, "workerinput"):  # who runs a part of the whole suite will need it
        importlib.import_module("l0prune.exporting.onnx.times")


def thin_out(items):
    """Mark as slow all but one in n of a test's cases: the same ones each time, by their names.

    Tests that share a fixture and the names of their cases keep the same of them, as far as they
    take one in as many.
    """
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("one_in") and not item.get_closest_marker("slow"):
            cases[item.path, item.originalname].append(item)
    for several in cases.values():
        (n,) = several[0].get_closest_marker("one_in").args
        several.sort(key=lambda item: zlib.crc32(item.callspec.id.encode()))
        for item in several[math.ceil(len(several) / n) :]:
            item.add_marker(pytest.mark.slow)


def wants_slow(config):
    return config.option.markexpr == "slow"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """With ``-m slow`` properties run, too, on more examples. What takes long begins first."""
    items.sort(key=lambda item: item.path.stem not in LONG)
    thin_out(items)
    if wants_slow(config):
        for item in items:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """A process a core for the whole suite; none for single files, which are there sooner."""
    if config.args == config.getini("testpaths"):
        return min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    config.option.dist = "no"
    return 0


def pytest_collection_finish():
    """Captures leave many small objects; what was imported need not be looked through each time."""
    gc.enable()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # what is still there at the end is said to have leaked
    gc.set_threshold(20_000, 20, 20)


def pytest_runtest_setup():
    """What is the same each time is done once, and what only makes numbers steadier for less long.

    For every ONNX file onnxscript reads the source of its whole library and torch the signatures of
    it: half of the one or two seconds that a small file takes. Each capture looks for caches in all
    modules that are there, which takes longer than the capture itself once many packages are in
    use. torch.export looks for new operators that compilers of C++ might have brought, four times a
    capture, and gathers a record of each tensor for its trace log while anybody listens, as pytest
    does to logs that tell nobody else.
    Files that are timed take turns for a second, and no test looks at times.
    """
    trace = logging.getLogger("torch.__trace")
    trace.propagate = True
    trace.handlers.clear()
    if "l0prune.exporting.onnx.times" in sys.modules:
        sys.modules["l0prune.exporting.onnx.times"]._SECONDS = 0.01
    if "l0prune.exporting.onnx.profile" in sys.modules:
        sys.modules["l0prune.exporting.onnx.profile"]._SECONDS = 0.01
    for module, name in (
        ("torch._export.utils", "_materialize_cpp_cia_ops"),
        ("torch.onnx._internal.exporter._schemas", "op_signature_from_function"),
    ):
        function = getattr(sys.modules.get(module), name, None)
        if function is not None and not hasattr(function, "cache_info"):
            setattr(sys.modules[module], name, functools.cache(function))
    caches = sys.modules.get("l0prune.capture.caches")
    if caches is not None and not hasattr(caches._in, "__wrapped__"):
        caches._in = remembered(caches._in)


def remembered(caches_in):
    """The caches of functions in a module of an installed package are those that it had before."""
    known = {}

    @functools.wraps(caches_in)
    def find(names, module):
        if "site-packages" not in (names.get("__file__") or ""):
            return caches_in(names, module)
        if (module, len(names)) not in known:
            known[module, len(names)] = [*caches_in(names, module)]
        return known[module, len(names)]

    return find


@pytest.fixture(scope="session")
def states(tmp_path_factory):
    """Names of folders that nobody has made yet."""
    folder = tmp_path_factory.mktemp("states")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def no_consent_yet(states, monkeypatch):
    """Each test starts on a machine where the user has named nothing, and leaves no traces."""
    monkeypatch.setenv("XDG_STATE_HOME", str(next(states)))


@pytest.fixture(autouse=True)
def seeded():
    """Each test begins with the same random numbers, whatever ran before it."""
    torch = importlib.import_module("torch")
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():  # else torch notes the whole stack, to seed it later
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def untimed(request, monkeypatch):
    """Files are timed, which writes the dense network's, in tests that ask for ``timed`` alone."""
    if "timed" not in request.fixturenames:
        result = importlib.import_module("l0prune.exporting.result")
        saving = inspect.unwrap(result.Export.save_onnx)
        monkeypatch.setitem(saving.__kwdefaults__, "time", False)


@pytest.fixture
def timed():
    """``save_onnx`` times files unless told not to, as it does outside of tests."""


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """A command of the command line inside this process: exit code, stdout, stderr."""
    from l0prune.cli.app import main

    def call(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["l0prune", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        written = capfd.readouterr()
        return stop.value.code, written.out, written.err

    return call


@pytest.fixture
def done(command):
    """A command that does what it is to: stdout, with ``--json`` what that holds, and stderr."""

    def call(*arguments):
        code, out, err = command(*arguments)
        assert code == 0, err
        return json.loads(out) if "--json" in arguments else out, err

    return call


@pytest.fixture
def refused(command):
    """A command that ends with this exit code: what it says, in one line, and nothing on stdout."""

    def call(expected, *arguments):
        code, out, err = command(*arguments)
        assert (code, out) == (expected, "")
        assert "Traceback" not in err
        return " ".join(err.split())

    return call


_OPENVINO = []


@pytest.fixture
def openvino(monkeypatch):
    """OpenVINO, if it is installed."""
    monkeypatch.delitem(sys.modules, "openvino")
    if _OPENVINO:
        monkeypatch.setitem(sys.modules, "openvino", *_OPENVINO)
    else:
        reason = "OpenVINO is not installed: pip install openvino"
        _OPENVINO.append(pytest.importorskip("openvino", reason=reason))
    return _OPENVINO[0]
