"""Gates on a model in whatever stands around it, and what is put on a gated one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.utils.prune
from deadness import close_some
from differences import ROUNDED, difference
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations

import l0prune
from l0prune.errors import UsageError


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


X = torch.randn(4, 6)
WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "parallel": nn.DataParallel,
    "both": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.slow
def test_the_model_in_a_wrapper_is_surveyed_gated_and_exported(wrap):
    model = network()
    wrapped = wrap(model).eval()
    assert [axis.name for axis in l0prune.survey(wrapped, X).axes] == ["0", "0.in"]
    before = wrapped(X)
    assert l0prune.gate(wrapped, X) is wrapped
    torch.testing.assert_close(wrapped(X), before)
    assert "l0prune_gates.log_alpha" in model.state_dict()
    close_some(model, seed=1)
    torch.testing.assert_close(wrapped(X), model(X))
    assert not torch.allclose(wrapped(X), before)
    small = l0prune.export(wrapped)
    assert type(small.module) is nn.Sequential
    assert difference(model, small, X) <= ROUNDED


def test_in_ddp_the_gates_would_not_be_averaged(monkeypatch):
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "__init__", nn.Module.__init__)
    wrapped = nn.parallel.DistributedDataParallel()
    wrapped.module = network()
    with pytest.raises(UsageError, match="Gate the model first"):
        l0prune.gate(wrapped, X)
    assert len(l0prune.survey(wrapped, X).axes) == 2


def test_gradients_and_batches_by_function():
    model = l0prune.gate(network().double(), X.double())
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        l0prune.gates(model).log_alpha[:4] = torch.tensor([-9.0, 0.0, 0.5, 9.0])
    model.eval()

    def loss(given):
        return functional_call(model, given, (X.double(),)).square().sum()

    found = grad(loss)({name: p.detach() for name, p in parameters.items()})
    loss(parameters).backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.grad)
    each = vmap(lambda x: functional_call(model, parameters, (x,)))(X.double())
    torch.testing.assert_close(each, model(X.double()))


@pytest.mark.parametrize(
    "put_on",
    [
        lambda layer: torch.nn.utils.prune.l1_unstructured(layer, "weight", 0.5),
        pytest.param(
            torch.nn.utils.weight_norm,
            marks=pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
        ),
    ],
)
def test_what_would_take_a_gated_weights_place_is_refused(put_on):
    model = l0prune.gate(network(), X)
    with pytest.raises(UsageError, match=r"would take the place of Linear\.weight, which is gated"):
        put_on(model[0])


@pytest.mark.parametrize("put_on", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_parametrization_that_came_later_is_said_at_the_export(put_on):
    model = l0prune.gate(network(), X)
    put_on(model[0])
    with pytest.raises(UsageError, match=r"0\.weight is no parameter any more"):
        l0prune.export(model)


@pytest.mark.filterwarnings("ignore:`?torch.jit")
def test_torchscript_is_for_the_exported_model():
    model = l0prune.gate(network(), X)
    with pytest.raises(UsageError, match="script what comes of it"):
        torch.jit.script(model)
    close_some(model, seed=1)
    dense = l0prune.export(model).module
    torch.testing.assert_close(torch.jit.script(dense)(X), dense(X))
