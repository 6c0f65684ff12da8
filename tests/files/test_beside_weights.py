"""The files of a tokenizer and a processor come along with the weights."""

import socket

import pytest
import torch

import l0prune
from l0prune.files.model_sources import write_model

transformers = pytest.importorskip("transformers")
BESIDE = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"model_max_length": 9}',
    "spiece.model": "pieces",
    "preprocessor_config.json": '{"size": 3}',
    "chat_template.jinja": "{{ messages }}",
}
IDS = torch.arange(10).reshape(2, 5)


def source(folder, beside=True, layers=1):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name, text in BESIDE.items() if beside else ():
        (folder / name).write_text(text)
    (folder / "training_args.bin").write_bytes(b"of no use")
    return l0prune.load_model(f"transformers:{folder}")


def came_along(folder):
    return {name: (folder / name).read_text() for name in BESIDE if (folder / name).exists()}


def exported(model):
    l0prune.gate(model, (IDS,), include="*gate_proj", branches=False)
    return l0prune.export(model)


@pytest.mark.slow
def test_every_folder_has_them(tmp_path):
    small = exported(source(tmp_path / "from"))
    said = small.save_pretrained(tmp_path / "own"), small.save_vllm(tmp_path / "served")
    write_model(small.module, tmp_path / "plain")
    for folder in ("own", "served", "plain"):
        assert came_along(tmp_path / folder) == BESIDE, folder
        assert not (tmp_path / folder / "training_args.bin").exists()
    for text in said:
        assert f"files are those of {tmp_path / 'from'}" in text
    # the next round finds them in the folder of this one
    again = l0prune.from_pretrained(tmp_path / "own")
    exported(again).save_pretrained(tmp_path / "second")
    assert came_along(tmp_path / "second") == BESIDE


def test_where_there_are_none_it_is_said_and_nothing_is_fetched(tmp_path, monkeypatch):
    small = exported(source(tmp_path / "from", beside=False))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    for name in (str(tmp_path / "from"), "someone/something-not-in-the-cache"):
        small.module.name_or_path = name
        for said in (small.save_pretrained(tmp_path / "a"), small.save_vllm(tmp_path / "b")):
            assert f"none are here for {name}" in said
    small.module.name_or_path = ""
    assert "Put the tokenizer's files into" in small.save_vllm(tmp_path / "c")


def test_what_lies_there_stays(tmp_path):
    model = source(tmp_path / "from")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "tokenizer.json").write_text("another")
    write_model(model, tmp_path / "to")
    assert (tmp_path / "to" / "tokenizer.json").read_text() == "another"
    assert (tmp_path / "to" / "spiece.model").read_text() == "pieces"
