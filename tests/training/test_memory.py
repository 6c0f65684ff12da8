import copy

import pytest
import torch
from shared_runs import Block, Residual, residual
from small_task import differing, gated, network, tensors
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.training.wrappers import channels_last, checkpointed, repeated_blocks


def test_blocks_are_the_largest_repeated_parts():
    model = Residual()
    assert repeated_blocks(model) == list(model.blocks)
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert repeated_blocks(stages) == [*stages[0], *stages[1]]
    assert repeated_blocks(network()) == []  # single layers are no blocks


@pytest.mark.parametrize(
    ("name", "count"), [("resnet18", 8), ("vit_b_16", 12), ("mobilenet_v2", 19), ("vgg11", 0)]
)
def test_blocks_of_known_networks(name, count):
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None)
    assert len(repeated_blocks(model)) == count


def computed(model, x):
    torch.manual_seed(0)
    y = model(x)["scores"]
    y.square().sum().backward()
    slopes = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return y.detach(), slopes, tensors(model)


def test_computing_anew_changes_nothing_but_what_is_kept():
    model = l0prune.gate(Residual(norm=True), torch.zeros(2, 6))  # samples differ each time
    twin, x = copy.deepcopy(model), torch.randn(5, 6)
    expected = computed(twin, x)
    runs = []
    model.blocks[0].up.register_forward_hook(lambda *_: runs.append(1))
    with checkpointed(model):
        got = computed(model, x)
    assert len(runs) == 2
    assert torch.equal(got[0], expected[0])
    assert differing(got[1], expected[1]) == []
    assert differing(got[2], expected[2]) == []
    assert got[2]["blocks.0.norm.num_batches_tracked"] == 1
    assert "forward" not in model.blocks[0].__dict__


def test_without_gradients_nothing_is_computed_anew():
    model, runs = residual(), []
    model.blocks[0].up.register_forward_hook(lambda *_: runs.append(1))
    with checkpointed(model), torch.no_grad():
        model(torch.randn(5, 6).double())
    assert len(runs) == 1


def test_a_forward_of_the_users_own_is_there_again_afterwards():
    model = Residual()
    own = model.blocks[1].forward
    model.blocks[1].forward = own
    with checkpointed(model):
        assert model.blocks[1].forward is not own
    assert model.blocks[1].__dict__["forward"] is own


def test_a_model_without_blocks_is_told():
    with pytest.raises(UsageError, match="this model has none"), checkpointed(gated()):
        pass


def test_channels_last_is_a_layout_for_a_while():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    l0prune.gate(model, torch.zeros(2, 3, 4, 4))
    before, ids = tensors(model), [id(p) for p in model.parameters()]
    with channels_last(model):
        weight = model[0]._parameters["weight"]
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert model(torch.randn(2, 3, 4, 4)).shape == (2, 2)
    assert weight.is_contiguous()
    assert differing(before, tensors(model)) == []
    assert ids == [id(p) for p in model.parameters()]
