"""Folders of smaller models: what loads them, and what transformers can say of their sizes."""

from __future__ import annotations

import copy
import functools
import json
import re

import pytest
import torch
from deadness import close_some, randomise

import l0prune
from l0prune.errors import FileError, UsageError
from l0prune.files.checked_json import sealed

transformers = pytest.importorskip("transformers", reason="pip install 'l0prune[transformers]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework
IDS = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))


def llama(layers=1, **settings):
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=24, max_position_embeddings=32, **settings,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert(layers=1):
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def t5():
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=6, d_ff=24, num_layers=1, num_heads=4, dropout_rate=0.0
    )
    return transformers.T5EncoderModel(config)


@functools.cache
def exported(make, include="*", **settings):
    torch.manual_seed(0)
    model = randomise(make(**settings)).eval()
    l0prune.gate(model, (), {"input_ids": IDS}, include=include, branches=False)
    return l0prune.export(close_some(model, seed=1))


def same(first, second):
    with torch.no_grad():
        outputs = [model.eval()(input_ids=IDS)[0] for model in (first, second)]
    return torch.equal(*outputs)


LOADS = {
    "heads, width and neurons": (llama, "*", {}, "AutoModelForCausalLM"),
    "tied embeddings": (llama, "*", {"tie_word_embeddings": True}, "AutoModelForCausalLM"),
    "neurons that are as many": (
        bert,
        ("*.intermediate.dense",),
        {},
        "AutoModelForSequenceClassification",
    ),
    "names of its own": (t5, "*", {}, "AutoModelForTextEncoding"),
}


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.slow
def test_transformers_loads_what_a_configuration_can_say(name, tmp_path):
    make, include, settings, auto = LOADS[name]
    dense = exported(make, include, **settings)
    kind = type(dense.module).__name__
    said = dense.save_pretrained(tmp_path / "model")
    assert said == (
        f'l0prune.from_pretrained("{tmp_path}/model") loads it.\n'
        f"So does {kind}.from_pretrained of transformers, and {auto}."
    )
    for loads in (kind, auto):
        loaded = getattr(transformers, loads).from_pretrained(tmp_path / "model")
        assert type(loaded) is type(dense.module)
        assert same(loaded, dense.module)
    assert loaded.config.to_dict() != dense.module.config.to_dict()
    again = l0prune.from_pretrained(tmp_path / "model")
    assert type(again) is type(dense.module)
    assert same(again, dense.module)
    # what was one tensor is one
    assert len(list(again.parameters())) == len(list(dense.module.parameters()))


def test_the_auto_classes_and_generation(tmp_path):
    dense = exported(llama)
    dense.module.generation_config.max_new_tokens = 6
    dense.save_pretrained(tmp_path / "model")
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ours = l0prune.from_pretrained(tmp_path / "model")
    words = [m.generate(IDS, do_sample=False) for m in (auto, ours, dense.module)]
    assert words[0].shape[1] > IDS.shape[1]
    assert torch.equal(words[0], words[1])
    assert torch.equal(words[0], words[2])
    assert ours.generation_config.max_new_tokens == 6


@pytest.mark.slow
def test_a_configuration_for_each_layer_where_the_class_takes_one(tmp_path):
    if not hasattr(transformers, "Step3p7TextModel"):
        pytest.skip("this version of transformers has no configurations by layer")
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig

    torch.manual_seed(0)
    config = Step3p7TextConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, intermediate_size=24, max_position_embeddings=32,
        mlp_layer_types=["dense"] * 2, layer_types=["full_attention"] * 2, sliding_window=16,
        num_sliding_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = randomise(transformers.Step3p7TextModel(config)).eval()
    l0prune.gate(model, (), {"input_ids": IDS}, include="*.heads")
    with torch.no_grad():
        l0prune.gates(model).log_alpha[-1] = -9  # one of the last layer's two groups of heads
    small = l0prune.export(model)
    said = small.save_pretrained(tmp_path / "model")
    assert said.endswith("So does Step3p7TextModel.from_pretrained of transformers.")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    special = {"1": {"num_attention_heads": 2, "num_key_value_heads": 1}}
    assert written["per_layer_config"] == special
    loaded = transformers.Step3p7TextModel.from_pretrained(tmp_path / "model")
    assert same(loaded, small.module)


CANNOT = {
    "layers that differ": (
        llama, "*", {"layers": 2},
        r"mlp\.gate_proj\.weight is \d+×\d+ in one layer and \d+×\d+ in another",
    ),
    "a layer of ours": (
        bert, "*", {}, r"LayerNorm has become a CutLayerNorm, which is no layer of transformers",
    ),
    "no number for it": (
        bert, ("*.pooler.dense",), {},
        r"pooler\.dense\.weight is \d+×\d+ where it was \d+×\d+, for which a configuration",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CANNOT)
@pytest.mark.one_in(3)
def test_where_it_cannot_it_says_why_and_transformers_refuses(name, tmp_path):
    make, include, settings, words = CANNOT[name]
    dense = exported(make, include, **settings)
    said = dense.save_pretrained(tmp_path / "model")
    first, second = said.splitlines()
    assert first == f'l0prune.from_pretrained("{tmp_path}/model") loads it.'
    assert second.startswith("transformers cannot load it by itself: ")
    assert re.search(words, second)
    assert same(l0prune.from_pretrained(tmp_path / "model"), dense.module)
    with pytest.raises((RuntimeError, ValueError)):
        type(dense.module).from_pretrained(tmp_path / "model")


def test_norms_whose_small_number_differs_are_not_said_to_be_alike(tmp_path, monkeypatch):
    dense = copy.deepcopy(exported(llama))
    dense.module.model.norm.variance_epsilon *= 3
    dense._manifest["attributes"]["model.norm"]["variance_epsilon"] *= 3
    said = dense.save_pretrained(tmp_path / "model")
    assert "transformers cannot load it by itself: model" in said
    assert "variance_epsilon would be" in said
    again = l0prune.from_pretrained(tmp_path / "model")
    assert again.model.norm.variance_epsilon == dense.module.model.norm.variance_epsilon


def test_what_has_learned_since_is_written_as_it_is(tmp_path):
    dense = copy.deepcopy(exported(llama))
    with torch.no_grad():
        dense.module.lm_head.weight.add_(1)
    dense.save_pretrained(tmp_path / "model")
    assert same(l0prune.from_pretrained(tmp_path / "model"), dense.module)
    assert not same(dense.module, exported(llama).module)


@pytest.mark.slow
def test_a_dtype_and_tensors_that_the_code_makes_in_another(tmp_path):
    torch.manual_seed(0)
    model = randomise(llama()).to(torch.bfloat16).eval()  # its frequencies, too
    l0prune.gate(model, (), {"input_ids": IDS}, include="*.gate_proj")
    small = l0prune.export(close_some(model, seed=1))
    said = small.save_pretrained(tmp_path / "model")
    assert "loads it" in said.splitlines()[0]
    again = l0prune.from_pretrained(tmp_path / "model")
    assert again.dtype == torch.bfloat16
    assert same(again, small.module)


def manifest_of(folder):
    return json.loads((folder / "l0prune.json").read_text())


def with_config(folder, change):
    manifest = manifest_of(folder)
    change(manifest["origin"])
    (folder / "l0prune.json").write_text(json.dumps(sealed(manifest)))


BAD = {
    "no such class": (lambda o: o.update(transformers="Nothing"), "a Nothing, which transformers"),
    "no model": (lambda o: o.update(transformers="pipeline"), "a pipeline, which transformers"),
    "a path": (lambda o: o.update(transformers="os.system"), "a os.system, which transformers"),
    "no sizes": (lambda o: o["config"].update(hidden_size="x"), "does not say how to build"),
    "other sizes": (lambda o: o["config"].update(hidden_size=8), "does not fit a model of these"),
    "another": (
        lambda o: o.update(transformers="BertModel", config={"hidden_size": 12}),
        "another architecture, a LlamaForCausalLM: the model has no",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.one_in(3)
def test_configurations_that_are_wrong(name, tmp_path):
    exported(llama).save_pretrained(tmp_path / "model")
    change, words = BAD[name]
    with_config(tmp_path / "model", change)
    with pytest.raises(FileError, match=words) as caught:
        l0prune.from_pretrained(tmp_path / "model")
    assert len(str(caught.value).splitlines()) == 1


def test_nothing_is_fetched_or_run_because_a_configuration_says_so(tmp_path, monkeypatch):
    exported(llama).save_pretrained(tmp_path / "model")
    asked = {
        "attn_implementation": "somebody/kernel", "_attn_implementation": "somebody/kernel",
        "auto_map": {"AutoModel": "code.Model"}, "quantization_config": {"quant_method": "x"},
    }  # fmt: skip
    with_config(tmp_path / "model", lambda origin: origin["config"].update(asked))
    seen = []
    real = transformers.LlamaConfig.from_dict.__func__

    def noting(cls, data, **options):
        seen.append(data)
        return real(cls, data, **options)

    monkeypatch.setattr(transformers.LlamaConfig, "from_dict", classmethod(noting))
    assert same(l0prune.from_pretrained(tmp_path / "model"), exported(llama).module)
    assert not asked.keys() & seen[0].keys()


def test_a_graph_is_not_written(tmp_path):
    class Numbered(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

        def forward(self, x):
            h = self.a(x).relu()
            return self.b(h * h.shape[-1])

    torch.manual_seed(0)
    model = l0prune.gate(Numbered().eval(), torch.randn(2, 4), exclude="*.in", keep_class=False)
    small = l0prune.export(close_some(model, seed=1))
    assert not small.rebuilt
    with pytest.raises(UsageError, match="it is for models of their own class, and The module is"):
        small.save_pretrained(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_old_files_of_ours_go_and_others_stay(tmp_path):
    folder = tmp_path / "model"
    exported(llama).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    torch.manual_seed(0)
    model = l0prune.gate(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)), IDS[:, :4].float()
    )
    l0prune.export(close_some(model)).save_pretrained(folder)
    names = {path.name for path in folder.iterdir()}
    assert names == {"tokenizer.json", "l0prune.json", "model.safetensors"}


@pytest.mark.slow
def test_networks_of_timm_and_torchvision_are_known_as_they_come(tmp_path):
    timm, torchvision = pytest.importorskip("timm"), pytest.importorskip("torchvision")
    x = torch.randn(2, 3, 32, 32)
    for make, spec in (
        (lambda: timm.create_model("test_resnet.r160_in1k"), "timm:test_resnet"),
        (lambda: torchvision.models.squeezenet1_1(), "torchvision:squeezenet1_1"),
    ):
        torch.manual_seed(0)
        model = l0prune.gate(
            make().eval(), x, include="*conv1*" if "timm" in spec else "features.*"
        )
        small = l0prune.export(close_some(model))
        assert (
            small.save_pretrained(tmp_path / "m")
            == f'l0prune.from_pretrained("{tmp_path}/m") loads it.'
        )
        assert manifest_of(tmp_path / "m")["origin"]["spec"].startswith(spec)
        assert torch.equal(l0prune.from_pretrained(tmp_path / "m")(x), small.module.eval()(x))
