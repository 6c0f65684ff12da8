"""Two processes against one: the same examples, the same gates, the same weights in the end."""

import copy
import os
import shutil
import signal
from dataclasses import dataclass
from typing import ClassVar

import pytest
import small_task
import torch
import torch.distributed as dist
from processes import in_processes
from shared_runs import RUNS, OneByOne, doubled, loss, mlp, outcome, residual, task
from torch import nn
from torch.testing import assert_close

import l0prune
from l0prune.data import Loaded
from l0prune.errors import Interrupted, L0pruneError, UsageError
from l0prune.gating.kinds.base import register
from l0prune.gating.kinds.hard_concrete import HardConcrete
from l0prune.running.evaluate import evaluate
from l0prune.running.processes import process_group, run_on_first
from l0prune.running.task import Task
from l0prune.training import checkpoint
from l0prune.training.run import finetune

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
SLOW = pytest.mark.slow


def common(**own):
    fixed = {"settle": 1, "lam": "1/N", "progress": False, "device": "cpu"}
    return {"epochs": 3, "batch_size": 30, **fixed, **own}


@register
@dataclass(frozen=True)
class Watched(HardConcrete):
    """A gate that remembers what its samples were drawn with."""

    name: ClassVar[str] = "watched"
    noises: ClassVar[list[torch.Tensor]] = []

    def sample(self, log_alpha, noise):
        self.noises.append(noise.clone())
        return super().sample(log_alpha, noise)


def own_samples(rank, distributed):
    """What gates were drawn with, and the outcome of a run with a norm and dropout."""
    Watched.noises.clear()
    example = torch.zeros(2, small_task.FEATURES)
    model = l0prune.gate(small_task.network(dropout=0.3), example, gate=Watched())
    history = finetune(model, small_task.data(), **common(distributed=distributed))
    found = evaluate(model, small_task.data(), batch_size=30)
    return torch.stack(Watched.noises), small_task.tensors(model), history.records, found


def stopped(rank, folder, ways):
    """A run that is stopped in one process and goes on in each of these ways, and one without.

    The first of the ways is that of the run itself.
    """
    distributed = next(iter(ways.values()))

    def run(model, out, how, stop=None, resume=False):
        done = 0

        def watched(outputs, targets):
            nonlocal done
            done += torch.is_grad_enabled()
            if done == stop and rank == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return loss(outputs, targets)

        task = Task(doubled(), doubled(121, seed=1), watched, loss, "test", name="clouds")
        settings = common(lr=1e-2, out=out, resume=resume, distributed=how)
        try:
            finetune(model, task, **settings)
        except Interrupted as error:
            return error.signal, str(error)
        return None

    whole, halted = mlp(), mlp()
    run(whole, folder / "whole", distributed)
    said = run(halted, folder / "halted", distributed, stop=11)
    results = {}
    for name, how in ways.items():
        again, own = copy.deepcopy(halted), folder / f"{name}-{rank}"
        shutil.copytree(folder / "halted", own)
        run(again, own, how, resume=True)
        results[name] = [small_task.tensors(whole), said, small_task.tensors(again)]
    return results


# By default two of the runs, each in one of the two ways; all in both with ``-m slow``.
WRAPPERS = {
    "ddp": {"budget"},
    "fsdp": {"residual"},
}
WRAPPED = [
    pytest.param(wrapper, name, marks=[] if name in by_default else [SLOW])
    for wrapper, by_default in WRAPPERS.items()
    for name, (_, _, settings) in RUNS.items()
    if not (wrapper == "fsdp" and "quantize" in settings)  # which is refused
]


def everything(rank, folder, names):
    """All that two processes do in peace, in one go, since processes take long to start."""
    done = {wrapper: all_of(rank, folder / wrapper, wrapper, names[wrapper]) for wrapper in names}
    return {**done, "asked": asked_of_first(rank)}


def asked_of_first(rank):
    """What ``of_first`` gives in a group of the user's own, in one that was joined, and alone."""
    in_group = run_on_first(lambda: rank)
    with process_group():
        in_joined = run_on_first(lambda: rank)
        with pytest.raises(UsageError, match="process 0"):
            run_on_first(lambda: refuse(rank))
    with process_group(wanted=False):
        alone = run_on_first(lambda: rank)
    return in_group, in_joined, alone


def refuse(rank):
    raise UsageError(f"process {rank}")


def all_of(rank, folder, distributed, names):
    runs = {name: outcome(name, distributed=distributed) for name in names if name in RUNS}
    if "samples" in names:
        runs["samples"] = own_samples(rank, distributed)
    if {"stopped", "switched"} & set(names):
        other = "fsdp" if distributed == "ddp" else "ddp"
        runs |= stopped(rank, folder, {"stopped": distributed, "switched": other})
    return runs


@pytest.fixture(scope="module")
def done(request, tmp_path_factory):
    """What each of two processes did with both wrappers, and the folder that they wrote into."""
    folder = tmp_path_factory.mktemp("wrappers")
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = {wrapper: [] for wrapper in WRAPPERS}
    for each in asked:  # only what this session looks at
        if "both" in each:
            names[each["both"]].append(each["name"])
    for wrapper in WRAPPERS:
        (folder / wrapper).mkdir()
    return in_processes(everything, folder, names, folder=folder), folder


@pytest.fixture(scope="module")
def both(request, done):
    """The same of one wrapper."""
    results, folder = done
    return [of_one[request.param] for of_one in results], folder / request.param


def test_the_first_process_is_asked_for_all(done):
    results, _ = done
    assert [of_one["asked"] for of_one in results] == [(0, 0, 0), (0, 0, 1)]


def both_ways(*names, rare=()):
    """With both wrappers; by default with DDP, and without the rare ones."""
    cases = [pytest.param("ddp", name) for name in names]
    cases += [pytest.param("ddp", name, marks=SLOW) for name in rare]
    cases += [pytest.param("fsdp", name, marks=SLOW) for name in (*names, *rare)]
    return pytest.mark.parametrize(("both", "name"), cases, indirect=["both"])


def nearly(record):
    is_float = {n: isinstance(v, float) or n == "before" for n, v in record.items()}
    return {n: pytest.approx(v, rel=1e-6) if is_float[n] else v for n, v in record.items()}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by a compiler looking
@pytest.mark.parametrize(("both", "name"), WRAPPED, indirect=["both"])
def test_two_processes_learn_what_one_does(both, name):
    (first, records), (second, others) = (results[name] for results in both[0])
    assert records == others
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
    # Shards are not cut, and of what is cut a sample of its gate could open something again.
    whole = {"compact": "never"} if both[1].name == "fsdp" else {}
    alone, expected = outcome(name, **whole)
    # A teacher's scores are compared in float32.
    exact = {"rtol": 1e-9, "atol": 1e-10} if name != "distilled" else {"rtol": 1e-5, "atol": 1e-6}
    is_budget = RUNS[name][2].get("budget") is not None
    if is_budget and both[1].name == "fsdp":
        assert {record["training_macs"] for record in records} == {1.0}
        assert min(record["training_macs"] for record in outcome(name)[1]) < 1
    assert_close(first, alone, **exact)
    assert records == list(map(nearly, expected))


@both_ways("samples")
def test_each_process_samples_its_own_gates_and_all_end_with_the_same(both, name):
    first, second = (results[name] for results in both[0])
    assert first[0].shape == (16, 22)  # one for each step that draws them
    assert len({value for noises in (first[0], second[0]) for value in noises[:, 0].tolist()}) == 32
    assert small_task.differing(first[1], second[1]) == []
    assert first[2] == second[2]
    assert first[3] == second[3]
    assert first[2][-1]["test_loss"] == pytest.approx(first[3]["test_loss"], rel=1e-5)


@both_ways("stopped", rare=("switched",))
def test_all_stop_together_and_go_on_from_the_first_ones_checkpoint(both, name):
    first, second = (results[name] for results in both[0])
    folder = both[1] / f"{name}-0"
    whole, (number, text), after = first
    assert number == signal.SIGINT
    assert "epoch 2, step 3" in text
    assert second[1][0] == signal.SIGINT
    if name == "stopped":
        assert small_task.differing(whole, after) == []
    # shards are not cut: closed slots learn on
    assert_close(left(whole, mlp()), left(after, mlp()), rtol=1e-9, atol=1e-10)
    assert small_task.differing(after, second[2]) == []
    state = checkpoint.read(folder)
    assert (state.settings["processes"], len(state.rng)) == ("2", 2)
    assert {n: tuple(t.shape) for n, t in state.model.items()} == {
        n: tuple(t.shape) for n, t in after.items()
    }
    task = Task(doubled(), doubled(121, seed=1), loss, loss, "test", name="clouds")
    with pytest.raises(UsageError, match="processes 2 → 1"):
        finetune(mlp(), task, **common(lr=1e-2, out=folder, resume=True))


def left(tensors, model):
    """Of a gated model's tensors, those of its export."""
    model.load_state_dict(tensors)
    return small_task.tensors(l0prune.export(model).module)


def refused(rank, folder):
    """What is said in each process when something is wrong, and what it leaves."""
    said = []

    def told(action):
        model = mlp()
        before = small_task.tensors(model)
        try:
            action(model)
        except L0pruneError as error:
            said.append(f"{type(error).__name__}: {error}")
        assert small_task.differing(before, small_task.tensors(model)) == []

    def run(model, **own):
        return finetune(model, task(doubled()), **common(**own))

    told(lambda model: run(mlp() if rank else residual()))
    told(lambda model: run(nn.parallel.DistributedDataParallel(model)))
    told(lambda model: run(model, distributed="fsdp", channels_last=True))
    told(lambda model: run(model, distributed="fsdp", autocast="fp16"))
    steep = Task(doubled(), loss=lambda outputs, targets: 1e300 * loss(outputs, targets))
    told(lambda model: finetune(model, steep, **common(lr=1e12, optimizer="sgd", lam=0)))
    if rank == 0:
        (folder / "file").write_text("")
    told(lambda model: run(model, out=folder / "file"))

    class Torn(OneByOne):
        def __getitem__(self, index):
            if rank == 1 and len(self.read) > 70:
                raise OSError("the disk is torn")
            return super().__getitem__(index)

    told(lambda model: finetune(model, task(Loaded(Torn())), **common()))
    return said


@pytest.mark.slow
def test_what_is_wrong_ends_all_and_is_said_once(tmp_path):
    reasons = [
        "UsageError: the processes were given models whose parameters differ",
        "UsageError: this model is in DDP or FSDP already",
        "UsageError: channels_last cannot be used with FSDP (distributed='fsdp')",
        "UsageError: FSDP has no loss scaling for fp16",
        "TrainingError: training stopped in epoch 1, step 2: the loss is nan",
        "FileError: the folder",
        "DataError: an example cannot be read: the disk is torn",
    ]
    both = in_processes(refused, tmp_path, folder=tmp_path)
    for reason, one, other in zip(reasons, *both, strict=True):
        echo, said = sorted((one, other), key=lambda text: text.startswith(reason))
        assert said.startswith(reason)
        assert echo.startswith("StoppedElsewhere: process ")
        assert said.partition(": ")[2] in echo
