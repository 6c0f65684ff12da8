"""A gated model under all that users do to models (design promise: your model stays yours)."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from handmade import gated, lenet, lenet_plan, mlp, mlp_plan
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from l0prune.gating.attaching import gates_of
from l0prune.gating.kinds.binary_concrete import BinaryConcrete
from l0prune.gating.kinds.continuous_sparsification import ContinuousSparsification
from l0prune.gating.kinds.hard_concrete import HardConcrete
from l0prune.plan.layout import Gated, Slots
from l0prune.plan.plan import Axis, Plan, Site

CASES = {
    "mlp": (mlp, mlp_plan(), (5, 12)),
    "lenet": (lenet, lenet_plan(), (5, 1, 14, 14)),
}
KINDS = [HardConcrete(), ContinuousSparsification(), BinaryConcrete()]
kinds = pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
# torch.compile hides this warning of its own making from all but those who make warnings errors.
part_compiled = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
cases = pytest.mark.parametrize(("make", "plan", "shape"), CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def slopes(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def run(model: nn.Module, x: torch.Tensor, seed: int = 3):
    """Output and gradients of one training step under a seed."""
    model.zero_grad()
    torch.manual_seed(seed)
    y = model(x)
    y.float().square().sum().backward()
    return y.detach(), slopes(model)


def assert_same(ours, theirs, **tolerance):
    torch.testing.assert_close(ours[0], theirs[0], **tolerance)
    assert ours[1].keys() == theirs[1].keys()
    for name, slope in ours[1].items():
        torch.testing.assert_close(slope, theirs[1][name], **tolerance)


# By default each kind and each network once.
COMPILED = [
    pytest.param(
        *CASES[name], kind, id=f"{kind.name}-{name}",
        marks=[] if (name == "lenet") and (kind == HardConcrete()) else [pytest.mark.slow],
    )
    for name in CASES
    for kind in KINDS
]  # fmt: skip


@pytest.mark.parametrize(("make", "plan", "shape", "kind"), COMPILED)
@pytest.mark.slow
def test_compiled_as_a_whole_it_computes_and_learns_the_same(make, plan, shape, kind):
    model, x = gated(make(), plan, kind=kind), torch.randn(shape)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizers = [torch.optim.Adam(m.parameters(), 0.05) for m in (model, eager)]
    for step in range(5):
        for each in (model, eager):  # a gate that anneals is another one at every step
            gates_of(each).gate = kind.at(step / 5)
        y, _ = run(compiled, x, step)
        assert_same((y, slopes(model)), run(eager, x, step))
        for optimizer in optimizers:
            optimizer.step()
    # Torch 2.11 makes a graph of its own for each β of an annealed gate.
    if kind.at(0) == kind.at(1) or not torch.__version__.startswith("2.11."):
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            torch.testing.assert_close(compiled.eval()(x), eager.eval()(x))


@pytest.mark.slow
def test_a_compiled_forward_leaves_the_eager_parts_working():
    model = gated(mlp(), mlp_plan())
    torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(5, 12))
    model[2](torch.randn(5, 8)).sum().backward()
    assert gates_of(model).log_alpha.grad.abs().sum() > 0
    assert copy.deepcopy(model)(torch.randn(5, 12)).shape == (5, 3)


class Blocks(nn.Module):
    """Equal blocks, each a Linear gated at its columns, as in a transformer."""

    def __init__(self, count: int = 12, segments: str = "none"):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count))
        self.segments = segments

    def forward(self, x):
        for block in self.blocks:
            if self.segments == "none" or not torch.is_grad_enabled():
                x = block(x)
            else:
                reentrant = self.segments == "reentrant"
                x = checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=False)
        return x


def blocks_plan(count: int = 12):
    """One axis over the stream, met by all blocks, and one of each block's own on top of it."""
    axes = [Axis(f"a{i}", "neuron", 8, 8 * i, 1) for i in range(count + 1)]
    layouts = [Gated(Slots(0, 0, 8), Slots(i + 1, 0, 8)) for i in range(count)]
    sites = [Site(f"blocks.{i}.0.weight", 1, x, "read") for i, x in enumerate(layouts)]
    return Plan(tuple(axes), (), {}, tuple(sites), ())


@part_compiled
def test_equal_blocks_compiled_one_by_one_share_their_code():
    model = gated(Blocks(), blocks_plan())
    eager, x = copy.deepcopy(model), torch.randn(4, 8)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    assert_same(run(model, x), run(eager, x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@part_compiled
@pytest.mark.slow
def test_a_compiled_submodule_on_its_own_follows_the_gates():
    model = gated(mlp(), mlp_plan())
    layer, x = model[2], torch.randn(5, 8)
    compiled = torch.compile(layer, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), layer(x))
        with torch.no_grad():
            gates_of(model).log_alpha.add_(1.0)


@pytest.mark.parametrize("segments", ["reentrant", "non-reentrant"])
@kinds
def test_checkpointed_segments_see_the_same_sample(segments, kind):
    plain = gated(Blocks(segments="none"), blocks_plan(), kind=kind.at(0.3))
    twin = copy.deepcopy(plain)
    twin.segments = segments
    x = torch.randn(4, 8, requires_grad=True)  # reentrant checkpointing needs such an input
    assert_same(run(twin, x), run(plain, x), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("reentrant", [True, False])
@kinds
def test_a_checkpoint_around_the_whole_model_sees_the_same_sample(reentrant, kind):
    model = gated(mlp(), mlp_plan(), kind=kind.at(0.3))
    x = torch.randn(5, 12, requires_grad=True)
    wanted = run(model, x)
    model.zero_grad()
    torch.manual_seed(3)
    y = checkpoint(model, x, use_reentrant=reentrant)
    y.square().sum().backward()
    assert_same((y.detach(), slopes(model)), wanted)


@cases
def test_autocast_runs_the_layers_in_bfloat16_and_the_gates_in_float32(make, plan, shape):
    model, x = gated(make(), plan), torch.randn(shape)
    full = run(model, x)
    model.zero_grad()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        z = gates_of(model).current()
    assert y.dtype == torch.bfloat16
    assert z.dtype == torch.float32
    torch.manual_seed(3)
    model(x)
    assert torch.equal(gates_of(model).current(), z)
    y.float().square().sum().backward()
    assert gates_of(model).log_alpha.grad.dtype == torch.float32
    scale = full[0].abs().max()
    assert (y.float() - full[0]).abs().max() < 0.05 * scale


def test_an_average_of_parameters_averages_the_gates_too():
    model, x = gated(mlp(), mlp_plan()), torch.randn(5, 12)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    average.update_parameters(model)
    before = gates_of(model).log_alpha.detach().clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    average.update_parameters(model)
    torch.testing.assert_close(gates_of(average).log_alpha, before + 0.5)
    average.eval()
    assert torch.equal(gates_of(average).current(), gates_of(average).z())
    assert not torch.equal(average(x), model.eval()(x))


def test_a_gated_model_can_be_exported_by_torch_as_it_is():
    model, x = gated(lenet(), lenet_plan()).eval(), torch.randn(5, 1, 14, 14)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=False)
    more = torch.randn(3, 1, 14, 14)
    torch.testing.assert_close(program.module()(more), model(more))


def _replica(rank: int, port: int, shards: bool, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = gated(mlp(), mlp_plan())
    if shards:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    for step in range(2):
        torch.manual_seed(10 * step + rank)  # each replica draws its own gates
        optimizer.zero_grad()
        wrapped(torch.randn(4, 12)).square().sum().backward()
        optimizer.step()
    state = {
        name.removeprefix("module."): getattr(t, "full_tensor", lambda t=t: t)().detach().clone()
        for name, t in wrapped.state_dict().items()
    }
    results[rank] = {name: t.tolist() for name, t in state.items()}
    dist.destroy_process_group()


def by_hand():
    """The same two steps in one process: the mean of both replicas' gradients."""
    torch.manual_seed(0)
    model = gated(mlp(), mlp_plan())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            torch.manual_seed(10 * step + rank)
            (model(torch.randn(4, 12)).square().sum() / 2).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("shards", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_train_as_one_would(shards):
    if not dist.is_available():
        pytest.skip("torch was built without torch.distributed")
    port = 29500 + os.getpid() % 1000 + shards
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_replica, (port, shards, results), nprocs=2)
        states = [dict(results[rank]) for rank in range(2)]
    assert states[0] == states[1]
    for name, wanted in by_hand().items():
        torch.testing.assert_close(torch.tensor(states[0][name]), wanted, rtol=1e-5, atol=1e-6)
