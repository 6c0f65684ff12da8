"""What a network keeps for its next call is in its files, or they are refused by its name."""

from __future__ import annotations

import json

import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import CertificateError, UsageError


class Delayed(nn.Module):
    """A block with an echo of its last call, and a count of calls that nothing depends on."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(5, 8), nn.Linear(8, 3)
        self.register_buffer("echo", torch.full((8,), 0.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        h = self.inner(x).relu()
        y = self.out(h + self.echo)
        self.echo.mul_(0.5).add_(h.mean(0), alpha=0.5)
        self.calls += 1
        return {"y": y, "level": h.mean(1)}


class Around(nn.Module):
    """The state lies in a submodule, and an input is given by name."""

    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(5, 5), Delayed()

    def forward(self, x, *, scale):
        return self.block(self.first(x * scale).tanh())["y"]


class Aside(nn.Module):
    """The last values are in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.inner, self.out, self.last = nn.Linear(5, 8), nn.Linear(8, 3), None

    def forward(self, x):
        h = self.inner(x).relu()
        last, self.last = self.last, h.mean(0)
        return self.out(h if last is None else h + last)


class Counting(nn.Module):
    """Counts its calls in a buffer, and keeps a table: none of it is in its answers."""

    def __init__(self):
        super().__init__()
        self.inner, self.out, self.table = nn.Linear(5, 8), nn.Linear(8, 3), None
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(8) / 8
        self.calls += 1
        return self.out(self.inner(x).relu() + self.table)


def smaller(model, args, kwargs=None):
    """An export with every other slot of the first axis closed."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    l0prune.gate(model.eval(), args, kwargs)
    gates = l0prune.gates(model)
    first = next(a for a in gates.plan.axes if a.kind == "neuron" and a.size == 8)
    gates.set_open(torch.ones(gates.plan.size, dtype=torch.bool))
    gates.set_open(first.name, range(0, 8, 2))
    return l0prune.export(model)


def frames(number, rows=3):
    return [torch.randn(rows, 5) for _ in range(number)]


def fed(path, inputs, state):
    """Outputs without state of one call after another."""
    session = ort.InferenceSession(path)
    names = [each.name for each in session.get_inputs()]
    results = []
    for given in inputs:
        values = [each.numpy() for each in (*given, *state)]
        found = session.run(None, dict(zip(names, values, strict=True)))
        count = len(found) - len(state)
        results.append([torch.tensor(each) for each in found[:count]])
        state = [torch.tensor(each) for each in found[count:]]
    return names, [each.name for each in session.get_outputs()], results


def test_a_buffer_becomes_an_input_and_an_output(tmp_path):
    model, x = Delayed(), torch.randn(2, 5)
    small = smaller(model, (x,))
    assert small.rebuilt
    assert small.module.echo.shape == (4,)
    assert "echo" in small.note
    assert "calls" not in small.note
    path = tmp_path / "a.onnx"
    small.save_onnx(path)
    assert small.certificate.worst("onnx", "float32") < 1e-5
    stream, start = frames(4), small.module.echo.clone()
    names, made, found = fed(path, [(x,) for x in stream], [start])
    assert names == ["x", "echo"]
    assert made == ["y", "level", "echo_out"]
    for x, (y, level) in zip(stream, found, strict=True):
        expected = model(x)
        torch.testing.assert_close(y, expected["y"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(level, expected["level"], rtol=1e-5, atol=1e-5)
    facts = {each.key: each.value for each in onnx.load(path).metadata_props}
    assert json.loads(facts["l0prune.state"]) == ["echo"]


@pytest.mark.slow
def test_the_program_keeps_it_by_itself(tmp_path):
    model, x = Delayed(), torch.randn(2, 5)
    small = smaller(model, (x,))
    small.save(tmp_path / "a.pt2")
    assert small.certificate.worst("program", "float64") < 1e-10
    program = torch.export.load(tmp_path / "a.pt2").module()
    for x in frames(3):
        torch.testing.assert_close(program(x)["y"], model(x)["y"], rtol=1e-5, atol=1e-5)


def test_state_of_a_submodule_and_an_input_by_name(tmp_path):
    model, scale = Around(), torch.tensor(0.7)
    small = smaller(model, (torch.randn(2, 5),), {"scale": scale})
    path = tmp_path / "a.onnx"
    small.save_onnx(path)
    stream, start = frames(3), small.module.block.echo.clone()
    names, made, found = fed(path, [(x, scale) for x in stream], [start])
    assert names == ["x", "scale", "block.echo"]
    assert made == ["output", "block.echo_out"]
    for x, (y,) in zip(stream, found, strict=True):
        torch.testing.assert_close(y, model(x, scale=scale), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["a.pte", "a.tflite"])
def test_programs_for_phones_are_refused_by_its_name(tmp_path, name):
    small = smaller(Delayed(), (torch.randn(2, 5),))
    with pytest.raises(CertificateError, match="changes echo,"):
        small.save(tmp_path / name)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("options", [{"int8": torch.randn(8, 5)}, {"dtype": "float16"}])
def test_files_of_fewer_bits_are_refused_by_its_name(tmp_path, options):
    small = smaller(Delayed(), (torch.randn(2, 5),))
    with pytest.raises(UsageError, match="keeps echo from one call"):
        small.save_onnx(tmp_path / "a.onnx", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.onnx", "a.pt2", "a.pte"])
def test_a_plain_attribute_that_the_next_call_reads_is_refused_by_its_name(tmp_path, name):
    small = smaller(Aside(), (torch.randn(2, 5),))
    assert "it keeps last, which is no buffer" in small.note
    save = small.save_onnx if name.endswith("onnx") else small.save
    with pytest.raises(CertificateError, match="it keeps last, which is no buffer"):
        save(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_no_answer_needs_is_no_state(tmp_path):
    model = Counting()
    small = smaller(model, (torch.randn(2, 5),))
    assert "keeps" not in small.note
    small.save_onnx(tmp_path / "a.onnx")
    ((x,), *_) = stream = [(each,) for each in frames(2)]
    names, _, found = fed(tmp_path / "a.onnx", stream, [])
    assert names == ["x"]
    torch.testing.assert_close(found[0][0], model(x), rtol=1e-5, atol=1e-5)


def test_a_survey_names_it():
    survey = l0prune.survey(Delayed().eval(), (torch.randn(2, 5),), own_class=False)
    assert survey.state == ("echo",)
    assert "keeps echo from one call to the next" in str(survey).replace("\n", " ")
    assert l0prune.survey(Counting().eval(), (torch.randn(2, 5),), own_class=False).state == ()
