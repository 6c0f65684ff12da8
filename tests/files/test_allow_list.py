"""What an ordinary pickle may name, and what it may not look like inside."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import OrderedDict
from pickle import UnpicklingError

import pytest
import torch
import torch.nn.functional as F
import torchvision
from hostile import Call, Touch
from torch import nn

from l0prune.errors import FileError
from l0prune.files.allow_list import ModulePartial, allowed, check_ordinary
from l0prune.files.pickles import load_pickle

# One small network of each family, by the module that defines it.
FAMILIES = {
    torchvision.models.get_model_builder(name).__module__: name
    for name in (
        *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s"),
        *("googlenet", "inception_v3", "maxvit_t", "mnasnet0_5", "mobilenet_v2"),
        *("mobilenet_v3_small", "regnet_y_400mf", "resnet18", "shufflenet_v2_x0_5"),
        *("squeezenet1_1", "swin_v2_t", "vgg11_bn", "vit_b_32"),
    )
}


def test_no_family_is_forgotten():
    names = torchvision.models.list_models(module=torchvision.models)
    assert {torchvision.models.get_model_builder(n).__module__ for n in names} == set(FAMILIES)


@pytest.mark.filterwarnings("ignore:The default weight initialization")
@pytest.mark.parametrize("name", FAMILIES.values())
@pytest.mark.one_in(4)
def test_every_family_loads_as_it_is(name, tmp_path):
    # Without weights, which are large; RegNet initialises itself by reading them.
    with torch.device("cpu" if "regnet" in name else "meta"):
        model = torchvision.models.get_model(name).eval()
    torch.save(model, tmp_path / "model.pt")
    loaded = load_pickle(tmp_path / "model.pt")
    assert [type(m) for m in loaded.modules()] == [type(m) for m in model.modules()]
    assert repr(loaded) == repr(model)
    assert not any(m.training for m in loaded.modules())
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (model, loaded)]
    assert shapes[0] == shapes[1]


def test_weights_come_back_bit_by_bit(tmp_path):
    model = torchvision.models.shufflenet_v2_x0_5()
    torch.save(model, tmp_path / "model.pt")
    first, second = model.state_dict(), load_pickle(tmp_path / "model.pt").state_dict()
    assert list(first) == list(second)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4))),
        nn.LSTM(3, 4, num_layers=2, bidirectional=True),
        nn.TransformerEncoderLayer(8, 2),
        nn.TransformerEncoderLayer(8, 2, activation="gelu"),
        nn.ModuleDict({"a": nn.Conv2d(1, 2, 3), "b": nn.ParameterList([torch.ones(2)])}),
        nn.Transformer(8, 2, 1, 1, batch_first=True),
        torchvision.ops.Conv2dNormActivation(3, 4),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_of_torch_load(module, tmp_path):
    torch.save(module, tmp_path / "model.pt")
    assert repr(load_pickle(tmp_path / "model.pt")) == repr(module)


@pytest.mark.parametrize(
    "name",
    [
        "posix.system", "builtins.eval", "builtins.getattr", "torch.nn.modules.module.partial",
        "torch.nn.modules.container._torch_functional_linear", "torch.hub.load",
        "torchvision.models.get_model", "torchvision.models._api.get_model_weights",
        "torchvision.models.resnet.resnet18", "torch.nn.functional.boolean_dispatch",
        "torch.nn.modules.module.os.system", "torch.fx.graph_module.GraphModule",
        "torch.jit._script.ScriptModule", "torchvision.models.resnet", "functools.reduce",
        "torch.nn.modules", "",
    ],
)  # fmt: skip
def test_nothing_else_is_allowed(name):
    assert allowed(name) is None


def test_partials_of_modules_only(tmp_path):
    with pytest.raises(UnpicklingError, match=r"functools\.partial of"):
        ModulePartial(print)
    harmless = ModulePartial(nn.LayerNorm, eps=1e-6)
    with pytest.raises(UnpicklingError, match=r"functools\.partial of"):
        harmless.__setstate__((print, (), {}, None))
    torch.save(functools.partial(torch.relu_), tmp_path / "model.pt")
    with pytest.raises(FileError):
        load_pickle(tmp_path / "model.pt")


def test_a_partial_comes_back_ordinary_from_the_next_pickle(tmp_path):
    torch.save(functools.partial(nn.LayerNorm, eps=1e-3), tmp_path / "model.pt")
    loaded = load_pickle(tmp_path / "model.pt")
    assert loaded(5).eps == 1e-3
    for again in (pickle.loads(pickle.dumps(loaded)), copy.deepcopy(loaded)):
        assert type(again) is functools.partial
        assert again(5).eps == 1e-3


def wired(**attributes):
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].__dict__.update(attributes)
    return module


def named(value, **attributes):
    """With attributes of its own, as a pickle can give them."""
    for name, each in attributes.items():
        setattr(value, name, each)
    return value


def hooked():
    module = nn.Linear(2, 2)
    module._forward_hooks[0] = nn.Linear(2, 2)
    return module


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (wired(forward=nn.ReLU()), "forward of its own"),
        (wired(_call_impl=nn.ReLU()), "_call_impl of its own"),
        (wired(_forward_hooks=nn.ParameterDict()), "no dict"),
        (wired(_modules={"a": "text"}), "unusable entry 'a' in _modules"),
        (wired(_parameters={"weight": [1]}), "unusable entry 'weight' in _parameters"),
        (hooked(), "with hooks"),
        (wired(inner=[{"deep": (hooked(),)}]), "with hooks"),
        (wired(inner=ModulePartial(nn.Sequential, hooked())), "with hooks"),
        ({"model": hooked()}, "with hooks"),
    ],
)
def test_cleverly_wired_modules_are_refused(module, what, tmp_path):
    with pytest.raises(UnpicklingError, match=what):
        check_ordinary(module, 10**6)
    torch.save(module, tmp_path / "model.pt")
    with pytest.raises(FileError, match=r"harm.*--trust-pickle"):
        load_pickle(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (wired(_compiled_call_impl=F.sigmoid), "_compiled_call_impl of its own"),
        (wired(_compiled_call_impl=nn.ReLU()), "_compiled_call_impl of its own"),
        (wired(_version=F.relu), "_version of its own"),
        (wired(__class__=nn.ReLU), "__class__ of its own"),
        (wired(_non_persistent_buffers_set={"a": F.relu}), "no set"),
        (named(nn.Parameter(torch.zeros(2)), detach=F.relu), "detach of its own"),
        (named(nn.Parameter(torch.zeros(2)), _backward_hooks=OrderedDict({0: F.relu})), "hooks"),
        (named(OrderedDict(a=1), items=F.relu), "items of its own"),
        (wired(_modules=named(OrderedDict(), values=F.relu)), "values of its own"),
    ],
)
def test_no_function_stands_where_a_class_has_something(value, what):
    with pytest.raises(UnpicklingError, match=what):
        check_ordinary({"found": [value]}, 10**6)


def test_a_pickle_brings_no_forward_by_the_way_of_compiled_modules(tmp_path, monkeypatch):
    module = wired(_compiled_call_impl=F.sigmoid)
    monkeypatch.setattr(nn.Module, "__getstate__", lambda self: dict(vars(self)))
    torch.save(module, tmp_path / "model.pt")
    with pytest.raises(FileError, match=r"_compiled_call_impl of its own.*--trust-pickle"):
        load_pickle(tmp_path / "model.pt")


class Hooked:
    """Is pickled as a parameter with a function that would get its gradients."""

    def __reduce__(self):
        hooks = OrderedDict({0: F.relu})
        return torch._utils._rebuild_parameter, (torch.zeros(2), True, hooks)


def test_a_pickle_brings_no_hooks_of_tensors(tmp_path):
    torch.save({"weight": Hooked()}, tmp_path / "model.pt")
    with pytest.raises(FileError, match=r"a tensor with hooks.*--trust-pickle"):
        load_pickle(tmp_path / "model.pt")


def test_modules_that_contain_themselves_are_no_trap():
    module = nn.Sequential(nn.Linear(2, 2))
    module.__dict__["me"] = [module]
    check_ordinary(module, 10**6)


@pytest.mark.parametrize("place", ["alone", "attribute", "hook", "argument", "state"])
def test_code_in_any_place_does_not_run(place, tmp_path):
    marker = tmp_path / "marker"
    touch, module = Touch(marker), nn.Linear(2, 2)
    if place == "attribute":
        module.extra = touch
    if place == "hook":
        module._forward_hooks[0] = touch
    value = {
        "alone": touch,
        "argument": Call(nn.Dropout, touch),
        "state": {"weight": torch.zeros(2), "extra": [touch]},
    }.get(place, module)
    torch.save(value, tmp_path / "model.pt")
    with pytest.raises(FileError, match=r"system.*--trust-pickle") as refusal:
        load_pickle(tmp_path / "model.pt")
    assert "--model path.py:factory --weights" in str(refusal.value)
    assert not marker.exists()
    load_pickle(tmp_path / "model.pt", trust=True)  # the pickle is a live one
    assert marker.exists()
