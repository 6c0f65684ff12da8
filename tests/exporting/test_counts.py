"""What a result says of its size is what the module and the files hold and multiply."""

from __future__ import annotations

import dataclasses
import math
import random

import onnx
import pytest
import torch
from deadness import close_some
from networks import Fn
from random_networks import Author
from safetensors.torch import load_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import l0prune
from l0prune.errors import NothingToPrune
from l0prune.exporting.certify.answers import answers_of


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def macs(module, x):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x)
    return counter.get_total_flops() / 2 / len(x)


class Mixer(nn.Module):
    """A layer, and a sum beside it that only parameters of its own make."""

    def __init__(self, size, out):
        super().__init__()
        self.layer, self.numbers = nn.Linear(size, out), nn.Parameter(torch.randn(out, size, 3))

    def forward(self, x):
        bent = torch.stack([x.sin(), x.cos(), x.tanh()], -1)
        return self.layer(x) + torch.einsum("big,oig->bo", bent, self.numbers)


def build():
    torch.manual_seed(0)
    return nn.Sequential(Mixer(5, 8), nn.ReLU(), Mixer(8, 3)).eval()


class Attends(nn.Module):
    """Attention in one operator, which torch's counter does not know on a CPU, as a part."""

    def __init__(self):
        super().__init__()
        self.mixed, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        heads = self.mixed(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_what_the_gated_network_takes_is_counted_on_a_run_that_is_made_anyway(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(Attends(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    x = torch.randn(2, 5, 8)
    l0prune.gate(model, x)
    close_some(model)
    for again in ("surveyed", "run_counted"):  # a capture, a forward
        monkeypatch.delattr(f"l0prune.exporting.write.{again}")
    small = l0prune.export(model)
    products = 2 * 2 * 5 * 5 * 4  # heads, queries by keys and mixed values, of 4 numbers
    assert small.macs_before == 5 * (8 * 24 + 8 * 8 + 8 * 6 + 6 * 2) + products


class Decides(nn.Module):
    """A condition on the input: of its branches only the second one runs here."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = self.first(x)
        return self.last(torch.cond(h.sum() > 1e6, lambda y: y * 3, lambda y: y.relu(), (h,)))


def test_counting_leaves_a_condition_as_it_is():
    torch.manual_seed(0)
    model, x = Decides().eval(), torch.randn(2, 4)
    (answer,) = answers_of(model, [((x,), {})])
    expected = model.last(model.first(x).relu()).detach()
    torch.testing.assert_close(answer.single[0], expected)
    torch.testing.assert_close(answer.exact[0].float(), expected)
    assert answer.macs == 4 * 6 + 6 * 2


def without_branches(model, x):
    l0prune.gate(model, x)
    gates = l0prune.gates(model)
    open_ = torch.ones(gates.plan.size, dtype=torch.bool)
    for axis in gates.axes:
        if axis.kind == "branch":
            open_[axis.slice] = False
    gates.set_open(open_)
    return l0prune.export(model)


def test_parameters_of_closed_branches_are_in_no_file_and_learn_no_more(tmp_path):
    model, x = build(), torch.randn(4, 5)
    dense = without_branches(model, x)
    assert dense.gone == ("0", "2")
    assert dense.rebuilt
    assert dense.params == parameters(dense.module) == 5 * 8 + 8 + 8 * 3 + 3
    assert dense.macs == macs(dense.module, x) == 5 * 8 + 8 * 3
    assert "0.numbers" not in dense.module.state_dict()
    (file,) = dense.save_onnx(tmp_path / "m.onnx")
    held = onnx.load(file).graph.initializer
    assert sum(math.prod(each.dims) for each in held) == dense.params
    (program,) = dense.save(tmp_path / "m.pt2")
    assert parameters(torch.export.load(program).module()) == dense.params
    for name in ("m.safetensors", "m.pt"):
        dense.save(tmp_path / name)
    assert sum(t.numel() for t in load_file(tmp_path / "m.safetensors").values()) == dense.params
    state = torch.load(tmp_path / "m.pt")["state_dict"]
    assert sum(tensor.numel() for tensor in state.values()) == dense.params
    dense.save_pretrained(tmp_path / "folder", code=True)
    for source in ("m.pt", "m.safetensors", "folder"):
        again = l0prune.resize(build(), tmp_path / source)
        torch.testing.assert_close(again(x), model(x))
        assert parameters(again) == dense.params
    code = {}
    exec((tmp_path / "folder" / "l0prune_model.py").read_text(), code)
    torch.testing.assert_close(code["resize"](build(), tmp_path / "folder")(x), model(x))


def test_a_graph_has_nothing_of_a_closed_branch_in_its_files(tmp_path):
    net = Fn(lambda m, x: m.last(torch.relu(m.first(x)) + x @ m.side))
    net.first, net.last = nn.Linear(6, 6), nn.Linear(6, 2)
    net.side = nn.Parameter(torch.randn(6, 6))
    dense = without_branches(net.eval(), torch.randn(3, 6))
    assert dense.gone
    assert not dense.rebuilt
    assert dense.params == parameters(dense.module) == 6 * 6 + 6 + 6 * 2 + 2
    (file,) = dense.save(tmp_path / "m.safetensors")
    assert sum(tensor.numel() for tensor in load_file(file).values()) == dense.params


@pytest.mark.parametrize("layer", ["first", "last"])
@pytest.mark.one_in(2)
def test_no_number_of_a_plan_is_believed(layer):
    torch.manual_seed(0)
    net = Fn(lambda m, x: m.last(torch.relu(m.first(x))))
    net.first, net.last = nn.Linear(6, 8), nn.Linear(8, 2)
    l0prune.gate(net.eval(), torch.randn(3, 6), include="first")
    bank = close_some(net) and l0prune.gates(net)
    right = l0prune.export(net)
    costs = tuple(
        dataclasses.replace(cost, scale=cost.scale / 2) if cost.owner == layer else cost
        for cost in bank.plan.costs
    )
    bank.plan = dataclasses.replace(bank.plan, costs=costs)
    wrong = l0prune.export(net)
    assert (wrong.macs, wrong.macs_before) == (right.macs, right.macs_before)
    assert (wrong.params, wrong.params_before) == (right.params, right.params_before)
    assert wrong.macs == macs(wrong.module, torch.randn(3, 6))
    assert wrong.widths == right.widths


def test_parameters_that_eval_mode_does_not_use_are_said():
    net = Fn(lambda m, x: m.b(torch.relu(m.a(x))) if not m.training else m.aux(x))
    net.a, net.b, net.aux = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(4, 5)
    l0prune.gate(net.eval(), torch.randn(2, 4))
    small = l0prune.export(close_some(net))
    assert parameters(small.module) - small.params == 4 * 5 + 5
    assert "25 are in the module and not counted" in small.note


@pytest.mark.parametrize("seed", [1, 2, 3, 4, pytest.param(range(5, 60), marks=pytest.mark.slow)])
@pytest.mark.one_in(2)
def test_counts_of_random_networks_are_those_of_their_modules(seed):
    for each in seed if isinstance(seed, range) else [seed]:
        torch.manual_seed(each)
        author = Author(random.Random(each).randrange)
        net, x = author.write(5), author.values[0]
        before = macs(net, x)
        try:
            l0prune.gate(net, x)
        except NothingToPrune:
            continue
        gates = l0prune.gates(net)
        gates.set_open(torch.rand(gates.plan.size) < 0.6)
        small = l0prune.export(net)
        own = dict(small.module.named_parameters())  # a graph has none that it does not read
        unused = sum(own[name].numel() for name in small._unused if name in own)
        assert parameters(small.module) == small.params + unused
        if small.macs_before == before:  # torch counts all of its operators
            assert small.macs == macs(small.module, x)
