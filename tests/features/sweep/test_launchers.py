"""Where the runs of a sweep go: their cores, how they end, and packages that are not there."""

import itertools
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from l0prune.data.image_folder import usable_cpus
from l0prune.errors import UsageError
from l0prune.features.sweep.launchers import LAUNCHERS, CommandLine, launcher, register

CORES = "import os; print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"


def command(folder, code, name="log.txt"):
    return CommandLine((sys.executable, "-c", code), str(folder / name), str(folder))


def ended(job, seconds=60):
    end = time.monotonic() + seconds
    while (code := job.poll()) is None and time.monotonic() < end:
        time.sleep(0.01)
    return code


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_processes_divide_the_cores_and_no_two_share_one(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    count = min(2, len(cores))
    where = launcher("processes", tmp_path, count, {})
    code = CORES + "; import time; time.sleep(0.3)"
    jobs = [where.start(command(tmp_path, code, f"{n}.txt")) for n in range(count)]
    assert [ended(job) for job in jobs] == [0] * count
    assert [ended(where.start(command(tmp_path, CORES, "again.txt")))] == [0]
    seen = [
        eval((tmp_path / f"{n}.txt").read_text().rpartition("]")[0] + "]")
        for n in (*range(count), "again")
    ]
    assert sorted(itertools.chain(*seen[:count])) == cores[: count * (len(cores) // count)]
    assert seen[-1] == seen[0]
    assert (tmp_path / "0.txt").read_text().split()[-1] == str(len(cores) // count)
    assert sorted(os.sched_getaffinity(0)) == cores


def test_how_a_process_ended_is_known(tmp_path):
    where = launcher("processes", tmp_path, 1, {})
    assert where.jobs == 1
    assert ended(where.start(command(tmp_path, "raise SystemExit(2)"))) == 2
    assert ended(where.start(command(tmp_path, "import os; os.kill(os.getpid(), 9)"))) == (
        "its process was ended by SIGKILL, which usually means that memory ran out"
    )


def test_a_process_that_is_stopped_may_end_by_itself(tmp_path):
    waits = "import signal, sys, time\n"
    waits += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('kept')))\n"
    waits += "print('begun', flush=True)\ntime.sleep(60)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of a job in the background
    try:
        job = launcher("processes", tmp_path, 1, {}).start(command(tmp_path, waits))
    finally:
        signal.signal(signal.SIGINT, before)
    while "begun" not in (tmp_path / "log.txt").read_text():
        time.sleep(0.01)
    job.stop()
    assert (tmp_path / "log.txt").read_text() == "begun\nkept\n"


def test_a_command_that_is_interrupted_elsewhere_stops_its_process(tmp_path, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    waited = []

    def wait(timeout=None):
        waited.append(timeout)
        if len(waited) == 1:
            raise KeyboardInterrupt
        return subprocess.Popen.wait(process, timeout)

    monkeypatch.setattr(process, "wait", wait)
    monkeypatch.setattr(CommandLine, "begin", lambda _: process)
    with pytest.raises(KeyboardInterrupt):
        command(tmp_path, "")()
    assert process.returncode == -signal.SIGTERM


class Slurm:
    """As much of submitit as a launcher uses: a job is run when its result is asked for."""

    def __init__(self, folder, cluster):
        self.cluster, self.parameters = cluster or "slurm", {}

    def update_parameters(self, **parameters):
        if "partition" in parameters:
            raise NameError("Unknown argument 'partition'")
        self.parameters |= parameters

    def submit(self, call):
        return SimpleNamespace(done=lambda: True, result=call, cancel=lambda: None)


@pytest.fixture
def submitit(monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(AutoExecutor=Slurm))


@pytest.mark.usefixtures("submitit")
def test_jobs_of_submitit_have_its_parameters(tmp_path):
    where = launcher("submitit", tmp_path, None, {"slurm_partition": "gpu"})
    assert where._executor.parameters == {"timeout_min": 1440, "slurm_partition": "gpu"}
    assert where.jobs > 1000  # Slurm lets them wait
    assert launcher("submitit", tmp_path, None, {"cluster": "local"}).jobs == usable_cpus()
    assert launcher("submitit", tmp_path, 3, {}).jobs == 3
    assert ended(where.start(command(tmp_path, "raise SystemExit(3)"))) == 3
    assert "SIGKILL" in ended(where.start(command(tmp_path, "import os; os.kill(os.getpid(), 9)")))
    lost = where.start(CommandLine(("true",), str(tmp_path / "nowhere" / "log.txt")))
    assert "No such file" in ended(lost)
    with pytest.raises(UsageError, match=r"submitit does not take this: .*partition"):
        launcher("submitit", tmp_path, None, {"partition": "gpu"})


class Cluster:
    """As much of Ray as a launcher uses."""

    def __init__(self):
        self.begun, self.options, self.cancelled = False, None, []

    def is_initialized(self):
        return self.begun

    def init(self, **_):
        self.begun = True

    def remote(self, **options):
        if "gpus" in options:
            raise ValueError("Invalid option keyword gpus")
        self.options = options
        return lambda function: SimpleNamespace(remote=lambda *given: lambda: function(*given))

    def wait(self, references, timeout):
        assert timeout == 0
        return references, []

    def get(self, reference):
        return reference()

    def cancel(self, reference):
        self.cancelled.append(reference)


def test_tasks_of_ray_have_its_options(tmp_path, monkeypatch):
    ray = Cluster()
    monkeypatch.setitem(sys.modules, "ray", ray)
    where = launcher("ray", tmp_path, None, {"num_gpus": 1})
    job = where.start(command(tmp_path, "raise SystemExit(3)"))
    assert ray.begun
    assert ray.options == {"num_cpus": 1, "max_retries": 0, "num_gpus": 1}
    assert ended(job) == 3
    job.stop()
    assert len(ray.cancelled) == 1
    with pytest.raises(UsageError, match="Ray does not take this: Invalid option keyword gpus"):
        launcher("ray", tmp_path, 1, {"gpus": 1}).start(command(tmp_path, ""))


@pytest.mark.parametrize("name", ["submitit", "ray"])
def test_a_package_that_is_not_installed_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=f"pip install {name}"):
        launcher(name, tmp_path, None, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["submitit", "ray"])
@pytest.mark.filterwarnings("ignore")  # of the packages
def test_the_packages_themselves_run_commands(name, tmp_path):
    pytest.importorskip(name)
    options = {"submitit": {"cluster": "local", "timeout_min": 5}, "ray": {}}[name]
    where = launcher(name, tmp_path, 1, options)
    killed = "import os; os.kill(os.getpid(), 9)"
    codes = ("print('here')", "raise SystemExit(3)", killed)
    found = [ended(where.start(command(tmp_path, code))) for code in codes]
    assert found[:2] == [0, 3]
    assert "SIGKILL" in found[2]
    assert "here" in (tmp_path / "log.txt").read_text()


def test_a_launcher_of_ones_own_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(LAUNCHERS, "_known", dict(LAUNCHERS))

    @register
    class Own:
        name = "own"

        def __init__(self, folder, jobs, options):
            self.jobs = jobs

    assert launcher("own", tmp_path, 2, {}).jobs == 2
    with pytest.raises(UsageError, match="'elsewhere'; there are processes, submitit, ray, own"):
        launcher("elsewhere", tmp_path, 2, {})
