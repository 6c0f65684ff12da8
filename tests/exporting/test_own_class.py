"""The user's own class at the new sizes: which attributes follow, and what is said if it fails."""

import sys

import pytest
import torch
from deadness import close_some, randomise
from differences import ROUNDED, difference, onnx_difference
from torch import nn

import l0prune
from l0prune.errors import CertificateError
from l0prune.exporting.own_class.comparison import Expected


class Attention(nn.Module):
    """Sizes that the forward reads from attributes, as most attention is written."""

    def __init__(self, dim=12, num_heads=3, scale=True):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.attn_dim = self.num_heads * self.head_dim
        self.scale = self.head_dim**-0.5 if scale else None
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = nn.functional.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.proj(x.transpose(1, 2).reshape(batch, length, self.attn_dim))


def exported(model, *args, exclude=("*.in",)):
    torch.manual_seed(0)
    model = randomise(model).eval()
    close_some(l0prune.gate(model, args, exclude=exclude), seed=1)
    return model, l0prune.export(model)


@pytest.mark.slow
def test_heads_and_head_dims_that_attributes_repeat():
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    model, dense = exported(Attention().double(), x)
    assert type(dense.module) is Attention
    kept = {name: width[0] for name, width in dense.widths.items()}
    assert dense.module.num_heads == kept["qkv.heads"] < 3
    assert dense.module.head_dim == kept["qkv.head_dim"] < 4
    assert dense.module.attn_dim == dense.module.num_heads * dense.module.head_dim
    assert dense.module.proj.in_features == dense.module.attn_dim
    assert difference(model, dense, x) <= 1e-12


class ScaledByKey(Attention):
    """Has the size of a head twice: once to reshape to, once for the scale."""

    def __init__(self):
        super().__init__()
        self.dim_key = self.head_dim
        self.shift = nn.Parameter(torch.randn(self.num_heads, self.head_dim))

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q + self.shift[:, None]) @ k.transpose(-2, -1) / self.dim_key**0.5
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_size_that_only_scales_stays_what_it_was():
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    model, dense = exported(ScaledByKey().double(), x)
    assert type(dense.module) is ScaledByKey
    assert dense.module.dim_key == 4 > dense.module.head_dim
    assert difference(model, dense, x) <= 1e-12


def test_queries_make_up_for_a_scale_that_follows_the_head():
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    model, dense = exported(Attention(scale=False).double(), x)
    (kept,) = [width[0] for name, width in dense.widths.items() if "head_dim" in name]
    assert type(dense.module) is Attention
    assert dense.module.head_dim == kept < 4
    assert difference(model, dense, x) <= 1e-12


@pytest.mark.slow
def test_a_layer_of_which_single_inputs_are_cut_picks_those_that_stay():
    model, dense = exported(Attention(), x := torch.randn(2, 5, 12), exclude=())
    qkv = dense.module.qkv
    assert dense.rebuilt
    assert isinstance(qkv, nn.Linear)
    assert qkv.in_features == len(qkv.kept) == dense.widths["qkv.in"][0] < 12
    (axis,) = [axis for axis in l0prune.gates(model).axes if axis.name == "qkv.in"]
    assert torch.equal(qkv.kept, axis.open.cpu().nonzero().flatten())
    assert difference(model, dense, x) <= ROUNDED


class Halves(nn.Module):
    """Its code has half of a number that it remembers."""

    def __init__(self):
        super().__init__()
        self.width = 16
        self.a, self.b, self.c = nn.Linear(5, 16), nn.Linear(8, 8), nn.Linear(16, 3)

    def forward(self, x):
        kept, mixed = self.a(x).split(self.width // 2, -1)
        return self.c(torch.cat([kept, self.b(mixed.relu())], -1))


class AlsoARatio(Halves):
    def __init__(self):
        super().__init__()
        self.reduction_ratio = 16


@pytest.mark.parametrize("make", [Halves, AlsoARatio])
@pytest.mark.one_in(2)
def test_a_number_of_which_the_code_takes_a_part(make):
    """Of numbers of one value that which is called like a size."""
    model, dense = exported(make().double(), x := torch.randn(4, 5).double())
    assert dense.rebuilt, dense.note
    assert dense.module.width == dense.module.a.out_features < 16
    assert getattr(dense.module, "reduction_ratio", 16) == 16
    assert difference(model, dense, x) <= 1e-12


def test_the_module_goes_on_training():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    model[0].weight.requires_grad_(False)
    _, dense = exported(model, torch.randn(2, 3, 6, 6), exclude=())
    assert isinstance(dense.module, nn.Sequential)
    assert [p.requires_grad for p in dense.module.parameters()][:2] == [False, True]
    dense.module.train()(torch.randn(4, 3, 6, 6)).sum().backward()
    assert dense.module[3].weight.grad.shape[1] == dense.module[0].out_channels < 8


@pytest.mark.slow
def test_what_the_own_class_is_shown_to_compute_needs_no_capture(monkeypatch, tmp_path):
    """Only a program does."""

    def captured(*_, **__):
        raise AssertionError

    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1)
    with monkeypatch.context() as patch:
        for name in ("capture_parts", "write"):
            patch.setattr(sys.modules[f"l0prune.exporting.{name}"], "surveyed", captured)
        model, dense = exported(nn.Sequential(*layers), x := torch.randn(2, 3, 6, 6), exclude=())
    assert dense.params < dense.params_before
    assert difference(model, dense, x) <= ROUNDED
    kinds = {(check.what, check.batch) for check in dense.certificate.checks}
    assert kinds == {("class", size) for size in (1, 2, 3)}
    dense.save_onnx(tmp_path / "model.onnx")
    assert onnx_difference(model, dense, tmp_path / "model.onnx", x) <= 1e-5


def test_a_program_is_compared_with_the_class_before_it_is_handed_out():
    _, dense = exported(Attention(), torch.randn(2, 5, 12))
    state = dense._made.pieces[0].program.state_dict
    state["proj.bias"] = nn.Parameter(state["proj.bias"] + 1)  # as if it were another model's
    with pytest.raises(CertificateError, match="program in float64"):
        _ = dense.program


def test_what_only_training_uses_is_named():
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 3)
            self.aux = nn.Linear(9, 3)

        def forward(self, x):
            x = torch.relu(self.first(x))
            return (self.last(x), self.aux(x)) if self.training else self.last(x)

    _, dense = exported(Auxiliary(), torch.randn(2, 6), exclude=["*.in"])
    assert sum(p.numel() for p in dense.program.parameters()) == dense.params
    assert dense.note.startswith("aux: not used in eval mode, and therefore not cut.")
    assert dense.params == sum(
        p.numel() for name, p in dense.module.named_parameters() if not name.startswith("aux")
    )


@pytest.mark.parametrize("name", ["width", "hidden_size"])
def test_a_number_that_only_looks_like_a_size_does_no_harm(name):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            setattr(self, name, 8)
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(torch.relu(self.first(x))) * getattr(self, name)

    _, dense = exported(Odd(), torch.randn(2, 6))
    assert dense.rebuilt == (type(dense.module) is Odd)
    assert dense.rebuilt
    assert getattr(dense.module, name) == 8


def test_a_size_is_only_guessed_at_where_it_has_to_be():
    class Context(nn.Module):
        """As long a context as its hidden layer is wide: 8 by chance."""

        def __init__(self):
            super().__init__()
            self.context_size = 8
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(torch.relu(self.first(x[:, -self.context_size :])))

    model, dense = exported(Context(), torch.randn(2, 5, 6))
    assert dense.rebuilt
    longer = torch.randn(2, 12, 6)
    torch.testing.assert_close(dense.module(longer), model(longer), rtol=1e-4, atol=1e-5)


def test_a_constant_that_is_cut_keeps_the_models_dtype(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
            self.scale = torch.rand(8) + 0.5

        def forward(self, x):
            return self.last(torch.relu(self.first(x)) * self.scale)

    x = torch.randn(2, 6)
    model, dense = exported(Scaled(), x)
    assert dense.rebuilt
    torch.testing.assert_close(dense.module(x), model(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dense.program.module()(x), model(x), rtol=1e-5, atol=1e-6)
    dense.save_onnx(tmp_path / "model.onnx")


class Training(nn.Module):
    """A size that shows in training mode only."""

    def __init__(self, size):
        super().__init__()
        self.hidden_size = self.first_size = 8
        self.size = size
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.last(x.view(-1, self.size(self)) if self.training else x)


def remembered(module):
    return module.hidden_size


def written(module):
    return 8


@pytest.mark.slow
def test_a_size_that_only_training_reads_is_found():
    _, dense = exported(Training(remembered), torch.randn(2, 6))
    assert dense.rebuilt
    assert dense.note == ""
    assert dense.module.hidden_size == dense.module.first.out_features < 8
    dense.module.train()(torch.randn(2, 6)).sum().backward()


def test_a_class_that_no_longer_trains_says_so():
    _, dense = exported(Training(written), torch.randn(2, 6))
    assert dense.rebuilt
    assert dense.note.startswith("The module is not to be trained on: its forward does not allow")
    assert dense._manifest["rebuild"]["training"] in dense.note
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        dense.module.train()(torch.randn(2, 6))


class Auxiliary(nn.Module):
    """In training mode it also returns a mean over what is cut."""

    def __init__(self, rate):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(rate)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        y = self.last(self.drop(x))
        return (y, x.pow(2).mean()) if self.training else (y, y)


class Keeping(nn.Module):
    """It keeps a mean over what is cut, for a loss beside its output."""

    def __init__(self, where):
        super().__init__()
        self.first, self.last, self.where = nn.Linear(6, 8), nn.Linear(8, 3), where
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        x = torch.relu(self.first(x))
        if self.training and self.where == "mean":
            self.mean = 0.9 * self.mean + x.detach().mean()
        elif self.training:
            self.kept = [self.last(x).mean(), x.mean()]
        return self.last(x)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Auxiliary(0.0), "it computes something else there"),
        (Auxiliary(0.5), "it computes something else there"),
        (Keeping("mean"), "mean becomes something else there"),
        (Keeping("kept[1]"), "kept[1] becomes something else there"),
    ],
)
@pytest.mark.one_in(2)
def test_a_class_that_gives_or_keeps_something_else_in_training_says_so(model, said):
    _, dense = exported(model, torch.randn(4, 6))
    assert dense.rebuilt
    assert said in dense.note


class Dropping(nn.Module):
    """So few numbers that two seeds often drop the same of them."""

    def __init__(self, drop):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(4, 6), nn.Linear(6, 3), drop

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.first(x))))


class Shaken(nn.Module):
    """Noise that is as wide as what it is added to."""

    def forward(self, x):
        return x + 0.1 * torch.randn_like(x) if self.training else x


class Layerdrop(nn.Module):
    """One number that decides, as in speech models: it is the same in both."""

    def forward(self, x):
        return x * 2 if self.training and torch.rand([]) < 0.9 else x


@pytest.mark.parametrize(
    "drop", [nn.Dropout(0.05), nn.AlphaDropout(0.05), nn.RReLU(), Shaken(), Layerdrop()]
)
@pytest.mark.one_in(6)
def test_what_is_drawn_in_training_is_no_reason_not_to_train(drop):
    _, dense = exported(Dropping(drop), torch.randn(1, 4))
    assert dense.rebuilt
    assert dense.note == ""


def test_a_dropout_that_drops_what_is_closed_anyway_is_no_fault():
    torch.manual_seed(0)
    x = torch.rand(1, 4) + 0.1
    model = l0prune.gate(Dropping(nn.Dropout(0.1)).eval(), x, exclude="*.in")
    nn.init.uniform_(model.first.weight)  # so that every slot has something to drop
    with torch.no_grad():
        l0prune.gates(model).log_alpha[[0, 3, 5]] = -9
    module = l0prune.export(model).module
    for rate in torch.linspace(0.02, 0.6, 20):
        model.drop.p = module.drop.p = float(rate)
        before = Expected.by(model, ((x,), {}))
        assert before.of is not None
        assert before.fault_of(module) == ""


def test_of_the_guesses_only_those_that_are_needed_stay():
    _, dense = exported(Training(remembered), torch.randn(2, 8, 6))
    assert dense.module.first_size == 8  # as large as the input, for all that is known
    assert dense._manifest["attributes"][""] == {"hidden_size": dense.module.hidden_size}
    assert "not known which size they stand for: first_size = 8." in dense.note


class Body(nn.Module):
    """Keeps sizes that its forward does not read, for whoever puts another head on it."""

    def __init__(self, inner=16, outer=16, kernel=3):
        super().__init__()
        self.out_width, self.inner_width, self.kernel, self.channels = outer, inner, kernel, 3
        self.first = nn.Conv2d(3, inner, kernel)
        self.rest = nn.Sequential(nn.ReLU(), nn.Conv2d(inner, outer, kernel))

    def forward(self, x):
        return self.rest(self.first(x))


class WithHead(nn.Module):
    """As image models are: the last layer is made anew for other classes."""

    def __init__(self, inner=16, outer=16):
        super().__init__()
        self.body, self.width, self.classes = Body(inner, outer), outer, 5
        self.side = inner
        self.head = nn.Linear(outer, self.classes)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


@pytest.mark.slow
def test_sizes_that_no_forward_reads_are_told():
    _, dense = exported(WithHead(inner=24), torch.randn(2, 3, 8, 8), exclude=())
    module = dense.module
    assert module.width == module.head.in_features == dense.widths["body.rest.1"][0] < 16
    assert module.body.out_width == module.width
    assert module.side == module.body.inner_width == dense.widths["body.first"][0] < 24
    assert (module.body.kernel, module.body.channels, module.classes) == (3, 3, 5)
    assert dense.note == ""
    module.head = nn.Linear(module.width, 7)
    assert module(torch.randn(2, 3, 8, 8)).shape == (2, 7)


@pytest.mark.slow
def test_sizes_of_two_meanings_are_left_and_named():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.width = 16
            self.a, self.b, self.c = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, x):
            return self.c(self.b(self.a(x).relu()).relu())

    _, dense = exported(Two(), torch.randn(2, 5))
    assert dense.widths["a"][0] != dense.widths["b"][0]
    assert dense.module.width == 16
    assert dense.note.endswith("not known which size they stand for: width = 16.")


def test_a_number_that_other_modules_of_the_class_have_for_no_size_is_left():
    class Wide(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.repeats, self.layer = 8, nn.Linear(inputs, outputs)

        def forward(self, x):
            return self.layer(x).relu()

    model = nn.Sequential(Wide(6, 8), Wide(8, 12), Wide(12, 10), nn.Linear(10, 3))
    _, dense = exported(model, torch.randn(2, 6))
    assert dense.module[0].repeats == 8


def test_an_instance_norm_without_statistics_follows_its_weight():
    """torch compares the size of its input with ``num_features``, and refuses another."""
    norm = nn.InstanceNorm2d(8, affine=True)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 2, 1)).double()
    _, dense = exported(model, torch.randn(2, 3, 6, 6, dtype=torch.float64), exclude=())
    assert dense.rebuilt
    assert dense.module[1].num_features == dense.module[0].out_channels < 8


class TwoOfOneSize(nn.Module):
    """Two attributes of one value, each of which is the size of something else."""

    def __init__(self):
        super().__init__()
        self.state_size, self.head_size, self.chunk_size = 6, 6, 6
        self.a, self.b = nn.Linear(5, 12), nn.Linear(5, 12)
        self.c, self.d = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        heads = self.a(x).view(-1, 2, self.head_size).tanh().sum(1)
        states = self.b(x).view(-1, 2, self.state_size).tanh().sum(1)
        return self.c(heads) * self.d(states) * self.chunk_size


def test_attributes_of_one_value_are_told_apart():
    torch.manual_seed(0)
    x = torch.randn(4, 5)
    model = l0prune.gate(TwoOfOneSize().eval(), x)
    bank, left = l0prune.gates(model), {"a": 4, "b": 4}
    is_open = torch.ones(bank.plan.size, dtype=torch.bool)
    for axis in bank.plan.axes:
        if axis.size == 6:
            is_open[axis.slice][left[axis.name[0]] :] = False
    bank.set_open(is_open)
    small = l0prune.export(model)
    assert type(small.module) is TwoOfOneSize
    sizes = small.module.head_size, small.module.state_size, small.module.chunk_size
    assert sizes == (4, 4, 6)  # with one number in the code for both, they are alike
    torch.testing.assert_close(small.module(x), model(x))
