"""Pickles of small modules in a process without l0prune, and all else that torch does to them."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from differences import difference
from pickled import names_in
from plain_networks import NETWORKS
from torch import nn
from with_branches import randomised

import l0prune
from l0prune.files.cut_layers import LAYERS, OWN, SkippedModule, is_name

ALONE = """
import sys
sys.modules["l0prune"] = None  # no import of it succeeds
import torch
for path in sys.argv[1:]:
    module, inputs, outputs, state = torch.load(path, weights_only=False)
    assert not any(type(each).__module__.startswith("l0prune") for each in module.modules())
    module.load_state_dict(state)
    with torch.no_grad():
        given = module(**inputs)
    given = given if isinstance(given, torch.Tensor) else given[0]
    torch.testing.assert_close(given, outputs, rtol=0, atol=0)
print("all are right")
"""


def closed(model, x, *names):
    bank = l0prune.gates(l0prune.gate(model, x, branches=True))
    for name in names:
        bank.set_open(name, [])
    return l0prune.export(model, verify="float32")


def first(output):
    return output if isinstance(output, torch.Tensor) else output[0]


@pytest.fixture(scope="module")
def cut():
    """Function that exports a network by its name; each once."""
    made = {}

    def one(name):
        if name not in made:
            make, like, branches = NETWORKS[name]
            x = torch.randn(like.shape, generator=torch.Generator().manual_seed(0))
            model = randomised(make())
            made[name] = (model, closed(model, x, *branches), x)
        return made[name]

    return one


def saved(small, inputs, path):
    module = small.module.eval()
    with torch.no_grad():
        output = first(module(**inputs))
    torch.save((module, inputs, output, module.state_dict()), path)


def load_alone(folder, *paths):
    """Load these files where l0prune cannot be imported, and compare what they compute."""
    script = folder / "alone.py"
    script.write_text(ALONE, encoding="utf-8")
    beside = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    given = [sys.executable, str(script), *map(str, paths)]
    done = subprocess.run(given, env=beside, capture_output=True, text=True, check=False)
    assert "all are right" in done.stdout, done.stderr


@pytest.mark.parametrize("names", [("concatenated",), tuple(NETWORKS)])
@pytest.mark.slow
def test_a_process_without_l0prune_loads_them(names, cut, tmp_path):
    paths = []
    for name in names:
        _, small, x = cut(name)
        assert small.rebuilt
        assert "torch.save" not in str(small)
        paths.append(tmp_path / f"{name}.pt")
        argument = "input" if isinstance(small.module, nn.Sequential) else "x"
        saved(small, {argument: x}, paths[-1])
    load_alone(tmp_path, *paths)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings(
    "ignore:.torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning"
)
@pytest.mark.one_in(5)
def test_what_torch_makes_of_it_computes_the_same(name, cut):
    """Of the module, and of its pickle, which has other classes in it."""
    model, small, x = cut(name)
    assert difference(model, small, x) <= 1e-10
    file = io.BytesIO()
    torch.save(small.module, file)
    assert not any(name.startswith("l0prune.") for name in names_in(file))
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert list(again.state_dict()) == list(small.module.state_dict())
    expected = small.module(x)
    for module in (small.module, again):
        made = (
            copy.deepcopy(module),
            torch.compile(module, backend="eager", fullgraph=True),
            torch.jit.trace(module, x),
            torch.export.export(module, (x,)).module(),
        )
        for other in made:
            assert torch.equal(other(x), expected)
        half = copy.deepcopy(module).to(torch.bfloat16)
        assert half(x.bfloat16()).dtype == torch.bfloat16
    copies = [type(each) for each in copy.deepcopy(small.module).modules()]
    assert copies == [type(each) for each in small.module.modules()]


@pytest.mark.slow
def test_other_sizes_and_calls_of_a_pickle(cut):
    """Its zeros follow the input; inputs are found by position and by keyword."""
    _, small, _ = cut("convolutional")
    zeros = copy.deepcopy(small.module.blocks[1].conv2)
    assert isinstance(zeros, SkippedModule)
    for name, gives in (("zeros", (2, 10, 6, 4)), ("zero", ()), ("nothing", (0,))):
        zeros.gives = name
        for module in (zeros, pickled(zeros)):
            assert module(torch.randn(2, 8, 11, 7)).shape == gives
    _, small, _ = cut("transformer")
    states, mask = torch.randn(1, 3, 8), torch.ones(3)
    for module in (small.module.layers[2], pickled(small.module.layers[2])):
        assert module(states, mask) is states
        assert module(mask=mask, scale=2.0, states=states) is states
    for module in (small.module.layers[0].attention, pickled(small.module.layers[0].attention)):
        mixed, weights = module(mask=mask, states=states)
        assert torch.equal(mixed, torch.zeros_like(states))
        assert weights is None


def pickled(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.slow
def test_a_loaded_pickle_is_cut_again(cut, tmp_path):
    """What stands for removed modules in it is a module like any other, and its cut is known."""
    make, *_ = NETWORKS["transformer"]
    _, small, x = cut("transformer")
    again = closed(pickled(small.module), x, "layers.1.attention")
    assert again.rebuilt
    again.save_pretrained(tmp_path)
    loaded = l0prune.resize(make(), tmp_path).eval()
    torch.testing.assert_close(loaded(x), again.module(x))
    assert not any(isinstance(each, OWN) for each in loaded.modules())


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(self.stem(x)))


def test_what_needs_l0prune_says_so_once_it_is_pickled_and_where_it_is_printed():
    x = torch.randn(2, 5)
    model = l0prune.gate(randomised(Normed()), x)
    l0prune.gates(model).set_open("stem", [0, 1, 4])
    small = l0prune.export(model, verify="float32")
    assert type(small.module.norm).__name__ == "CutLayerNorm"
    assert "save_pretrained(folder, code=True)" in str(small)
    assert "CutLayerNorm" in str(small)
    copied = copy.deepcopy(small.module)  # without a warning
    with pytest.warns(UserWarning, match=r"code=True") as told:
        again = pickled(small.module)
    assert len(told) == 1
    for each in (copied, again):
        assert type(each.norm) is type(small.module.norm)
        assert torch.equal(each(x), small.module(x))


@pytest.mark.parametrize("name", ["x, y=__import__('os')", "", "class", 3])
def test_no_name_in_a_file_becomes_code(name):
    layer = nn.Linear(2, 2)
    layer.__class__ = LAYERS["SkippedModule"]
    vars(layer).update(gives="input", at=0, name=name, depth=0, windows=(), dim=0, channels=0)
    layer.results = 0
    assert not is_name(name)
    with pytest.raises(ValueError, match="no name of an input"):
        pickled(layer)


def resnet():
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [2, 1, 1, 2], num_classes=5), {"x": torch.randn(1, 3, 32, 32)}


def of_transformers(kind, **sizes):
    import transformers

    torch.manual_seed(0)
    kwargs = {"input_ids": torch.randint(0, 60, (2, 7)), "use_cache": False}
    tokens = {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{kind}Config")(**tokens, **sizes)
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    return getattr(transformers, name)(config), kwargs


LARGER = {
    "resnet": (resnet, ["layer1.1", "layer4.0", "layer4.1"]),
    "llama": (
        lambda: of_transformers(
            "Llama",
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        ["model.layers.0.self_attn", "model.layers.1.mlp", "model.layers.2.*"],
    ),
    "gpt2": (
        lambda: of_transformers("GPT2", n_embd=16, n_layer=2, n_head=2),
        ["transformer.h.0.attn", "transformer.h.1.mlp"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGER)
def test_networks_of_other_packages(name, tmp_path):
    make, branches = LARGER[name]
    model, inputs = make()
    bank = l0prune.gates(l0prune.gate(randomised(model), (), inputs, branches=branches))
    gone = [axis.name for axis in bank.axes if axis.kind == "branch"]
    assert len(gone) >= len(branches)
    for each in gone:
        bank.set_open(each, [])
    small = l0prune.export(model, verify="float32")
    assert small.rebuilt, small.note
    saved(small, inputs, tmp_path / "small.pt")
    load_alone(tmp_path, tmp_path / "small.pt")
    compiled = torch.compile(small.module, backend="eager")
    torch.testing.assert_close(first(compiled(**inputs)), first(small.module(**inputs)))
    again = copy.deepcopy(small.module)
    assert torch.equal(first(again(**inputs)), first(small.module(**inputs)))
