"""Families of transformers in a process without l0prune: load, generate, pipeline, PEFT."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES, IDS, TOKENS, inputs, smaller, transformers

# Runs with the folders of networks as arguments, each with what the small module computed.
ALONE = """
import sys
sys.modules["l0prune"] = None
from pathlib import Path
import torch, transformers
from transformers import AutoTokenizer, pipeline

def same(found, expected, what):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4, msg=lambda m: f"{what}: {m}")

for folder in map(Path, sys.argv[1:]):
    given = torch.load(folder / "expected.pt")
    auto = getattr(transformers, "AutoModelFor" + given["auto"])
    model, loading = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not any(type(part).__module__.startswith("l0prune") for part in model.modules())
    model.eval()
    with torch.no_grad():
        same(model(**given["inputs"]).logits, given["logits"], f"{folder.name}: outputs")
    ids = given["inputs"]["input_ids"]
    if "tokens" in given:
        for cache in (True, False):
            made = model.generate(ids, use_cache=cache, **given["asked"])
            assert torch.equal(made, given["tokens"]), f"{folder.name}: tokens, cache: {cache}"
    words = AutoTokenizer.from_pretrained(folder)
    if given["auto"] == "CausalLM":
        answer = pipeline("text-generation", model=str(folder), tokenizer=words)
        (said,) = answer("w5 w7", max_new_tokens=3, do_sample=False)
        assert said["generated_text"].startswith("w5 w7")
    elif given["auto"] == "MaskedLM":
        (found,) = pipeline("feature-extraction", model=str(folder), tokenizer=words)("w5 w7")
        assert len(found[0]) == given["hidden"]
    try:
        import peft
    except ImportError:
        continue
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=True)
    tuned = peft.get_peft_model(model, config)
    with torch.no_grad():
        same(tuned(**given["inputs"]).logits, given["logits"], f"{folder.name}: with LoRA")
    tuned.train()
    tuned(**given["inputs"]).logits.square().mean().backward()
    moved = [p.grad for n, p in tuned.named_parameters() if "lora_B" in n]
    assert moved and all(grad is not None and grad.isfinite().all() for grad in moved)
print("all are right")
"""
ASKED = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def words(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = Tokenizer(models.WordLevel({f"w{n}": n for n in range(TOKENS)}, unk_token="w0"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "w1", "eos_token": "w2", "pad_token": "w0"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=known, **special).save_pretrained(folder)


def written(name, folder):
    small = smaller(name)
    assert small.params < small.params_before
    assert "So does" in small.save_pretrained(folder)
    for each in ("l0prune.json", "l0prune_model.py"):
        (folder / each).unlink(missing_ok=True)
    words(folder)
    module, auto = small.module.eval(), FAMILIES[name][0]
    expected = {"auto": auto, "inputs": inputs(name), "asked": ASKED}
    expected["hidden"] = module.get_input_embeddings().weight.shape[1]
    with torch.no_grad():
        expected["logits"] = module(**inputs(name)).logits
    if auto != "MaskedLM":
        expected["tokens"] = module.generate(IDS, **ASKED)
    torch.save(expected, folder / "expected.pt")


@pytest.mark.parametrize("names", [("llama",), tuple(FAMILIES)], ids=["one", "all"])
@pytest.mark.slow
def test_a_process_without_l0prune_uses_them(names, tmp_path):
    for name in names:
        written(name, tmp_path / name)
    script = tmp_path / "alone.py"
    script.write_text(ALONE, encoding="utf-8")
    given = [sys.executable, str(script), *(str(tmp_path / name) for name in names)]
    here = {"OMP_NUM_THREADS": "1", "PATH": str(Path(sys.executable).parent)}
    done = subprocess.run(given, env=here, capture_output=True, text=True, check=False)
    assert "all are right" in done.stdout, done.stderr[-3000:]
