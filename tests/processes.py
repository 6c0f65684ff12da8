"""Functions and commands run in several processes of one group, on the CPU."""

import os
import socket
import sys
import traceback
from datetime import timedelta
from unittest import mock

import torch
import torch.multiprocessing as mp

# Seconds: what hangs is ended, but a busy machine takes its time.
LONGEST = 300
# What takes seconds to load, and is therefore loaded once: all processes are forked from one that
# did nothing else.
LOADED = ["torch", "torch._dynamo", "torch.distributed.fsdp"]


def in_processes(function, *arguments, count=2, folder):
    """What ``function(rank, *arguments)`` returned in each process, or the error's text."""
    exit_codes([(_run, rank, count, str(folder), function, arguments) for rank in range(count)])
    paths = [folder / f"{rank}.pt" for rank in range(count)]
    return [torch.load(p, weights_only=False) if p.exists() else None for p in paths]


def launched(*arguments, cwd, count=2):
    """A command in processes that were told what torchrun tells: exit code, stdout, stderr."""
    port = free_port()
    codes = exit_codes([(_command, rank, count, port, cwd, arguments) for rank in range(count)])
    written = []
    for stream in ("out", "err"):
        paths = [cwd / f"{rank}.{stream}" for rank in range(count)]
        written.append("".join(path.read_text() for path in paths))
        for path in paths:
            path.unlink()
    return max(codes), *written


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def tell(rank, count, port):
    """Tell this process what torchrun tells one."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in told.items()})
    os.environ.update(MASTER_ADDR="localhost", TORCHELASTIC_RUN_ID="none")


def exit_codes(calls):
    """How the processes ended of which each made one of the calls: (function, arguments …)."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # a GPU serves one process of a group
    processes = [context.Process(target=_begin, args=(environment, *call)) for call in calls]
    with mock.patch.dict(os.environ, environment):  # of the process that all are forked from
        for process in processes:
            process.start()
    for process in processes:
        process.join(LONGEST)
        if process.is_alive():
            for each in processes:
                each.kill()
            raise TimeoutError(f"{calls[0][0].__name__} was not done in {LONGEST} s")
    return [process.exitcode for process in processes]


def _begin(environment, function, *arguments):
    os.environ.clear()  # what was set when the first of all processes was forked
    os.environ.update(environment)
    torch.set_num_threads(1)
    function(*arguments)


def _run(rank, count, folder, function, arguments):
    os.environ["LOCAL_RANK"] = str(rank)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=LONGEST),
    )
    try:
        result = function(rank, *arguments)
    except BaseException as error:
        traceback.print_exc()
        result = f"{type(error).__name__}: {error}"
    torch.save(result, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def _command(rank, count, port, folder, arguments):
    from l0prune.cli.app import main

    tell(rank, count, port)
    os.chdir(folder)
    for number, stream in enumerate(("out", "err"), start=1):
        with open(f"{rank}.{stream}", "wb") as file:
            os.dup2(file.fileno(), number)
    sys.argv = ["l0prune", *arguments]
    main()
