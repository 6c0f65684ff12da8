"""What no look at a graph can mend is said where the model is given, in words that help."""

from dataclasses import dataclass

import pytest
import torch
from deadness import close_some, randomise
from models import small
from torch import nn

import l0prune
from l0prune.errors import CaptureError, L0pruneError, UsageError

X = torch.randn(3, 4)


class Aside(nn.Module):
    """Keeps a part of itself where nn.Module does not look."""

    def __init__(self, aside):
        super().__init__()
        self.aside, self.own = aside, nn.Linear(4, 4)

    def forward(self, x):
        return self.own(self.through(x))

    def through(self, x):
        return self.aside[0](x)


class Scaled(Aside):
    def through(self, x):
        return x * self.aside["scale"]


class Remembering(Aside):
    def through(self, x):
        return x


@pytest.mark.parametrize(
    "model",
    [Aside([small()]), Scaled({"scale": nn.Parameter(torch.ones(4))})],
    ids=["layers in a list", "a parameter in a dict"],
)
@pytest.mark.parametrize("look", [l0prune.survey, l0prune.gate])
def test_what_the_model_uses_and_does_not_own_is_named(model, look):
    with pytest.raises(UsageError, match=r"they are in inner\.aside,.*nn\.ModuleList"):
        look(Wrapped(model), X)


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_what_is_kept_aside_and_not_used_is_no_matter():
    l0prune.survey(Remembering([small()]), X)


@pytest.mark.slow
def test_a_module_compiled_by_torchscript_is_named():
    with pytest.warns((FutureWarning, DeprecationWarning)):  # torch's own, of torch.jit
        part, whole = map(torch.jit.script, (nn.ReLU(), small()))
    model = nn.Sequential(nn.Linear(4, 8), part, nn.Linear(8, 2))
    with pytest.raises(CaptureError, match=r"^1 is compiled by TorchScript"):
        l0prune.survey(model, X)
    with pytest.raises(L0pruneError, match="compiled by TorchScript: give the module"):
        l0prune.gate(whole, X)


def test_a_model_made_under_inference_mode_is_refused_in_these_words():
    with torch.inference_mode():
        model = small()
    with pytest.raises(UsageError, match=r"made under torch\.inference_mode.*build it outside"):
        l0prune.survey(model, X)


def test_packed_sequences_are_said_to_be_the_cause():
    class Packing(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 2)

        def forward(self, x):
            lengths = torch.tensor([5, 3])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            _, last = self.rnn(packed)
            return self.out(last[0])

    with pytest.raises(CaptureError, match=r"^The forward packs sequences"):
        l0prune.survey(Packing(), torch.randn(2, 5, 4))


@dataclass
class Answer:
    scores: torch.Tensor
    ratio: float = 0.5


class Answering(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, x):
        return Answer(self.inner(x))


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11 names no output")
@pytest.mark.slow
def test_a_dataclass_as_output_is_taken_whole_once_it_is_registered():
    model = randomise(Answering()).eval()
    in_parts = l0prune.survey(model, X)
    assert in_parts.plan.parts == ("inner",)
    assert "torch.export.register_dataclass(Answer) once" in in_parts.pins[0].reason
    torch.export.register_dataclass(Answer)
    small = l0prune.export(close_some(l0prune.gate(model.double(), X.double())))
    found, expected = small.module(X.double()), model(X.double())
    assert not small.pieces[0].path
    assert found.ratio == expected.ratio
    assert small.params < small.params_before
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-10, atol=1e-12)


class Rated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, rate=None, *, shift=0.0):
        return self.outer((self.inner(x) * rate).relu() + shift)


class Given(Rated):
    def forward(self, x, numbers):
        return super().forward(x, numbers["rate"])


@pytest.mark.parametrize("look", [l0prune.survey, l0prune.gate])
@pytest.mark.parametrize("wrong", [lambda x, names: (x, names), lambda _, names: names])
def test_inputs_by_name_inside_of_the_tuple_are_told_where_they_go(look, wrong):
    names = {"rate": torch.rand(3, 1), "shift": torch.ones(3, 1)}
    with pytest.raises(CaptureError) as caught:
        look(Rated(), wrong(X, names))
    assert "a dict of rate, shift, which forward() takes by name" in str(caught.value)
    assert "(model, (x,), {'name': value})" in str(caught.value)
    assert "Usual causes" not in str(caught.value)
    look(Rated(), (X,), names)


def test_a_dict_that_a_forward_takes_as_one_input_stays_one():
    plan = l0prune.survey(Given(), (X, {"rate": torch.rand(3, 1)})).plan
    assert sorted(axis.size for axis in plan.axes) == [4, 8]
    with pytest.raises(CaptureError, match="Usual causes"):
        l0prune.survey(Given(), (X, {"size": torch.rand(3, 1)}))
