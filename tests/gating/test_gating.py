import copy

import pytest
import torch
import torchvision
from handmade import folded, lenet, mlp
from torch import nn

import l0prune
from l0prune.errors import (
    AlreadyGated,
    CaptureError,
    L0pruneError,
    NotGated,
    NothingToPrune,
    UsageError,
)
from l0prune.gating.gate import gate, gates, ungate


class Attention(nn.Module):
    """Token embedding, an attention layer of torch's own, a gated feed-forward, a tied head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.up = nn.Linear(16, 24)
        self.down = nn.Parameter(torch.randn(12, 16) / 4)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        signal, sluice = self.up(x).chunk(2, dim=-1)
        return self.head(x + (signal * sluice.sigmoid()) @ self.down)


def resnet():
    return torchvision.models.ResNet(
        torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5
    )


def mobilenet():
    stages = [[1, 8, 1, 1], [4, 16, 2, 2]]  # expansion, channels, repeats, stride
    return torchvision.models.MobileNetV2(5, 0.5, stages)


def vit():
    model = torchvision.models.VisionTransformer(16, 8, 2, 2, 16, 24, num_classes=5)
    nn.init.normal_(model.heads.head.weight)
    return model


MODELS = {
    "mlp": (mlp, lambda: torch.randn(3, 12)),
    "lenet": (lenet, lambda: torch.randn(3, 1, 14, 14)),
    "attention": (Attention, lambda: torch.randint(0, 11, (3, 6))),
    "resnet": (resnet, lambda: torch.randn(3, 3, 32, 32)),
    "mobilenet": (mobilenet, lambda: torch.randn(3, 3, 32, 32)),
    "vit": (vit, lambda: torch.randn(3, 3, 16, 16)),
}
_surveys: dict[str, l0prune.Survey] = {}


def surveyed(make, example) -> l0prune.Survey:
    """The survey of a model, made once for all tests."""
    if make.__name__ not in _surveys:
        _surveys[make.__name__] = l0prune.survey(make(), (example(),), own_class=False)
    return _surveys[make.__name__]


models = pytest.mark.parametrize(("make", "example"), MODELS.values(), ids=MODELS)


def close_half(model: nn.Module) -> None:
    """Gates all over the range: about half of them closed, some between 0 and 1."""
    with torch.no_grad():
        gates(model).log_alpha.normal_(-2.4, 2.0)


@models
@pytest.mark.one_in(6)
def test_a_freshly_gated_model_computes_exactly_what_it_did(make, example):
    model, x = make().eval(), example()
    with torch.no_grad():
        wanted = model(x)
        assert gate(model, (x,), survey=surveyed(make, example)) is model
        assert torch.equal(model(x), wanted)
    assert (gates(model).open_probability() > 0.98).all()


@models
@pytest.mark.one_in(3)
def test_gates_multiply_what_the_plan_says_and_nothing_else(make, example):
    model = make().double().eval()
    x = example()
    x = x.double() if x.is_floating_point() else x
    plain = copy.deepcopy(model)
    gate(model, (x,), survey=surveyed(make, example))
    close_half(model)
    bank = gates(model)
    assert bank.log_alpha.dtype == torch.float64
    assert 0.2 < bank.open().double().mean() < 0.8
    wanted = folded(plain, bank.plan, bank.z())(x)
    torch.testing.assert_close(model(x), wanted, rtol=1e-10, atol=1e-12)


@models
@pytest.mark.one_in(2)
def test_every_axis_learns_in_train_mode(make, example):
    model, x = make().train(), example()
    gate(model, (x,), survey=surveyed(make, example))
    bank = gates(model)
    with torch.no_grad():
        bank.log_alpha.normal_()
    idle = {axis.name: axis.slice for axis in bank.axes}
    for _ in range(12):  # a gate alone, as a switch is, may be drawn as 0 or 1 some times
        bank.log_alpha.grad = None
        model(torch.cat([x, x])).float().square().sum().backward()
        idle = {name: at for name, at in idle.items() if not bank.log_alpha.grad[at].any()}
        if not idle:
            break
    assert idle == {}


@models
@pytest.mark.one_in(3)
def test_ungate_gives_back_the_model_that_came_in(make, example):
    model, x = make().eval(), example()
    before = {name: type(m) for name, m in model.named_modules()}
    state, wanted = copy.deepcopy(model.state_dict()), model(x)
    gate(model, (x,), survey=surveyed(make, example))
    close_half(model)
    assert not torch.equal(model(x), wanted)
    assert ungate(model) is model
    assert {name: type(m) for name, m in model.named_modules()} == before
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert torch.equal(model(x), wanted)
    with pytest.raises(NotGated):
        gates(model)


def test_modes_frozen_parameters_and_ties_stay():
    model = Attention().train()
    model.attention.eval()
    model.up.requires_grad_(False)
    modes = [m.training for m in model.modules()]
    frozen = {name: p.requires_grad for name, p in model.named_parameters()}
    gate(model, (torch.randint(0, 11, (2, 6)),))
    assert [m.training for m in model.modules()] == [*modes, True]
    after = {name: p.requires_grad for name, p in model.named_parameters()}
    assert after == {**frozen, "l0prune_gates.log_alpha": True}
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]


def test_the_start_is_seeded_and_leaves_the_global_generator_alone():
    x = torch.randn(2, 12)
    state = torch.get_rng_state()
    starts = [gates(gate(mlp(), (x,), seed=seed)).log_alpha for seed in (0, 0, 1)]
    torch.set_rng_state(state)
    first = torch.rand(3)
    torch.set_rng_state(state)
    model = mlp()
    torch.set_rng_state(state)
    gate(model, (x,))
    assert torch.equal(torch.rand(3), first)
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    kind = l0prune.HardConcrete()
    noise = starts[0] - kind.initial(0.99)
    assert 0.005 < noise.std() < 0.02
    plain = gates(gate(mlp(), (x,), jitter=0, open_probability=0.7)).open_probability()
    torch.testing.assert_close(plain, torch.full_like(plain, 0.7))


def test_open_probability_by_glob_and_the_choice_of_gate_and_axes():
    x = torch.randn(2, 1, 14, 14)
    names = [a.name for a in l0prune.survey(lenet(), (x,)).axes]
    kind = l0prune.HardConcrete(beta=0.5, estimator="median")
    model = gate(
        lenet(),
        (x,),
        gate=kind,
        jitter=0,
        exclude=[names[0]],
        open_probability={names[1]: 0.5, "*": 0.8},
    )
    bank = gates(model)
    assert bank.gate == kind
    assert list(bank.plan.names) == names[1:]
    for axis in bank.axes:
        p = bank.open_probability()[axis.slice]
        torch.testing.assert_close(p, torch.full_like(p, 0.5 if axis.name == names[1] else 0.8))
    only = gates(gate(lenet(), (x,), include=names[0]))
    assert list(only.plan.names) == names[:1]
    rest = gates(gate(lenet(), (x,), jitter=0, open_probability={names[1]: 0.5}))
    assert rest.open_probability()[rest.axes[0].slice].min() > 0.98


def test_a_survey_can_be_reused_and_a_lone_tensor_given_bare():
    x = torch.randn(2, 12)
    found = l0prune.survey(mlp(), (x,))
    reused, bare = gate(mlp(), (x,), survey=found), gate(mlp(), x)
    assert gates(reused).plan == gates(bare).plan == found.plan
    other = lenet()
    with pytest.raises(UsageError, match="another model"):
        gate(other, (torch.randn(2, 1, 14, 14),), survey=found)
    assert not hasattr(other, "l0prune_gates")


def test_the_example_is_kept_as_a_copy():
    x = torch.randn(3, 12)
    kept = gates(gate(mlp(), (x,))).example
    assert torch.equal(kept[0][0], x)
    x.zero_()
    assert kept[0][0].abs().sum() > 0
    assert kept[1] == {}


def test_a_model_without_storage_can_be_gated_and_then_loaded():
    source = gate(mlp(), (torch.randn(2, 12),)).eval()
    close_half(source)
    with torch.device("meta"):
        model, x = mlp(), torch.randn(2, 12)
    gate(model, (x,)).eval()
    model.to_empty(device="cpu").load_state_dict(source.state_dict())
    x = torch.randn(5, 12)
    assert torch.equal(model(x), source(x))


def test_keyword_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x, *, shift):
            return self.b((self.a(x) + shift).relu())

    model, x, shift = Two(), torch.randn(2, 4), torch.randn(2, 1)
    wanted = model(x, shift=shift)
    gate(model, (x,), {"shift": shift}).eval()
    assert torch.equal(model(x, shift=shift), wanted)
    assert torch.equal(gates(model).example[1]["shift"], shift)


def test_low_precision_models_have_float32_gates():
    x = torch.randn(2, 12, dtype=torch.bfloat16)
    model = gate(mlp().bfloat16(), (x,))
    assert gates(model).log_alpha.dtype == torch.float32
    assert model(x).dtype == torch.bfloat16


def test_gating_twice_is_refused_before_any_work():
    model = gate(mlp(), (torch.randn(2, 12),))
    with pytest.raises(AlreadyGated):
        gate(model, ("not even an example",))


class Unwilling(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.b(self.a(x)) if x.sum().item() > 0 else self.a(x)


@pytest.mark.parametrize(
    ("make", "options", "error", "words"),
    [
        (lambda: nn.Sequential(nn.Softmax(1)), {}, NothingToPrune, "nothing"),
        (mlp, {"include": ["conv*"]}, UsageError, "include is given for 'conv.*no axis"),
        (mlp, {"exclude": ["0.inn"]}, UsageError, "exclude is given for '0.inn'.*mean '0.in'"),
        (mlp, {"exclude": ["*"]}, NothingToPrune, "no axis is left"),
        (mlp, {"open_probability": {"conv*": 0.5}}, UsageError, "conv"),
        (mlp, {"open_probability": 1.0}, UsageError, "strictly between"),
        (mlp, {"jitter": -1}, UsageError, "jitter"),
        (mlp, {"gate": "binary-concrete"}, UsageError, "must be a gate.*'binary-concrete'"),
        (mlp, {"gate": l0prune.BinaryConcrete}, UsageError, "must be a gate"),
        (Unwilling, {}, CaptureError, "could not follow"),
    ],
)
def test_what_cannot_be_gated_is_left_as_it_was(make, options, error, words):
    model = make()
    before = [(name, type(m), m.training, sorted(vars(m))) for name, m in model.named_modules()]
    features = 4 if make is Unwilling else 12
    with pytest.raises(error, match=words) as caught:
        gate(model, (torch.randn(2, features),), **options)
    assert isinstance(caught.value, L0pruneError)
    after = [(name, type(m), m.training, sorted(vars(m))) for name, m in model.named_modules()]
    assert after == before


def test_an_example_that_is_no_tensor_is_named():
    with pytest.raises(UsageError, match=r"no tensor with a batch dimension \(ndarray was given\)"):
        gate(mlp(), (torch.randn(2, 12).numpy(),))


NO_MODULES = {
    "a function": (lambda: lambda x: x, "This is a function"),
    "a graph": (
        lambda: torch.export.export(nn.Linear(3, 2), (torch.randn(2, 3),)).module(),
        "give the module that was exported",
    ),
    "lazy": (lambda: nn.LazyLinear(2), "call it once"),
}


@pytest.mark.parametrize("look", [l0prune.survey, gate])
@pytest.mark.parametrize("name", NO_MODULES)
def test_what_cannot_be_looked_into_is_refused(name, look):
    make, why = NO_MODULES[name]
    with pytest.raises(UsageError, match=why):
        look(make(), torch.randn(2, 3))


def test_a_model_gated_without_values_is_exported_once_it_has_them():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    gate(model, torch.empty(2, 6, device="meta")).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter.data)
    assert l0prune.export(model).certificate.checks
