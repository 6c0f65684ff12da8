"""Functions run in several processes of one group, on the CPU."""

import os
import traceback
from datetime import timedelta

import torch
import torch.multiprocessing as mp

# Seconds: what hangs is ended, but a busy machine takes its time.
LONGEST = 300


def in_processes(function, *arguments, count=2, folder):
    """What ``function(rank, *arguments)`` returned in each process, or the error's text."""
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=_run, args=(rank, count, str(folder), function, arguments))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LONGEST)
        if process.is_alive():
            for each in processes:
                each.kill()
            raise TimeoutError(f"{function.__name__} was not done in {LONGEST} s")
    paths = [folder / f"{rank}.pt" for rank in range(count)]
    return [torch.load(p, weights_only=False) if p.exists() else None for p in paths]


def _run(rank, count, folder, function, arguments):
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
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
