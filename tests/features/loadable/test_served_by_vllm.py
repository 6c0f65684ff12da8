"""The script that compares a folder in vLLM with PyTorch, beside a stand-in for vLLM."""

import math
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import served_by_vllm
import torch
from families import TOKENS, built
from test_families_alone import words


def answer(logits, likeliest=5, moved=0.0):
    """What vLLM gives for a text: the likeliest tokens of each place but the first."""
    given = [None]
    for row in logits[:-1].log_softmax(-1):
        best = row.topk(likeliest).indices.tolist()
        given.append({token: SimpleNamespace(logprob=float(row[token]) + moved) for token in best})
    return given


def test_differences_are_those_of_the_log_probabilities():
    torch.manual_seed(0)
    logits = [torch.randn(4, 9), torch.randn(3, 9)]
    found = served_by_vllm.compare(logits, [answer(each) for each in logits])
    assert (found.places, found.compared, found.alike) == (5, 25, 5)
    assert found.largest < 1e-6
    moved = [answer(logits[0], moved=0.5), answer(logits[1])]
    found = served_by_vllm.compare(logits, moved)
    assert found.largest == pytest.approx(0.5, abs=1e-6)
    assert found.total / found.compared == pytest.approx(0.3, abs=1e-6)
    worst = int(logits[1][0].argmin())
    swapped = [*answer(logits[1])]
    swapped[1] = {worst: SimpleNamespace(logprob=float(logits[1][0].log_softmax(-1)[worst]))}
    assert served_by_vllm.compare(logits[1:], [swapped]).alike == 1
    assert "at 5 places differ by 3.00e-01 in the mean and 5.00e-01 at most" in str(found)


def test_answers_that_are_none_are_refused():
    logits = [torch.randn(3, 9)]
    with pytest.raises(ValueError, match="vLLM read 2 tokens, and PyTorch 3"):
        served_by_vllm.compare(logits, [answer(logits[0])[:2]])
    for wrong in ({}, {1: SimpleNamespace(logprob=math.nan)}, None):
        given = answer(logits[0])
        given[2] = wrong
        with pytest.raises(ValueError, match="no finite log probabilities of token 2"):
            served_by_vllm.compare(logits, [given])


class Server:
    """A stand-in for vLLM's ``LLM``: transformers, with a shift of the log probabilities."""

    moved = 0.0

    def __init__(self, model, dtype, trust_remote_code, enforce_eager):
        assert not trust_remote_code
        assert enforce_eager
        self.folder, self.dtype = Path(model), dtype

    def generate(self, prompts, asked):
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        logits = served_by_vllm.by_torch(self.folder, ids, self.dtype)
        given = (answer(each, asked.prompt_logprobs, self.moved) for each in logits)
        return [SimpleNamespace(prompt_logprobs=each) for each in given]


def test_the_script_says_in_one_line_whether_it_is_served_right(tmp_path, monkeypatch, capsys):
    built("llama").save_pretrained(tmp_path)
    words(tmp_path)
    vllm = types.ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = Server, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    text = " ".join(f"w{n % TOKENS}" for n in range(7))
    given = [str(tmp_path), "--text", text, "--text", "w3 w4", "--dtype", "float32"]
    assert served_by_vllm.main(given) == 0
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith(f"right: {tmp_path}: 35 log probabilities at 7 places differ by ")
    assert int(said.rpartition(" ")[2]) >= 6  # two tokens may be as likely
    monkeypatch.setattr(Server, "moved", 0.3)
    assert served_by_vllm.main(given) == 1
    assert capsys.readouterr().out.startswith("WRONG: ")


def test_help_needs_no_vllm(capsys):
    with pytest.raises(SystemExit) as left:
        served_by_vllm.main(["--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0
    assert "--reference" in said
    assert "a folder of save_vllm, and the other one" in said
