import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import DataError, L0pruneWarning, UsageError
from l0prune.features.unlabelled import repair
from l0prune.features.unlabelled.fidelity import divergence, fidelity
from l0prune.features.unlabelled.lockstep import Weights, forwards
from l0prune.selection import least_squares


def closed(model, axis, slots):
    """Close these slots of one axis, and no others."""
    gates = l0prune.gates(model)
    open_ = torch.ones(gates.plan.size, dtype=torch.bool)
    (found,) = (each for each in gates.plan.axes if each.name == axis)
    open_[found.start + torch.tensor(slots)] = False
    gates.set_open(open_)


class Twins(nn.Module):
    """A network whose second half of channels repeats the first: half of it says all."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 6, 3, bias=not norm)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
        with torch.no_grad():
            self.conv.weight[4:] = 2 * self.conv.weight[:4]
            self.conv.bias[4:] = 2 * self.conv.bias[:4]
            if norm:
                self.norm.running_mean.normal_()
                self.norm.running_var.uniform_(0.5, 2)
                self.norm.weight.uniform_(0.5, 2)
                self.norm.bias.normal_()

    def forward(self, x):
        return self.norm(self.head(torch.relu(self.conv(x))))


@pytest.mark.parametrize("norm", [True, False])
def test_what_repeats_is_given_back_exactly(norm):
    model, x = Twins(norm).eval(), torch.randn(64, 3, 8, 8)
    dense = copy.deepcopy(model)
    l0prune.gate(model, x[:2], include=["conv"])
    closed(model, "conv", [4, 5, 6, 7])
    found = l0prune.compensate(model, x)
    assert found.before.error > 0.04
    assert found.after.error < 1e-5
    assert list(found.layers) == ["head.weight"]
    assert not model.training
    torch.testing.assert_close(model(x), dense(x), atol=0.02, rtol=0)
    exported = l0prune.export(model)
    assert exported.widths["conv"] == (4, 8)
    torch.testing.assert_close(exported.module(x), model(x), atol=1e-4, rtol=1e-4)


class Called(nn.Module):
    """A network whose scores of classes, dim 1, are called logits and come last."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return SimpleNamespace(logits=self.network(x).mT)


@pytest.mark.parametrize("part", [20, 1 << 22])  # some places at a time, or all
@pytest.mark.parametrize("around", [nn.Identity, Called])
def test_agreement_and_divergence_are_over_classes(around, part, monkeypatch):
    monkeypatch.setattr("l0prune.features.unlabelled.fidelity._PART", part)
    one, other = nn.Conv1d(3, 4, 1), nn.Conv1d(3, 4, 1)
    x = torch.randn(8, 3, 6)
    wanted, found = one(x).mT, other(x).mT  # classes last
    if around is Called:
        one, other = Called(one), Called(other)
    agreed = fidelity(one, other, [x]).agreement
    assert agreed == (wanted.argmax(-1) == found.argmax(-1)).double().mean()
    logs = [each.log_softmax(-1) for each in (wanted, found)]
    expected = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean()
    with torch.no_grad():
        assert divergence(one(x), x)(other(x)) == pytest.approx(expected.item(), rel=1e-5)


def test_norms_know_their_statistics_afterwards():
    model, x = Twins(norm=True).eval(), torch.randn(64, 3, 8, 8)
    l0prune.gate(model, x[:2], include=["conv"])
    closed(model, "conv", [0, 1, 6, 7])
    l0prune.compensate(model, x)
    with torch.no_grad():
        seen = model.head(torch.relu(model.conv(x)))
        # One batch in five was left out of them.
        assert (model.norm.running_mean - seen.mean((0, 2, 3))).abs().max() < 0.1 * seen.std()
        torch.testing.assert_close(model.norm.running_var, seen.var((0, 2, 3)), rtol=0.2, atol=0)
        expected = model(x)
        l0prune.gates(model).fixed = True
        model.train()
        assert (model(x) - expected).square().mean() < 0.01 * expected.var()


def test_soft_gates_are_divided_out():
    model, x = Twins(norm=False).eval(), torch.randn(64, 3, 8, 8)
    dense = copy.deepcopy(model)
    l0prune.gate(model, x[:2], include=["conv"])
    closed(model, "conv", [4, 5])
    with torch.no_grad():
        l0prune.gates(model).log_alpha[:4] = 0.0  # z = 0.5
    assert l0prune.gates(model).z()[0] == pytest.approx(0.5)
    l0prune.compensate(model, x)
    torch.testing.assert_close(model(x), dense(x), atol=0.02, rtol=0)


def test_every_reader_of_a_transformer():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(96, 5, 16)
    l0prune.gate(model, x[:2], branches=False)
    l0prune.fit(model, "params=0.8", l0prune.score(model, "magnitude"))
    found = l0prune.compensate(model, x)
    assert found.after.error < 0.8 * found.before.error
    assert {name.rsplit(".", 1)[0].rsplit(".", 1)[-1] for name in found.layers} >= {
        "linear2", "out_proj"
    }  # fmt: skip
    assert torch.backends.mha.get_fastpath_enabled()
    l0prune.export(model)


def test_what_a_stream_lost_is_made_up_for_by_what_is_added_to_it():
    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out, self.beside = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 6)

        def forward(self, x):
            stream = self.out(self.into(x))
            return stream + self.beside(x)

    torch.manual_seed(0)
    model, x = Stream().eval(), torch.randn(300, 6)
    l0prune.gate(model, x[:2], include=["into"])
    closed(model, "into", [0, 1, 2, 3, 4])  # three slots cannot say what six inputs are
    found = l0prune.compensate(model, x)
    assert found.before.error > 0.1
    assert found.after.error < 1e-6
    assert set(found.layers) == {"out.weight", "beside.weight"}


def test_tied_weights_stay():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, 8)
            self.inner = nn.Linear(8, 12)
            self.back = nn.Linear(12, 8)

        def forward(self, ids):
            h = self.back(torch.relu(self.inner(self.table(ids))))
            return h @ self.table.weight.T

    torch.manual_seed(0)
    model, ids = Tied().eval(), torch.randint(0, 20, (80, 6))
    l0prune.gate(model, ids[:2], include=["inner"])
    closed(model, "inner", [0, 1, 2, 3])
    before = model.table.weight.detach().clone()
    found = l0prune.compensate(model, {"ids": ids})
    assert torch.equal(model.table.weight.detach(), before)
    assert set(found.layers) == {"back.weight"}
    assert found.after.error < found.before.error


def test_a_layer_used_twice_is_fitted_to_both_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(6, 10), nn.Linear(10, 6)

        def forward(self, x):
            x = self.out(torch.tanh(self.into(x)))
            return self.out(torch.tanh(self.into(x)))

    torch.manual_seed(0)
    model, x = Twice().eval(), torch.randn(200, 6)
    l0prune.gate(model, x[:2])
    closed(model, l0prune.gates(model).axes[0].name, [0, 5])
    found = l0prune.compensate(model, x)
    assert found.after.error < found.before.error


class Pyramid(nn.Module):
    """Convolutions on maps of two sizes; half of the channels that they read repeat the others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)
        with torch.no_grad():
            self.conv.weight[8:], self.conv.bias[8:] = self.conv.weight[:8], self.conv.bias[:8]

    def forward(self, x):
        maps = x, nn.functional.avg_pool2d(x, 4)
        return [self.head(torch.relu(self.conv(each))) for each in maps]


def test_a_layer_on_maps_of_unequal_sizes_is_fitted_to_all():
    # The small maps alone have fewer places than a patch has numbers.
    model, x = Pyramid().eval(), torch.randn(40, 3, 8, 8)
    dense = copy.deepcopy(model)
    l0prune.gate(model, x[:2], include=["conv"])
    closed(model, "conv", [*range(8, 16)])
    found = l0prune.compensate(model, x)
    assert found.before.error > 0.04
    assert found.after.error < 1e-5
    for mine, theirs in zip(model(x), dense(x), strict=True):
        torch.testing.assert_close(mine, theirs, atol=0.02, rtol=0)


@pytest.mark.parametrize("place", ["bias", "added"])
def test_parts_of_a_parameter_are_fitted_each_alone(place):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.both = nn.Linear(6, 8), nn.Linear(8, 5)
            with torch.no_grad():
                self.into.weight[4:], self.into.bias[4:] = (
                    self.into.weight[:4], self.into.bias[:4] + 1
                )  # fmt: skip

        def forward(self, x):
            x = self.into(x)
            (a, b), (c, d) = (each.split([2, 3]) for each in (self.both.weight, self.both.bias))
            if place == "bias":
                return nn.functional.linear(x, a, c), nn.functional.linear(2 - x, b, d)
            return x @ a.T + c, (2 - x) @ b.T + d

    torch.manual_seed(0)
    model, x = Packed().eval(), torch.randn(60, 5, 6)
    l0prune.gate(model, x[:2], include=["into"])
    closed(model, "into", [4, 5, 6, 7])
    found = l0prune.compensate(model, x)
    assert found.before.error > 0.04
    assert found.after.error < 1e-5
    assert set(found.layers) == {"both.weight"}


def test_a_tied_decoder_is_fitted_together_with_its_encoder():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.bias = nn.Linear(20, 12), nn.Parameter(torch.randn(20))

        def forward(self, x):
            return torch.relu(self.encoder(x)) @ self.encoder.weight + self.bias

    torch.manual_seed(0)
    model, x = Tied().eval(), torch.randn(400, 6) @ torch.randn(6, 20)
    l0prune.gate(model, x[:2])
    closed(model, "encoder", [0, 3, 6])
    found = l0prune.compensate(model, x)
    assert found.after.error < 0.7 * found.before.error
    assert set(found.layers) == {"encoder.weight"}
    l0prune.export(model)


def test_a_product_with_factors_is_computed_with_them():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 6)
            self.weight, self.bias = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(3))

        def forward(self, x):
            x = self.out(torch.tanh(self.into(x)))
            return torch.addmm(self.bias, x, self.weight, beta=0.5, alpha=3)

    torch.manual_seed(0)
    model, x = Scaled().eval(), torch.randn(600, 6)
    l0prune.gate(model, x[:2], include=["into"])
    closed(model, "into", [0, 1, 2])
    found = l0prune.compensate(model, x)
    assert found.after.error < found.before.error
    assert set(found.layers) == {"out.weight"}


def test_nothing_is_made_worse():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), torch.randn(64, 4)
    l0prune.gate(model, x[:2])
    before = copy.deepcopy(model.state_dict())
    found = l0prune.compensate(model, x)  # nothing is cut
    assert found.layers == {}
    assert found.before == found.after
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_bad_inputs_are_said():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    l0prune.gate(model, torch.zeros(2, 4))
    closed(model, l0prune.gates(model).axes[0].name, [0, 1, 2])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DataError, match="not finite"):
        l0prune.compensate(model, torch.full((64, 4), torch.nan))
    with pytest.raises(DataError, match="3 batches"):
        l0prune.compensate(model, torch.zeros(2, 4))
    with pytest.raises(DataError, match="fit together"):
        l0prune.compensate(model, torch.zeros(64, 5))
    with pytest.raises(UsageError, match="give data"):
        l0prune.fit(model, "macs=0.5", compensate=True)
    l0prune.compensate(model, torch.zeros(64, 4))  # a constant
    wide = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2)).eval()
    l0prune.gate(wide, torch.zeros(2, 4))
    closed(wide, l0prune.gates(wide).axes[0].name, [0])
    with pytest.warns(L0pruneWarning, match="fewer samples than inputs"):
        l0prune.compensate(wide, torch.randn(24, 4))
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert before.keys() == model.state_dict().keys()


@pytest.mark.parametrize("wide", [(8, 64), (64, 8)])
def test_a_wide_layer_is_repaired_in_single_precision_or_told(monkeypatch, wide):
    most_in_double, most = wide
    monkeypatch.setattr(least_squares, "_WIDE", most_in_double)
    monkeypatch.setattr(repair, "LARGEST", most)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3, bias=False)).eval()
    with torch.no_grad():
        model[0].weight[12:], model[0].bias[12:] = model[0].weight[:12], model[0].bias[:12]
    before, x = model[2].weight.clone(), torch.randn(600, 6)
    l0prune.gate(model, x[:2], include=["0"])
    closed(model, "0", list(range(12, 24)))
    if most > 12:
        assert l0prune.compensate(model, x).after.error < 1e-4
        return
    with pytest.warns(L0pruneWarning, match=r"2\.weight of 12: repairing them would take too much"):
        l0prune.compensate(model, x)
    assert torch.equal(model[2].weight[:, :12], before[:, :12])


@pytest.mark.filterwarnings("ignore:l0prune. (layers had fewer|outputs differ)")
def test_a_wide_layer_is_repaired_by_channel_in_double_precision(monkeypatch):
    monkeypatch.setattr(least_squares, "_WIDE", 16)  # 36 features of 4 channels
    model, x = Twins(norm=False).eval(), torch.randn(24, 3, 3, 3)
    l0prune.gate(model, x[:2], include=["conv"])
    closed(model, "conv", [4, 5, 6, 7])
    found = l0prune.compensate(model, x, batch_size=4)
    assert found.after.error < 1e-3 < found.before.error


def test_many_inputs_with_hardly_more_samples_are_told(monkeypatch):
    monkeypatch.setattr(repair, "_LARGEST_OF_FEW", 8)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2)).eval()
    l0prune.gate(model, torch.zeros(2, 4))
    closed(model, "0", [0])
    with pytest.warns(L0pruneWarning, match="90 for 63: weights could be repaired in part or not"):
        l0prune.compensate(model, torch.randn(120, 4), batch_size=24)


def test_ways_that_differ_are_refused():
    class Switching(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)

        def forward(self, x):
            h = torch.relu(self.first(x))
            return self.a(h) if torch.compiler.is_compiling() or x.mean() > 0 else self.b(h)

    model, x = Switching().eval(), torch.randn(64, 4)
    l0prune.gate(model, x[:2])
    closed(model, l0prune.gates(model).axes[0].name, [0])
    with pytest.raises(UsageError, match="other ways for other inputs"):
        l0prune.compensate(model, x)


def test_fit_divides_and_compensates():
    data = l0prune.load_data("digits")
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10)
    )
    l0prune.train_dense(model, data, epochs=10, lr=3e-3)
    model.eval()
    l0prune.gate(model, torch.zeros(2, 1, 8, 8), branches=False)
    other = copy.deepcopy(model)
    counts = l0prune.fit(model, "macs=0.4", data=data, compensate=True)
    l0prune.fit(other, "macs=0.4", l0prune.score(other, "fisher", data))
    assert counts["macs=0.4"] <= 0.4 * (64 * 48 + 48 * 32 + 320)
    ours, theirs = (l0prune.evaluate(each, data)["error"] for each in (model, other))
    assert ours < 0.8 * theirs


def test_padding_says_nothing():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.inner, self.out = nn.Embedding(20, 6), nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, ids, attention_mask):
            return self.out(torch.tanh(self.inner(self.table(ids))))

    torch.manual_seed(0)
    model = Words().eval()
    ids, mask = torch.randint(1, 20, (120, 8)), torch.ones(120, 8, dtype=torch.int64)
    mask[:, 5:] = 0
    l0prune.gate(model, (ids[:2], mask[:2]), include=["inner"])
    closed(model, "inner", [0, 1, 2])
    padded, other = copy.deepcopy(model), copy.deepcopy(model)
    found = l0prune.compensate(padded, {"ids": ids * mask, "attention_mask": mask})
    # Without padding at all it is the same.
    alone = {"ids": ids[:, :5], "attention_mask": mask[:, :5]}
    wanted = l0prune.compensate(other, alone)
    assert found.after.error == pytest.approx(wanted.after.error, rel=1e-4)
    torch.testing.assert_close(padded.out.weight, other.out.weight)


@pytest.mark.parametrize("size", [1, 3, 12])
def test_error_is_over_the_variance_of_all_examples(size, monkeypatch):
    monkeypatch.setattr("l0prune.features.unlabelled.fidelity._PART", 7)
    torch.manual_seed(0)
    dense, other, x = nn.Linear(4, 3), nn.Linear(4, 3), torch.randn(12, 4)
    with torch.no_grad():
        wanted, error = dense(x), (dense(x) - other(x)).square().mean(0).sum()
        expected = error / wanted.var(0, correction=0).sum()
    found = fidelity(dense, other, x.split(size)).error
    assert found == pytest.approx(float(expected), rel=1e-5)


class FromTheLeft(nn.Module):
    """A matrix that multiplies each example from the left, expanded along the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.head = nn.Parameter(torch.randn(12, 6)), nn.Linear(5, 3)
        self.back = nn.Parameter(torch.randn(7, 12))

    def forward(self, x):
        mix = self.mix.expand(len(x), -1, -1)
        return self.head(self.back @ torch.relu(mix @ x))


def test_a_matrix_that_is_expanded_along_the_batch_is_one_whatever_the_batch():
    model, x = FromTheLeft().eval(), torch.randn(300, 6, 5)
    with torch.no_grad():
        model.mix[6:] = model.mix[:6]
    dense = copy.deepcopy(model)
    l0prune.gate(model, x[:2], include=["*mix*"])
    closed(model, l0prune.gates(model).axes[0].name, [*range(6, 12)])
    found = l0prune.compensate(model, x, samples=300, batch_size=16)  # the last has 12
    assert found.before.error > 0.1
    assert found.after.error < 1e-9
    torch.testing.assert_close(model(x), dense(x), atol=1e-3, rtol=0)


def test_a_constant_that_a_matrix_from_the_left_adds():
    """What division moves into the outputs of a product without a bias."""
    model, x = FromTheLeft().eval(), torch.randn(500, 6, 5)
    with forwards(model, [x], Weights(model)) as (forward,):
        read = forward.advance()
        matrix = read.product.matrix(read.weight).clone()
        shift = torch.randn(1, 12)
        read.run_with(matrix, shift)
        torch.testing.assert_close(read.out, model.mix @ x + shift[0][:, None])
    small = l0prune.shrink(model, x, "macs=0.7", allow_worse_than_mean=True)
    assert small.macs < small.macs_before
