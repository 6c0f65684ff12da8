"""Operators without ONNX translation, and writes in place, are replaced without a second trace."""

import random

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from l0prune.capture.compat import replacing_operators
from l0prune.exporting.onnx.file import Session, to_onnx
from l0prune.exporting.onnx.replacing import replaced_alone
from l0prune.infer.nodes import is_assertion, is_writer


def replaced(model, example, **shapes):
    """Return a program, its replacement and what is translated, as the exporter asks for it."""
    program = export(model.eval(), (example,), strict=False, **shapes)
    asked = []

    def look(given, translated, table):
        asked.append((replaced_alone(given, translated, table), translated))

    with replacing_operators(look):
        torch.onnx.export(program, dynamo=True, verbose=False, optimize=False)
    ((found, translated),) = asked
    return program, found, translated


def check(model, example, *others, **shapes):
    program, found, translated = replaced(model, example, **shapes)
    assert found is not None
    calls = [node for node in found.graph.nodes if node.op == "call_function"]
    assert not any(map(is_writer, calls))
    operators = [each for each in calls if hasattr(each.target, "_schema")]
    assert all(each.target in translated or is_assertion(each) for each in operators)
    before = str(program.graph)
    session = Session(to_onnx(program).SerializeToString())
    assert str(program.graph) == before
    for x in (example, *others):
        expected = model(x.clone())
        torch.testing.assert_close(found.module(check_guards=False)(x.clone()), expected)
        torch.testing.assert_close(session([x])[0], expected, rtol=1e-5, atol=1e-5)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.function(x * self.scale)


VIEWS = {
    "select": lambda x, draw: x.select(draw.randrange(1, x.dim()), 1),
    "slice": lambda x, draw: x.narrow(draw.randrange(1, x.dim()), 1, 2),
    "strided": lambda x, draw: x[:, ::2],
    "transpose": lambda x, draw: x.transpose(1, draw.randrange(1, x.dim())),
    "permute": lambda x, draw: x.permute(0, *draw.sample(range(1, x.dim()), x.dim() - 1)),
    "unsqueeze": lambda x, draw: x.unsqueeze(draw.choice([1, -1])),
    "same": lambda x, draw: x.contiguous() if x.is_contiguous() else x,
}
WRITES = {
    "add": lambda x, by: x.add_(by.mean()),
    "multiply": lambda x, by: x.mul_(1.25),
    "copy": lambda x, by: x.copy_(torch.ones_like(x) * by.mean()),
    "copy of one": lambda x, by: x.copy_(by.mean()),
    "fill": lambda x, by: x.fill_(0.5),
    "clear": lambda x, by: x.zero_(),
    "activation": lambda x, by: x.relu_(),
    "masked": lambda x, by: x.masked_fill_(x > 1, 2.0),
}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.one_in(8)
def test_random_writes_through_views_give_what_they_gave(seed):
    def function(x):
        draw = random.Random(seed)
        y, seen = x + 0, [x]
        values = [y]
        for _ in range(6):
            each = draw.choice(values)
            for _ in range(draw.randrange(3)):
                deep = [name for name in VIEWS if each.dim() > 2 or name in ("unsqueeze", "same")]
                wide = each.dim() > 2 and min(each.shape[1:]) > 2
                names = deep if wide else ["unsqueeze", "same"]
                each = VIEWS[draw.choice(names)](each, draw) if each.dim() < 5 else each
                values.append(each)
            by = draw.choice(values)
            values.append(WRITES[draw.choice([*WRITES])](each, by.cos()))
            seen.append(draw.choice(values).sum() + x.flatten(1).sum())
        return torch.stack([each.mean() for each in seen]), y, values[-1].flatten(1)

    torch.manual_seed(seed)
    model, (x, more) = Function(function), (torch.randn(3, 4, 6), torch.randn(3, 4, 6))
    _, found, _ = replaced(model, x)
    assert found is not None
    assert not any(map(is_writer, found.graph.nodes))
    for each in (x, more):
        for expected, mine in zip(model(each), found.module(check_guards=False)(each), strict=True):
            torch.testing.assert_close(mine, expected)


def steps(x):
    """Rows that are made one after another of those before, as linear attention does."""
    y = x.clone()
    for n in range(1, 4):
        row = y[..., n, :n].clone()
        y[..., n, :n] = row + (row.unsqueeze(-1) * y[..., :n, :n]).sum(-2)
    return y


def windows(x):
    mask = x.new_zeros((4, 6))
    for number, part in enumerate((slice(0, 2), slice(2, None))):
        mask[part, :3] = number
    mask = mask.view(2, 2, 2, 3).permute(0, 2, 1, 3).reshape(4, 6)
    return x + mask


@pytest.mark.parametrize(
    "function",
    [
        steps,
        windows,
        lambda x: nn.functional.adaptive_avg_pool2d(x.relu_().flatten(1).unflatten(1, (4, 6)), 1),
        lambda x: nn.functional.dropout(x, 0.5, training=False).mul_(2) + x,
        lambda x: x.T.contiguous().add_(1).T + x if x.dim() == 2 else x.to(torch.float64).float(),
        lambda x: (x.split(2, 1)[0] + 1).relu_() + torch.eye(6)[:2],
    ],
)  # fmt: skip
@pytest.mark.one_in(3)
def test_parts_of_networks(function):
    batch = ({0: Dim("batch", min=1)},)
    check(Function(function), torch.randn(2, 4, 6), torch.randn(5, 4, 6), dynamic_shapes=batch)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.norm.running_mean.uniform_(-1, 1)

    def forward(self, input):  # a name that Python has, too
        x = self.norm(self.layer(input))
        return nn.functional.hardswish(x, inplace=True)


@pytest.mark.slow
def test_several_results_and_names_that_python_has():
    batch = ({0: Dim("batch", min=1)},)
    _, found, _ = replaced(Normed(), torch.randn(2, 3, 8, 8), dynamic_shapes=batch)
    assert [spec.arg.name for spec in found.graph_signature.input_specs] == [
        node.name for node in found.graph.find_nodes(op="placeholder")
    ]
    check(Normed(), torch.randn(2, 3, 8, 8), torch.randn(1, 3, 8, 8), dynamic_shapes=batch)


class Writing(nn.Module):
    def forward(self, x):
        return x.relu_() + 1


class Choosing(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


class OfParts(nn.Module):
    def forward(self, x):
        y = x * 2
        y.unfold(1, 2, 2).mul_(3)
        return y


@pytest.mark.parametrize("kind", [Writing, Choosing, OfParts])
def test_what_is_not_known_is_left_to_torch(kind):
    assert replaced(kind(), torch.randn(3, 4))[1] is None
