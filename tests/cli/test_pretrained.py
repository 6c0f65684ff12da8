"""``l0prune export --pretrained``, and commands that are given what it wrote."""

import torch
from onnxruntime import InferenceSession

import l0prune

CODE = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
"""


def test_a_folder_that_loads_again(done, refused, tmp_path):
    (tmp_path / "net.py").write_text(CODE)
    done("gate", "net.py:Net", "--input", "2x6", "--out", "net.gated.pt")
    model = l0prune.load("net.gated.pt")
    l0prune.fit(model, "params=0.5", l0prune.score(model, "magnitude"))
    l0prune.save(model, "net.gated.pt", l0prune.read_info("net.gated.pt"))
    told, _ = done("export", "--pretrained", "small", "--json")
    assert told["files"] == ["small"]
    assert told["loads"] == 'l0prune.from_pretrained("small") loads it.'
    out, _ = done("survey", "small", "--input", "2x6", "--json")
    assert out["params"] == told["params"]
    x = torch.randn(2, 6)
    assert torch.allclose(l0prune.load("small")(x), model.eval()(x), atol=1e-5)
    assert "--pretrained DIR" in refused(2, "export", "--code")
    done("export", "--pretrained", "small", "--code")
    assert (tmp_path / "small" / "l0prune_model.py").is_file()
    told, _ = done("export", "--onnx", "--no-time", "--pretrained", "both", "--json")
    assert told["files"] == ["net.onnx", "both"]
    assert torch.equal(l0prune.load("both")(x), l0prune.load("small")(x))
    l0prune.export(model).save_pretrained("with-file", model="net.py:Net", onnx=True)
    found = InferenceSession("with-file/model.onnx").run(None, {"input": x.numpy()})[0]
    assert torch.allclose(torch.from_numpy(found), l0prune.load("with-file")(x), atol=1e-5)
    done("export", "--state")
    assert torch.equal(l0prune.load("net.state.pt")(x), l0prune.load("small")(x))


def test_code_that_only_the_file_names_is_not_run(done, tmp_path, monkeypatch):
    net = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3))
    (tmp_path / "evil.py").write_text("raise SystemExit('run')\n")
    l0prune.gate(net, torch.randn(2, 6))
    l0prune.save(net, tmp_path / "net.gated.pt", {"model": f"{tmp_path}/evil.py:build"})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    _, err = done("export", "--pretrained", "small")
    assert "Only your own code builds this Sequential" in err
