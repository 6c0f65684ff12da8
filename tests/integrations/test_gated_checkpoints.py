"""The weights of a gated model do not pass for those of a plain one in silence."""

from __future__ import annotations

import logging

import pytest
import torch

import l0prune
from l0prune.errors import UsageError

transformers = pytest.importorskip("transformers", reason="pip install 'l0prune[transformers]'")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks
KEY = "l0prune_gates.log_alpha"
IDS = torch.randint(3, 20, (4, 8), generator=torch.Generator().manual_seed(0))


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).eval()


def gated():
    model = l0prune.gate(bert(), (), {"input_ids": IDS})
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::3] = -9
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    gated().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_transformers_names_the_gates_that_it_leaves_out(folder, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        _, told = transformers.BertForSequenceClassification.from_pretrained(
            folder, output_loading_info=True
        )
    assert set(told["unexpected_keys"]) == {KEY}
    assert KEY in caplog.text


@pytest.mark.slow
def test_torch_refuses_them_or_names_them():
    state = gated().state_dict()
    with pytest.raises(RuntimeError, match=KEY):
        bert().load_state_dict(state)
    assert bert().load_state_dict(state, strict=False).unexpected_keys == [KEY]


def test_what_l0prune_loads_is_refused_with_the_way_on(folder, tmp_path):
    with pytest.raises(UsageError, match=r"weights of a gated model.*load_state_dict"):
        l0prune.load_model(f"transformers:{folder}")
    (tmp_path / "net.py").write_text(
        "import torch\n\ndef net():\n    return torch.nn.Linear(4, 3)\n"
    )
    model = l0prune.gate(torch.nn.Linear(4, 3), torch.zeros(2, 4))
    torch.save({"state_dict": model.state_dict()}, tmp_path / "net.pt")
    with pytest.raises(UsageError, match=r"net\.pt holds the weights of a gated model"):
        l0prune.load_model(f"{tmp_path}/net.py:net", f"{tmp_path}/net.pt")


@pytest.mark.slow
def test_gated_again_the_model_takes_them(folder):
    model = transformers.BertForSequenceClassification.from_pretrained(folder)
    wanted = gated()
    with torch.no_grad():
        assert not torch.equal(model(IDS).logits, wanted(IDS).logits)
        l0prune.gate(model, (), {"input_ids": IDS}).load_state_dict(wanted.state_dict())
        assert torch.equal(model(IDS).logits, wanted(IDS).logits)
