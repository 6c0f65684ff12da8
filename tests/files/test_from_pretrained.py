"""Smaller models come back from what was written of them, or it is said why not."""

from __future__ import annotations

import copy
import functools
import json
import sys

import pytest
import safetensors.torch
import torch
from deadness import close_some, randomise
from torch import nn

import l0prune
from l0prune.errors import AlreadyGated, FileError
from l0prune.files.checked_json import sealed
from l0prune.files.smaller_model import MANIFEST, WEIGHTS
from l0prune.files.tensor_file import write_tensors

X = torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A norm that becomes another layer, inputs that are picked, a tied weight, an own buffer."""

    def __init__(self, width=8):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, width, 3), nn.GroupNorm(1, width)
        self.scale = nn.Buffer(torch.ones(width, 1, 1), persistent=False)
        self.head = nn.Linear(width * 16, 10)
        self.up, self.again = nn.Linear(10, 10), nn.Linear(10, 10)
        self.again.weight = self.up.weight

    def forward(self, x):
        x = self.head((self.scale * self.norm(self.conv(x))).flatten(1))
        return self.again(self.up(x.relu()))


CODE = "from test_from_pretrained import Net as build\n"


@functools.cache
def exported():
    torch.manual_seed(0)
    net = randomise(Net()).eval()
    net.scale.uniform_(0.5, 2)
    return l0prune.export(close_some(l0prune.gate(net, X), seed=1))


def fresh():
    """As its own code builds it: the buffer is known to the file alone."""
    torch.manual_seed(1)
    return Net().eval()


@pytest.fixture
def folder(tmp_path):
    exported().save_pretrained(tmp_path / "net")
    return tmp_path / "net"


def test_a_model_of_ones_own_gets_its_sizes_and_weights(folder):
    dense, model = exported(), fresh()
    assert {"norm": "CutGroupNorm", "head": "PickedLinear"}.items() <= dense._manifest[
        "layers"
    ].items()
    assert l0prune.resize(model, folder) is model
    assert torch.equal(model(X), dense.module(X))
    assert model.again.weight is model.up.weight
    assert {p.name for p in folder.iterdir()} == {MANIFEST, WEIGHTS}


@pytest.mark.parametrize("name", ["net.state.pt", "net.pt", "net.safetensors"])
def test_files_of_save_do_the_same(name, tmp_path, monkeypatch):
    exported().save(tmp_path / name)
    assert torch.equal(l0prune.resize(fresh(), tmp_path / name)(X), exported().module(X))
    assert torch.equal(l0prune.load(tmp_path / name, fresh())(X), exported().module(X))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net.py").write_text(CODE)
    spec, weights = f"{tmp_path}/net.py:build", str(tmp_path / name)
    assert torch.equal(l0prune.load_model(spec, weights).eval()(X), exported().module(X))


def test_a_manifest_alone_gives_sizes(tmp_path, folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    for source in (manifest, folder / MANIFEST):
        model = l0prune.resize(fresh(), source)
        assert model(X).isnan().all()
        model.scale.copy_(exported().module.scale)
        model.load_state_dict(exported().module.state_dict())
        assert torch.equal(model(X), exported().module(X))


def test_who_builds_it_has_to_be_said_and_named_before(tmp_path, monkeypatch, folder):
    with pytest.raises(FileError, match=r"holds a Net, and only your own code can build one"):
        l0prune.from_pretrained(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "net.py").write_text(CODE)
    said = exported().save_pretrained(folder, model=f"{tmp_path}/net.py:build")
    assert said == f'l0prune.from_pretrained("{folder}") loads it.'
    for load in (l0prune.from_pretrained, l0prune.load, lambda path: l0prune.load_model(str(path))):
        assert torch.equal(load(folder)(X), exported().module(X))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(FileError, match="you have not named this on this machine"):
        l0prune.from_pretrained(folder)
    model = l0prune.from_pretrained(folder, trust_pickle=True)
    assert not model.training
    assert torch.equal(model(X), exported().module(X))


def test_code_that_builds_something_else_is_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net.py").write_text(
        "from test_from_pretrained import Net\ndef build():\n  return Net(9)\n"
    )
    said = exported().save_pretrained(tmp_path / "net", model=f"{tmp_path}/net.py:build")
    assert said.startswith("Only your own code builds this Net")


def changed(folder, change):
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(sealed(manifest)))


def weights(folder, change):
    path = folder / WEIGHTS
    with safetensors.safe_open(path, "pt") as file:
        texts = file.metadata()
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    write_tensors(path, tensors, texts)


BAD = {
    "newer": (lambda f: changed(f, lambda m: m.update(version=9)), "by a newer l0prune .format 9"),
    "no version": (lambda f: changed(f, lambda m: m.pop("version")), "no manifest of l0prune"),
    "no shapes": (lambda f: changed(f, lambda m: m.pop("shapes")), "shapes missing or of the"),
    "no json": (lambda f: (f / MANIFEST).write_text("{"), "no manifest of l0prune"),
    "a list": (lambda f: (f / MANIFEST).write_text("[]"), "no manifest of l0prune"),
    "no folder of ours": (lambda f: (f / MANIFEST).unlink(), "is no folder of l0prune: it has no"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "does not exist"),
    "another save's": (lambda f: changed(f, lambda m: m.update(save="0")), "files of two saves"),
    "cut off": (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9]),
        "damaged or truncated",
    ),
    "missing": (lambda f: weights(f, lambda t: t.pop("head.bias")), "it lacks head.bias[.]"),
    "missing picks": (lambda f: weights(f, lambda t: t.pop("head.kept")), "it lacks head.kept"),
    "wrong picks": (
        lambda f: weights(f, lambda t: t["head.kept"].add_(1000)),
        "head.kept does not say which inputs",
    ),
    "misshapen": (
        lambda f: weights(f, lambda t: t.update({"head.bias": torch.zeros(99)})),
        "head.bias is 99, and should be",
    ),
    "whole numbers": (
        lambda f: weights(f, lambda t: t.update({"head.bias": t["head.bias"].long()})),
        "head.bias holds torch.int64",
    ),
    "one too many": (
        lambda f: weights(f, lambda t: t.update(more=torch.zeros(1))),
        "knows no more",
    ),
    "another layer": (
        lambda f: changed(f, lambda m: m["layers"].update(norm="system")),
        "a layer 'system', which this version does not know",
    ),
    "a layer elsewhere": (
        lambda f: changed(f, lambda m: m["layers"].update(conv="CutLayerNorm")),
        "conv is no LayerNorm",
    ),
    "code": (
        lambda f: changed(f, lambda m: m["attributes"].update({"": {"forward": 1}})),
        "forward cannot be 1",
    ),
    "a private name": (
        lambda f: changed(f, lambda m: m["attributes"].update({"": {"_parameters": 1}})),
        "_parameters cannot be 1",
    ),
    "text": (
        lambda f: changed(f, lambda m: m["attributes"]["head"].update(out_features="8")),
        "head.out_features cannot be '8'",
    ),
    "no such module": (
        lambda f: changed(f, lambda m: m["attributes"].update(tail={"a": 1})),
        "the model has no tail",
    ),
    "larger": (
        lambda f: changed(f, lambda m: m["shapes"]["head.bias"].update(new=[10**12])),
        "head.bias does not become smaller",
    ),
    "a graph": (
        lambda f: changed(f, lambda m: m["rebuild"].update(verified=False, reason="it is one")),
        "cannot be put on Net: it is one",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_damaged_is_said_and_the_model_stays(name, folder):
    model = fresh()
    before, state = copy.deepcopy(vars(model.head)), copy.deepcopy(model.state_dict())
    break_it, words = BAD[name]
    break_it(folder)
    with pytest.raises(FileError, match=words) as caught:
        l0prune.resize(model, folder)
    assert len(str(caught.value).splitlines()) == 1
    assert {n: type(m) for n, m in model.named_modules()} == {
        n: type(m) for n, m in Net().named_modules()
    }
    assert vars(model.head).keys() == before.keys()
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in state)


MISFITS = {
    "other sizes": (lambda: Net(12), "conv.weight is 12×2×3×3 in it, and was 8×2×3×3 before"),
    "another class": (
        lambda: nn.Linear(3, 2),
        "another architecture, a Net: the model has no conv",
    ),
    "one with more": (
        lambda: Net().append_more(),
        "another architecture, a Net: the file has no more.bias",
    ),
    "cut already": (lambda: copy.deepcopy(exported().module), "this one has the new sizes already"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_models_that_are_not_the_one_it_was(name, folder, monkeypatch):
    def append_more(net):
        net.more = nn.Linear(1, 1)
        return net

    monkeypatch.setattr(Net, "append_more", append_more, raising=False)
    make, words = MISFITS[name]
    with pytest.raises(FileError, match=words):
        l0prune.resize(make(), folder)


def test_ties_of_the_model_are_ties_of_the_file(folder):
    weights(folder, lambda t: t.update({"again.weight": t["up.weight"] + 1}))
    changed(folder, lambda m: m["tied"].clear())
    with pytest.raises(FileError, match="are one tensor in this one, and two in the file"):
        l0prune.resize(fresh(), folder)


def test_a_gated_model_is_refused(folder):
    with pytest.raises(AlreadyGated):
        l0prune.resize(l0prune.gate(fresh(), X), folder)


def test_other_files_are_none(tmp_path):
    torch.save(fresh().state_dict(), tmp_path / "state.pt")
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(FileError, match=r"it was not written by Export[.]save"):
        l0prune.resize(fresh(), tmp_path / "state.pt")
    with pytest.raises(FileError, match="no manifest of a smaller model"):
        l0prune.resize(fresh(), tmp_path / "a.safetensors")
    with pytest.raises(FileError, match="does not exist"):
        l0prune.from_pretrained(tmp_path / "nowhere")


class InParts(nn.Module):
    """What torch.export cannot follow between two parts."""

    def __init__(self):
        super().__init__()
        self.body, self.tail = (
            nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)) for _ in range(2)
        )

    def forward(self, x):
        x = self.body(x)
        return self.tail(2 * x if float(x.detach().sum()) > 0 else x)


@pytest.mark.slow
def test_a_model_that_is_captured_in_parts(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(3, 6)
    small = l0prune.export(close_some(l0prune.gate(randomise(InParts()).eval(), x), seed=1))
    assert small.in_parts
    assert small.save_pretrained(tmp_path / "m").startswith(
        "Only your own code builds this InParts"
    )
    model = l0prune.resize(InParts().eval(), tmp_path / "m")
    assert torch.equal(model(x), small.module(x))


def test_a_model_without_values_gets_them(folder):
    with torch.device("meta"):
        model = Net().eval()
    l0prune.resize(model, folder)
    assert torch.equal(model(X), exported().module(X))


def test_random_numbers_are_as_if_nothing_was_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net.py").write_text(CODE)
    dense = exported()  # seeds when it is the first to ask
    torch.manual_seed(7)
    before = torch.get_rng_state()
    dense.save_pretrained(tmp_path / "m", model=f"{tmp_path}/net.py:build")
    l0prune.from_pretrained(tmp_path / "m")
    assert torch.equal(torch.get_rng_state(), before)
