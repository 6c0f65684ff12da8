"""Parts of a model, and the user's own code around them: what it reads, writes and calls."""

import copy

import pytest
import torch
from deadness import close_some, randomise
from differences import onnx_difference, run_onnx, tensors
from models import Broken, small
from torch import nn

import l0prune
from l0prune.errors import CertificateError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Two(Broken):
    """Two parts, and what is done between them."""

    def __init__(self, first=None, between=None):
        super().__init__()
        self.a, self.b = first or small(), small()
        self.between = between

    def layers(self):
        yield self.a
        if self.between:
            yield lambda x: self.between(self, x)
        yield self.b


class Writing(nn.Module):
    """It writes into what it is given."""

    def __init__(self):
        super().__init__()
        self.net = small()

    def forward(self, x):
        return self.net(x.mul_(2))


class Fixed(nn.Module):
    """Its own class cannot be right after a cut: it computes with a size."""

    kind = "fixed"

    def __init__(self):
        super().__init__()
        self.net = small()
        self.out_channels = 4
        self.net[2].weight.requires_grad_(False)

    def forward(self, x):
        h = torch.relu(self.net[0](x))
        return self.net[2](h / h.shape[-1])


def gated(model, **options):
    return close_some(l0prune.gate(randomise(model).eval(), X.clone(), **options))


def cut(model, **options):
    """The export of the model, gated and half closed."""
    model = gated(model, **options)
    small = l0prune.export(model)
    torch.testing.assert_close(model(X.clone()), small.module(X.clone()), rtol=1e-4, atol=1e-5)
    return small


@pytest.mark.parametrize(
    "read",
    [
        lambda self, x: x * self.a[0].weight.shape[0],
        lambda self, x: x * self.a[0].out_features,
        lambda self, x: x @ self.a[2].weight @ self.a[2].weight.T,
        lambda self, x: x + self.a[0](x)[:, :4],
        lambda self, x: x * len(self.a[0].bias),
    ],
    ids=["shape", "attribute", "weight", "call", "length"],
)
@pytest.mark.one_in(5)
def test_what_the_code_between_the_parts_reads_stays(read):
    dense = cut(Two(between=read))
    assert set(dense.widths) == {"b.0"}
    pins = [pin.reason for pin in l0prune.survey(Two(between=read), X).pins]
    assert any(reason.startswith("the code around the part reads a.") for reason in pins)


@pytest.mark.slow
def test_a_look_at_the_dtype_or_at_the_part_itself_keeps_nothing_whole():
    def cast(self, x):
        return x.to(self.a[0].weight.dtype).to(next(self.parameters()).device) * len(self.a)

    dense = cut(Two(between=cast))
    assert set(dense.widths) == {"a.0", "b.0"}


def test_a_survey_that_watches_leaves_the_model_alone():
    model = Two(between=lambda self, x: x * self.a[0].out_features)
    before = {name: (type(m), dict(vars(m))) for name, m in model.named_modules()}
    l0prune.survey(model, X)
    for name, module in model.named_modules():
        kind, attributes = before[name]
        assert type(module) is kind
        assert vars(module).keys() == attributes.keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.slow
def test_where_a_reader_escapes_notice_the_error_says_what_to_do():
    class Late(Two):
        """It reads on other inputs than the example."""

        def forward(self, x):
            is_example = torch.equal(x.float(), X)
            return super().forward(x if is_example else x * self.a[0].out_features)

    with pytest.raises(CertificateError, match=r"(?s)code around them may read.*exclude='a\.\*'"):
        l0prune.export(gated(Late()))
    small = l0prune.export(gated(Late(), exclude="a.*"))
    assert set(small.widths) == {"b.0"}
    assert small.module.a[0].out_features == 8


@pytest.mark.slow
def test_a_part_may_write_into_its_input(tmp_path):
    dense = cut(Two(Writing()))
    dense.save_onnx(tmp_path / "model.onnx")
    model = gated(Writing())
    x = X.clone()
    l0prune.export(model).save_onnx(tmp_path / "whole.onnx")
    torch.testing.assert_close(x, X)


@pytest.mark.slow
def test_a_part_under_two_names_is_one_part():
    class Twice(Two):
        def __init__(self):
            super().__init__(Fixed())
            self.again = self.a

        def layers(self):
            return [self.a, self.again, self.b]

    dense = cut(Twice())
    assert set(dense.widths) == {"a.net.0", "b.0"}
    assert "a is the captured graph" in dense.note
    assert dense.module.a is dense.module.again
    assert dense.params == sum(p.numel() for p in dense.module.parameters())


@pytest.mark.slow
def test_attributes_of_a_part_that_became_a_graph_are_still_there():
    def read(self, x):
        return x * self.a.out_channels if self.a.kind == "fixed" else x

    dense = cut(Two(Fixed(), read))
    assert "a is the captured graph" in dense.note
    assert copy.deepcopy(dense.module).a.out_channels == 4


@pytest.mark.slow
def test_so_are_those_of_the_modules_in_it():
    class Deep(Fixed):
        def __init__(self):
            super().__init__()
            self.net[0].mode = "a"
            self.drop = nn.Dropout(0.5)

    def read(self, x):
        return x * self.a.drop.p if self.a.net[0].mode == "a" else x

    dense = cut(Two(Deep(), read))
    assert "a is the captured graph" in dense.note
    twin = copy.deepcopy(copy.deepcopy(dense.module))
    assert torch.equal(twin(X), dense.module(X))


@pytest.mark.slow
def test_a_graph_remembers_what_was_frozen():
    dense = cut(Two(Fixed()))
    frozen = [name for name, p in dense.module.named_parameters() if not p.requires_grad]
    assert frozen == ["a.net.2.weight"]
    dense = cut(Fixed())
    assert not dense.rebuilt
    frozen = [name for name, p in dense.module.named_parameters() if not p.requires_grad]
    assert frozen == ["net.2.weight"]


class Mixed(nn.Module):
    """Numbers and None among what it takes and returns."""

    def __init__(self):
        super().__init__()
        self.net = small()

    def forward(self, x, scale=1.0, mask=None, shifts=(), twice=False):
        y = self.net(x) * scale
        y = y if mask is None else y * mask
        y = sum(shifts, y * 2 if twice else y)
        return {"y": y, "count": 3, "none": None, "all": [y * 2, x.shape[0]]}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"scale": 2.0, "mask": None}, marks=pytest.mark.slow),
        {"scale": 0.5, "mask": torch.tensor([1.0, 2.0, 0.0, 1.0]), "twice": True},
        pytest.param({"shifts": (torch.ones(4), None, 1)[::2]}, marks=pytest.mark.slow),
    ],
    ids=["none", "scalar", "mask", "tuple"],
)
@pytest.mark.slow
def test_numbers_among_inputs_and_outputs(options, tmp_path):
    class Mixing(Two):
        def layers(self):
            return [lambda x: self.a(x, **options)["all"][0], self.b]

    model = Mixing(Mixed())
    dense = cut(model)
    assert set(dense.widths) == {"a.net.0", "b.0"}
    dense.save_onnx(tmp_path / "parts.onnx")
    written = run_onnx(tmp_path / "parts.a.onnx", *tensors((X, options)))
    torch.testing.assert_close(written, tensors(model.a(X, **options)), rtol=1e-4, atol=1e-5)

    whole = close_some(l0prune.gate(randomise(Mixed()).eval(), (X,), options))
    dense = l0prune.export(whole)
    dense.save_onnx(tmp_path / "whole.onnx")
    assert onnx_difference(whole, dense, tmp_path / "whole.onnx", X, options) <= 1e-5


def test_a_size_that_is_returned_as_a_number_is_compared():
    class Telling(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small()

        def forward(self, x):
            return self.net(x), self.net[0].out_features

    dense = l0prune.export(gated(Telling()))
    assert not dense.rebuilt
    assert dense.module(X)[1] == 8
