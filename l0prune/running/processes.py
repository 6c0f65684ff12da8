"""Processes that train one model together, and the tensors that FSDP2 keeps in shards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from itertools import count
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from l0prune.capture.compat import common_store, first_to_set
from l0prune.errors import L0pruneError, StoppedElsewhere, TrainingError, first_line
from l0prune.progress.launched import is_launched
from l0prune.running.heartbeat import heartbeat
from l0prune.running.meeting import fresh_store

T = TypeVar("T")

_LONG = timedelta(hours=12)  # timeout: one process may write or test while the others wait
_times_joined = count()


class World:
    """Group of processes that train together.

    Small data is exchanged between CPUs in a separate gloo group, without waiting for a GPU. Every
    method but the properties must be called by all processes, in the same order.
    """

    def __init__(self, rank: int = 0, size: int = 1, hosts: Any = None) -> None:
        self.rank, self.size = rank, size
        self._hosts = hosts

    @property
    def is_first(self) -> bool:
        """Return whether this process writes files and prints messages."""
        return self.rank == 0

    @property
    def is_shared(self) -> bool:
        """Return whether there are other processes."""
        return self.size > 1

    def mean_(self, tensor: Tensor) -> Tensor:
        """Set a tensor in place to its mean over the processes, on its device."""
        if self.is_shared:
            group = self._hosts if tensor.device.type == "cpu" else None
            dist.all_reduce(tensor, group=group)
            tensor.div_(self.size)
        return tensor

    def largest_(self, tensor: Tensor) -> Tensor:
        """Set a tensor in place to its elementwise maximum over the processes, on its device."""
        if self.is_shared:
            group = self._hosts if tensor.device.type == "cpu" else None
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        return tensor

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sum over the processes of each of these numbers."""
        if not self.is_shared:
            return list(values)
        return [sum(column) for column in zip(*self.gather(list(values)), strict=True)]

    def highest(self, value: int) -> int:
        """Return the maximum of the processes' numbers."""
        if not self.is_shared:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._hosts)
        return int(tensor)

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        values: list[Any] = [value] * self.size
        if self.is_shared:
            dist.all_gather_object(values, value, group=self._hosts)
        return values

    def from_first(self, value: T) -> T:
        """Return the first process's value."""
        values = [value]
        if self.is_shared:
            dist.broadcast_object_list(values, src=0, group=self._hosts)
        return values[0]

    def copy_from_first(self, tensor: Tensor) -> None:
        """Set a tensor in place to its value in the first process."""
        if not self.is_shared:
            return
        theirs = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(theirs, 0, group=self._hosts if tensor.device.type == "cpu" else None)
        if not torch.equal(theirs, tensor):
            tensor.copy_(theirs)

    def first_alone(self, action: Callable[[], T]) -> T | None:
        """Return the result of ``action`` in the first process, None in the others, which wait.

        An L0pruneError that it raised there is raised everywhere.
        """
        if not self.is_first:
            error: L0pruneError | None = self.from_first(None)
            if error is not None:
                raise error
            return None
        try:
            result = action()
        except L0pruneError as error:
            self.from_first(error)
            raise
        self.from_first(None)
        return result

    def first_then_all(self, action: Callable[[], T]) -> T:
        """Run ``action`` in the first process, which may download, then in all others."""
        found = self.first_alone(action)
        return action() if found is None else found


ALONE = World()
_training_together: ContextVar[World | None] = ContextVar("training_together", default=None)


def those_that_train() -> World:
    """Return the processes of ``process_group``; outside it, those of torch's default group."""
    world = _training_together.get()
    if world is None and dist.is_available() and dist.is_initialized():
        world = World(dist.get_rank(), dist.get_world_size())
    return world or ALONE


def run_on_first(action: Callable[[], T]) -> T:
    """Run ``action`` in the first process; return its result, or raise its L0pruneError, in all."""
    world = those_that_train()
    if not world.is_shared:
        return action()
    return world.from_first(world.first_alone(action))  # type: ignore[return-value]


@contextmanager
def process_group(wanted: bool = True) -> Iterator[World]:
    """Join the processes that torchrun started, or those of the user's process group.

    Unless that is ``wanted``, this process is alone in any case. If torchrun started it and there
    is no process group yet, one is created, and destroyed at the end. An error in one process ends
    all: the first to fail reports the reason, the others raise ``StoppedElsewhere`` when they learn
    of it. (They wait in a collective operation until the process that failed has left the group.)
    """
    with _joined(wanted) as world:
        before = _training_together.set(world)
        try:
            yield world
        finally:
            _training_together.reset(before)


@contextmanager
def _joined(wanted: bool) -> Iterator[World]:
    if not wanted or not dist.is_available():
        yield ALONE
        return
    makes_group = is_launched() and not dist.is_initialized()
    if makes_group:
        cuda = torch.cuda.is_available()
        from torch.distributed.rendezvous import rendezvous

        shared, rank, size = next(rendezvous("env://"))
        store = fresh_store(shared, rank, size)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            yield ALONE
            return
        with _of_group() as world:
            yield world
    finally:
        if makes_group:
            dist.destroy_process_group()


@contextmanager
def _of_group() -> Iterator[World]:
    rank = dist.get_rank()
    number, size = next(_times_joined), dist.get_world_size()
    failed = f"l0prune/failed/{number}"
    hosts: Any = dist.new_group(backend="gloo", timeout=_LONG)

    def meet() -> None:
        # A process that fails at once closes its connections while others may still connect.
        dist.barrier(hosts)

    try:
        with warnings.catch_warnings(), _watched(f"l0prune/alive/{number}", rank, size, meet):
            # DDP warns so of 1×1 filters in channels_last, whose strides are ambiguous.
            warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")
            yield World(rank, size, hosts)
    except StoppedElsewhere:
        raise
    except Exception as error:
        elsewhere = _failed_before(failed, rank, error)
        if elsewhere is not None:
            raise StoppedElsewhere(elsewhere) from error
        if _is_lost_contact(error):
            raise TrainingError(
                f"contact with another process was lost: it was killed, ran out of memory, or its "
                f"machine went away ({first_line(error)})"
            ) from error
        raise
    finally:
        dist.destroy_process_group(hosts)


@contextmanager
def _watched(key: str, rank: int, size: int, meet: Callable[[], None]) -> Iterator[None]:
    """Watch the processes that torchrun started; other groups are left to the user."""
    if not is_launched():
        meet()
        yield
        return
    with heartbeat(common_store().clone(), key, rank, size, meet):
        yield


def _failed_before(key: str, rank: int, error: Exception) -> str | None:
    """Return the message of the process that failed before this one; None if this is the first."""
    mine = f"process {rank} stopped, and so all: {error or type(error).__name__}"
    try:
        first = first_to_set(key, mine)
    except RuntimeError:  # the store ended with the process that hosted it
        return None
    return None if first == mine else first


def _is_lost_contact(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


def is_sharded(tensor: Any) -> TypeGuard[Any]:
    """Return whether the tensor is a DTensor, of which this process holds a shard."""
    return hasattr(tensor, "placements")


def to_local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a sharded tensor, sharing memory; other tensors unchanged."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all processes, which must call this together."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def distribute_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a ``tensor`` that every process holds in full in the same way as ``like``."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements
    with torch.no_grad():
        moved = tensor.to(like.device)
        return distribute_tensor(moved, mesh, placements, src_data_rank=None)


def redistribute_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Redistribute a sharded tensor to the placements of ``like``."""
    if not is_sharded(tensor) or not is_sharded(like):
        return tensor
    placed: Tensor = tensor.redistribute(placements=like.placements)
    return placed


def from_local_like(part: Tensor, like: Tensor) -> Tensor:
    """Return the tensor sharded like ``like`` whose shard in this process is ``part``."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def full_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state_dict with full tensors; gathered ones are on the CPU."""
    return _with_state(
        optimizer.state_dict(),
        lambda _, value: full_tensor(value).cpu() if is_sharded(value) else value,
    )


def sharded_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Shard the state that ``full_state`` returned like the parameters of ``optimizer``."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def cut(number: int, value: Any) -> Any:
        like = parameters[number]
        fits = isinstance(value, Tensor) and value.shape == like.shape
        return distribute_like(value, like) if fits else value

    return _with_state(state, cut)


def _with_state(state_dict: Mapping[str, Any], change: Callable[[int, Any], Any]) -> dict[str, Any]:
    state = {
        number: {name: change(number, value) for name, value in entries.items()}
        for number, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
