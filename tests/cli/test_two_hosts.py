"""``torchrun`` on two hosts: network namespaces with a cable between them, and gloo over it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from small_task import FEATURES, differing, network, tensors

import l0prune

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
]
LONGEST = 300  # seconds
ADDRESSES = ("10.213.77.1", "10.213.77.2")
# Examples that are read one by one. If asked to, process 1 dies in the midst of the second epoch.
DATA = """
import os, time
import torch
from small_task import clouds

class Read(torch.utils.data.Dataset):
    def __init__(self, examples, seed):
        self.split, self.count = clouds(examples, seed), 0

    def __len__(self):
        return len(self.split)

    def __getitem__(self, index):
        time.sleep(float(os.environ.get("PAUSE", 0)))
        dies = "DIES" in os.environ and os.environ["RANK"] == "1"
        if dies and os.path.exists("model.run/checkpoint.pt"):
            self.count += 1
            if self.count == 20 and not os.path.exists("died"):
                open("died", "w").close()
                os.kill(os.getpid(), 9)
        return self.split.inputs[index], self.split.targets[index]

def data():
    return Read(120, 0), Read(60, 1)
"""


class Hosts:
    """Two namespaces of the network, each with an end of one cable."""

    def __init__(self, folder):
        self.names = [f"l0prune-{os.getpid()}-{number}" for number in range(2)]
        self.ends = [f"l0p{os.getpid()}x{number}" for number in range(2)]
        self.folder, self.started = folder, []

    def make(self):
        for name in self.names:
            ip("netns", "add", name)
        there = ("netns", self.names[1])
        ip("link", "add", self.ends[0], "netns", self.names[0], "type", "veth",
           "peer", "name", self.ends[1], *there)  # fmt: skip
        for name, end, address in zip(self.names, self.ends, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")

    def start(self, number, *arguments, options=(), **environment):
        """``torchrun … -m l0prune finetune`` on one host, with a process."""
        paths = os.pathsep.join((os.getcwd(), f"{os.getcwd()}/tests"))
        command = [
            "ip", "netns", "exec", self.names[number], sys.executable,
            "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
            "--local-addr", ADDRESSES[number],
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400",
            "--rdzv-id", "run", "--rdzv-conf", f"is_host={1 - number}", *options,
            "-m", "l0prune", "finetune", *arguments,
        ]  # fmt: skip
        own = {"GLOO_SOCKET_IFNAME": self.ends[number], "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, cwd=self.folder, env={**os.environ, "PYTHONPATH": paths, **own, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def unplug(self):
        """Pull the cable: what is sent is lost, and nobody is told."""
        ip("-n", self.names[1], "link", "set", self.ends[1], "down")

    def end(self):
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        for name in self.names:
            ip("netns", "del", name, check=False)


def ip(*arguments, check=True):
    subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


@pytest.fixture
def hosts(tmp_path):
    if shutil.which("ip") is None:
        pytest.skip("there is no command ip, which makes network namespaces")
    found = Hosts(tmp_path)
    try:
        found.make()
    except subprocess.CalledProcessError as error:
        found.end()
        pytest.skip(f"no network namespaces can be made here: {error.stderr.strip()}")
    (tmp_path / "clouds.py").write_text(DATA)
    model = l0prune.gate(network(norm=False).double().float(), torch.zeros(2, FEATURES))
    l0prune.save(model, tmp_path / "model.gated.pt")
    yield found
    found.end()


ASKED = (
    "--data", "clouds.py:data", "--epochs", "4", "--batch-size", "12", "--budget", "params=0.6",
    "--device", "cpu", "--resume",
)  # fmt: skip


def both(hosts, *arguments, **how):
    """A run on both: exit codes, and what was said."""
    started = [hosts.start(number, *ASKED, *arguments, **how) for number in range(2)]
    said = [process.communicate(timeout=LONGEST) for process in started]
    return [process.returncode for process in started], [out for out, _ in said], [
        err for _, err in said
    ]  # fmt: skip


def tuned(folder, name):
    os.replace(folder / "model.tuned.pt", folder / name)
    return tensors(l0prune.load(folder / name))


def on_one(folder, *arguments, options=(), **environment):
    """The same run in two processes of one host: what was said."""
    one = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join((os.getcwd(), f"{os.getcwd()}/tests"))
    done = subprocess.run(
        [*one, *options, "-m", "l0prune", "finetune", *ASKED, *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": paths, **environment}, timeout=LONGEST,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_two_hosts_learn_what_two_processes_of_one_do(hosts, tmp_path, distributed):
    codes, outs, errors = both(hosts, "--distributed", distributed, "--json")
    assert codes == [0, 0], errors
    result = json.loads(outs[0] or outs[1])
    assert result["params"] <= 0.6 * result["dense_params"]
    found = tuned(tmp_path, "first.pt")
    shutil.rmtree(tmp_path / "model.run")
    on_one(tmp_path, "--distributed", distributed)
    assert differing(found, tuned(tmp_path, "second.pt")) == []


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_whose_process_was_killed_goes_on_and_ends_as_one_that_was_not(
    hosts, tmp_path, count
):
    on_one(tmp_path)
    whole = tuned(tmp_path, "whole.pt")
    shutil.rmtree(tmp_path / "model.run")
    if count == 1:
        said = on_one(tmp_path, options=("--max-restarts", "1"), DIES="1")
    else:
        # What is left of one host ends by itself, too, and each end counts as a restart of its own.
        codes, _, errors = both(hosts, options=("--max-restarts", "3"), DIES="1")
        said = "".join(errors)
        assert codes == [0, 0], said
    assert (tmp_path / "died").exists()
    assert "resuming in epoch 2" in said
    assert differing(whole, tuned(tmp_path, "again.pt")) == []
    lines = (tmp_path / "model.run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3, 4]


def test_a_host_that_is_lost_is_said_by_the_other_one(hosts, tmp_path):
    slow = {"PAUSE": "0.05", "L0PRUNE_LOST_AFTER": "5"}
    started = [hosts.start(number, *ASKED, **slow) for number in range(2)]
    end = time.monotonic() + LONGEST
    while not (tmp_path / "model.run" / "metrics.jsonl").exists():
        assert time.monotonic() < end
        assert all(process.poll() is None for process in started)
        time.sleep(0.1)
    hosts.unplug()
    begun = time.monotonic()
    _, err = started[0].communicate(timeout=LONGEST)
    assert started[0].returncode != 0
    assert time.monotonic() - begun < 60
    assert "error: contact with process 1 was lost: there was no sign of life for 5 s" in err
