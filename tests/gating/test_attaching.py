import copy
import io
from dataclasses import replace

import pytest
import torch
from handmade import bank, folded, gated, lenet, lenet_plan, mlp, mlp_plan
from models import Tied
from torch import nn
from torch.func import functional_call

from l0prune.errors import AlreadyGated, NotGated, UsageError
from l0prune.gating.attaching import attach, bypass, detach, gates_of
from l0prune.plan.layout import Const, Prod, Slots
from l0prune.plan.plan import Axis, Plan, Site

CASES = {
    "mlp": (mlp, mlp_plan(), (5, 12)),
    "lenet": (lenet, lenet_plan(), (5, 1, 14, 14)),
}
cases = pytest.mark.parametrize(("make", "plan", "shape"), CASES.values(), ids=CASES)


def one_axis(size: int, *sites: Site) -> Plan:
    return Plan((Axis("a", "neuron", size, 0, 1),), (), {}, sites, ())


def photograph(model: nn.Module):
    """All that gating might change, by identity where that matters."""
    return [
        (name, type(m), m.training, sorted(vars(m)), [*m._modules], dict(m._parameters), hooks(m))
        for name, m in model.named_modules()
    ]


def hooks(module: nn.Module) -> list[int]:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
    return [len(getattr(module, kind)) for kind in kinds]


@cases
def test_eval_mode_computes_with_the_folded_parameters(make, plan, shape):
    model = make().double()
    plain = copy.deepcopy(model)
    gated(model, plan).eval()
    x = torch.randn(shape, dtype=torch.float64)
    wanted = folded(plain, plan, gates_of(model).z())(x)
    torch.testing.assert_close(model(x), wanted, rtol=1e-12, atol=1e-12)


@cases
def test_training_has_the_gradients_of_the_formula(make, plan, shape):
    model = make().double()
    plain = copy.deepcopy(model)
    gates = gates_of(gated(model, plan))
    x = torch.randn(shape, dtype=torch.float64)
    torch.manual_seed(5)
    y = model(x)
    y.square().sum().backward()

    torch.manual_seed(5)
    epsilon = torch.finfo(torch.float64).eps
    u = torch.empty(plan.size, dtype=torch.float64).uniform_(epsilon, 1 - epsilon)
    log_alpha = gates.log_alpha.detach().requires_grad_()
    s = torch.sigmoid((u.log() - (1 - u).log() + log_alpha) * 1.5)
    z = (s * 1.2 - 0.1).clamp(0, 1)
    parameters = dict(plain.named_parameters())
    effective = dict(parameters)
    for site in plan.sites:
        side = [1] * parameters[site.tensor].dim()
        side[site.dim] = -1
        effective[site.tensor] = effective[site.tensor] * plan.spread(site.layout, z).view(side)
    wanted = functional_call(plain, effective, x)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    slopes = torch.autograd.grad(wanted.square().sum(), [log_alpha, *parameters.values()])
    for ours, theirs in zip([gates.log_alpha, *model.parameters()], slopes, strict=False):
        torch.testing.assert_close(ours.grad, theirs, rtol=1e-9, atol=1e-10)


@cases
def test_the_original_tensors_keep_their_names_and_identity(make, plan, shape):
    model = make()
    before = dict(model.named_parameters())
    gated(model, plan)
    after = dict(model.named_parameters())
    assert list(model.state_dict())[:-1] == list(before)
    assert list(after) == [*before, "l0prune_gates.log_alpha"]
    assert all(after[name] is before[name] for name in before)


@cases
def test_detach_gives_back_what_came_in(make, plan, shape):
    model = make().train()
    model[1].eval()
    model[0].bias.requires_grad_(False)
    x = torch.randn(shape)
    before, wanted = photograph(model), model(x)
    gates = gates_of(gated(model, plan))
    model(x)
    assert detach(model) is gates
    assert photograph(model) == before
    assert torch.equal(model(x), wanted)
    with pytest.raises(NotGated):
        gates_of(model)
    with pytest.raises(NotGated):
        detach(model)


class Broken(nn.Linear):
    """A user's class that does not let itself be subclassed."""

    def __init_subclass__(cls, **_):
        raise RuntimeError("no subclasses, please")


@pytest.mark.parametrize("fault", ["class", "missing", "size", "name"])
def test_a_failure_leaves_the_model_as_it_was(fault):
    model, plan = mlp(), mlp_plan()
    if fault == "class":
        model[4] = Broken(6, 3)
    if fault == "missing":
        plan = replace(plan, sites=(*plan.sites, Site("7.weight", 0, Slots(0, 0, 3), "read")))
    if fault == "size":
        model[4] = nn.Linear(5, 3)
    if fault == "name":
        model.l0prune_gates = nn.Identity()  # the user's own submodule has our name
    before = photograph(model)
    with pytest.raises(RuntimeError if fault == "class" else (UsageError, AlreadyGated)):
        attach(model, bank(plan))
    assert photograph(model) == before
    assert type(model[0]) is nn.Linear


def test_gating_twice_is_refused_from_either_side():
    inner = mlp()
    outer = nn.Sequential(inner)
    gated(inner, mlp_plan())
    before = photograph(outer)
    for model in (inner, outer):
        with pytest.raises(AlreadyGated, match="ungate"):
            gated(model, mlp_plan())
    with pytest.raises(AlreadyGated):
        attach(inner[0], bank(one_axis(12, Site("weight", 1, Slots(0, 0, 12), "read"))))
    assert photograph(outer) == before
    assert gates_of(outer) is gates_of(inner)


def test_bypass_reads_plain_parameters_for_a_while():
    model = mlp()
    x = torch.randn(5, 12)
    wanted = model(x)
    gated(model, mlp_plan())
    for mode in (True, False):
        model.train(mode)
        with bypass(model):
            assert torch.equal(model(x), wanted)
            assert model[0].weight is model[0]._parameters["weight"]
        assert not torch.equal(model(x), wanted)
    with pytest.raises(ZeroDivisionError), bypass(model):
        raise ZeroDivisionError
    assert not gates_of(model).bypassed
    with pytest.raises(NotGated), bypass(mlp()):
        pass


class Raw(nn.Module):
    """Owns a raw parameter and uses it in its own way, bias included."""

    def __init__(self):
        super().__init__()
        self.mixer = nn.Parameter(torch.randn(4, 6))
        self.offset = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return torch.einsum("bi,ij->bj", x, self.mixer) + self.offset


def test_raw_parameters_and_several_sites_on_one_parameter():
    rows, columns = Slots(0, 0, 4), Slots(1, 0, 6)
    plan = Plan(
        axes=(Axis("in", "input", 4, 0, 6), Axis("out", "neuron", 6, 4, 4)),
        pins=(),
        tensors={},
        sites=(
            Site("mixer", 0, rows, "read"),
            Site("mixer", 1, columns, "write"),
            Site("offset", 0, columns, "write"),
        ),
        costs=(),
    )
    model = Raw().eval()
    mixer, offset, x = model.mixer.detach(), model.offset.detach(), torch.randn(3, 4)
    gated(model, plan)
    z = gates_of(model).z()
    wanted = x @ (z[:4, None] * mixer * z[4:]) + offset * z[4:]
    torch.testing.assert_close(model(x), wanted)


def test_tied_weights_are_gated_under_each_name_and_stay_tied():
    model = Tied(mix=False).eval()
    weight, tokens = model.embed.weight.detach(), torch.tensor([1, 5])
    gated(model, one_axis(12, Site("embed.weight", 1, Slots(0, 0, 12), "read")))
    z = gates_of(model).z()
    torch.testing.assert_close(model(tokens), (weight * z)[tokens].tanh() @ (weight * z).T)
    assert model.embed._parameters["weight"] is model.head._parameters["weight"]
    assert len(list(model.parameters())) == 2


def test_a_module_used_twice_is_gated_once():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer).eval()
    gated(model, one_axis(4, Site("0.weight", 1, Slots(0, 0, 4), "read")))
    z, x = gates_of(model).z(), torch.randn(2, 4)
    weight, bias = layer._parameters["weight"] * z, layer.bias
    torch.testing.assert_close(model(x), torch.tanh(x @ weight.T + bias) @ weight.T + bias)


def test_frozen_parameters_stay_frozen_while_gates_learn():
    model = mlp().requires_grad_(False)
    gated(model, mlp_plan())
    model(torch.randn(5, 12)).sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is not None] == [
        "l0prune_gates.log_alpha"
    ]
    gates_of(model).log_alpha.requires_grad_(False)
    assert not model(torch.randn(5, 12)).requires_grad


def attention_plan(prefix: str = "") -> Plan:
    """Heads (2 of 4) at the writer of v and the reader; every input feature at the projection."""
    heads, inputs = Slots(0, 0, 2), Slots(1, 0, 8)
    values = Prod((heads, Const(4)))
    return Plan(
        axes=(Axis("heads", "head", 2, 0, 1), Axis("in", "input", 8, 2, 1)),
        pins=(),
        tensors={},
        sites=(
            Site(f"{prefix}out_proj.weight", 1, values, "read"),
            Site(f"{prefix}in_proj_weight", 1, inputs, "read"),
        ),
        costs=(),
    )


@pytest.mark.parametrize("grad", [True, False])  # without gradients, eval takes the fused path
def test_attention_sees_gates_though_it_uses_weights_functionally(grad):
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    plain, plan = copy.deepcopy(model), attention_plan()
    gated(model, plan)
    folded(plain, plan, gates_of(model).z())
    x = torch.randn(3, 5, 8)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(
            model(x, x, x, need_weights=False)[0], plain(x, x, x, need_weights=False)[0]
        )


@pytest.mark.parametrize("grad", [True, False])
def test_a_transformer_layer_sees_gates_on_its_fused_path(grad):
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    plan = attention_plan("self_attn.")
    hidden = Slots(2, 0, 16)
    plan = replace(
        plan,
        axes=(*plan.axes, Axis("hidden", "neuron", 16, 10, 8)),
        sites=(*plan.sites, Site("linear2.weight", 1, hidden, "read")),
    )
    plain, x = copy.deepcopy(model), torch.randn(3, 5, 8)
    gated(model, plan)
    folded(plain, plan, gates_of(model).z())
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


def test_gates_are_found_and_taken_off_inside_a_wrapper():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = mlp()
    before = photograph(model)
    wrapper = Wrapper(gated(model, mlp_plan()))
    assert gates_of(wrapper) is gates_of(model)
    detach(wrapper)
    assert photograph(model) == before


def test_state_dicts_travel_between_models():
    model, other = gated(mlp(), mlp_plan(), seed=1), gated(mlp(), mlp_plan(), seed=2)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    x = torch.randn(5, 12)
    assert torch.equal(other.eval()(x), model.eval()(x))


def test_what_is_no_module_is_named():
    with pytest.raises(UsageError, match="this is a str, and no gated model"):
        gates_of("model.pt")
