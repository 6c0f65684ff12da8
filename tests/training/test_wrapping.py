"""Cuts in the midst of DDP and FSDP2 runs in a loop of one's own: as one process does it."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from processes import in_processes
from shared_runs import branched, doubled, loss, mlp, residual
from small_task import differing
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import l0prune
from l0prune.errors import UsageError
from l0prune.running.processes import full_tensor, is_sharded

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
STEPS, BATCH = 40, 24
MODELS = {"mlp": mlp, "residual": residual, "branched": branched}
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, fused=False),
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}


def ddp(model):
    return DistributedDataParallel(model, find_unused_parameters=True)


def fsdp(model):
    from torch.distributed.fsdp import fully_shard

    numbers = {each for each in model.parameters() if not each.dim()}  # which have no shards
    for block in model.children():
        if isinstance(block, nn.Linear):
            fully_shard(block, ignored_params=numbers)
    return fully_shard(model, ignored_params=numbers)


WRAPS = {"ddp": ddp, "fsdp": fsdp}


class Run:
    """A loop of a user's own, of one process or of several."""

    def __init__(self, model="mlp", wrap=None, optimizer="adamw", steps=STEPS, **settings):
        self.model, self.said, self.shares, self.wrap = MODELS[model](), [], [], wrap
        settings = {"budget": "params=0.5", "gate_lr": 0.2, "l2": 1e-3, **settings}
        self.pruner = l0prune.Pruner(
            self.model, steps=steps, warmup=2, settle=steps // 4, wrap=WRAPS.get(wrap),
            say=self.said.append, compact="auto", **settings,
        )  # fmt: skip
        groups = self.pruner.param_groups(lr=1e-2, weight_decay=0.1)
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.data = doubled(STEPS * BATCH)

    def go(self, steps, rank=0, count=1):
        for _ in range(steps):
            share = BATCH // count
            start = BATCH * self.pruner.step + share * rank
            rows = slice(start, start + share)
            outputs = self.pruner.network(self.data.inputs[rows])
            loss(outputs, self.data.targets[rows]).backward()
            for each in self.model.parameters() if self.wrap == "fsdp" else ():
                if not each.dim() and each.grad is not None:
                    dist.all_reduce(each.grad)
                    each.grad /= count
            self.pruner.before_step(self.optimizer)
            self.optimizer.step()
            self.pruner.after_step()
            self.optimizer.zero_grad()
            self.shares.append(self.pruner.compaction.share)
        return self

    def found(self):
        return {name: full_tensor(value).clone() for name, value in self.model.state_dict().items()}

    def states(self):
        """Whole states of the optimizer, by the parameters' names."""
        state = self.optimizer.state
        return {
            f"{name}.{key}": full_tensor(value).clone()
            for name, each in self.model.named_parameters()
            for key, value in state.get(each, {}).items()
            if isinstance(value, torch.Tensor)
        }


def cases(rank, names):
    """What a run of two processes comes to, for each case."""
    return {each: of_case(rank, *each) for each in names}


def of_case(rank, model, wrap, optimizer):
    run = Run(model, wrap, optimizer).go(STEPS - 1, rank, 2)
    shards = [is_sharded(each) for each in run.model.parameters() if each.dim()]
    is_cut = run.pruner.compaction.cut is not None
    states = run.states()
    run.go(1, rank, 2)
    assert run.pruner.network is run.model
    assert not any(map(is_sharded, run.model.parameters()))
    params = l0prune.export(run.model).params
    return run.found(), states, run.shares, run.said, (any(shards), is_cut, params)


CASES = [
    (model, wrap, optimizer)
    for model in MODELS
    for wrap in WRAPS
    for optimizer in OPTIMIZERS
    if optimizer == "adamw" or model == "branched"
]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrapping")
    return in_processes(cases, CASES, folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_two_processes_that_are_cut_learn_what_one_does(both, case):
    one, other = (results[case] for results in both)
    model, wrap, optimizer = case
    alone = Run(model, None, optimizer).go(STEPS - 1)
    states = alone.states()
    alone.go(1)
    assert one[2] == other[2] == alone.shares
    assert min(alone.shares) < 0.6
    assert len(set(alone.shares)) > 1
    assert one[3] == []
    assert one[4] == (wrap == "fsdp", True, l0prune.export(alone.model).params)
    assert differing(one[0], other[0]) == []
    assert_close(one[0], alone.found(), rtol=1e-9, atol=1e-10)
    assert_close(one[1], states, rtol=1e-9, atol=1e-10)


@pytest.fixture
def group(tmp_path):
    """A group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrap", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_what_is_around_the_model_is_made_anew_after_a_cut(wrap):
    run = Run("mlp", wrap, steps=12)
    first = run.pruner.network
    before = [id(each) for each in run.model.parameters()]
    run.go(10)
    assert run.shares[-1] < run.shares[0] == 1
    if wrap == "ddp":
        assert run.pruner.network is not first
        assert [id(each) for each in run.model.parameters()] == before
        with pytest.raises(UsageError, match=r"before a cut: call pruner\.network"):
            first(run.data.inputs[:4])
    else:
        assert run.pruner.network is run.model
        with pytest.raises(UsageError, match=r"call pruner\.make_whole\(\) before states"):
            run.model.state_dict()
        with pytest.raises(UsageError, match=r"call pruner\.make_whole\(\) before states"):
            run.optimizer.state_dict()
    run.go(2)
    assert run.shares[-1] == 1
    assert run.pruner.network is run.model
    assert not any(map(is_sharded, run.model.parameters()))
    assert not any(text.startswith("compact:") for text in run.said)


@pytest.mark.slow
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("step", [5, 25, 35])
def test_a_run_goes_on_from_its_states(wrap, step):
    whole = Run("residual", wrap).go(step)
    whole.pruner.make_whole()
    parts = (whole.model, whole.pruner, whole.optimizer)
    kept = copy.deepcopy([part.state_dict() for part in parts])
    again = Run("residual", wrap)
    for part, state in zip((again.model, again.pruner, again.optimizer), kept, strict=True):
        part.load_state_dict(state)
    again.go(STEPS - step)
    whole.go(STEPS - step)
    assert_close(again.found(), whole.found(), rtol=1e-9, atol=1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("group")
def test_a_cut_run_in_ddp_goes_on_from_states_that_were_saved_while_it_was_cut():
    whole = Run("residual", "ddp").go(35)
    assert whole.pruner.compaction.cut is not None
    parts = (whole.model, whole.pruner, whole.optimizer)
    kept = copy.deepcopy([part.state_dict() for part in parts])
    again = Run("residual", "ddp")
    for part, state in zip((again.model, again.pruner, again.optimizer), kept, strict=True):
        part.load_state_dict(state)
    assert_close(again.go(5).found(), whole.go(5).found(), rtol=0, atol=0)


@pytest.mark.usefixtures("group")
def test_what_cannot_be_is_refused_in_a_sentence(monkeypatch):
    run = Run(wrap="ddp")
    run.model(run.data.inputs[:4]).sum().backward()
    with pytest.raises(UsageError, match=r"the loop calls pruner\.network\(inputs\)"):
        run.pruner.before_step(run.optimizer)
    with pytest.raises(UsageError, match="give Pruner the plain model"):
        l0prune.Pruner(ddp(mlp()), steps=10, lam=1.0, wrap=ddp)
    with pytest.raises(UsageError, match="leave out penalty, quantize and learn='gates'"):
        l0prune.Pruner(mlp(), steps=10, lam=1.0, quantize="int8", wrap=ddp)
    with pytest.raises(UsageError, match="wrap returned a NoneType"):
        _ = l0prune.Pruner(mlp(), steps=10, lam=1.0, wrap=lambda model: None).network
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    assert "Pruner(model, wrap=…)" in l0prune.Pruner(mlp(), steps=9, lam=1.0).compaction.hindrance()
