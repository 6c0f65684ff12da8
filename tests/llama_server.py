"""llama.cpp itself, run on a file in a process of its own: a fault of it ends that one alone."""

import json
import math
import subprocess
import sys
from importlib.util import find_spec

import pytest
from processes import LONGEST

runs = pytest.mark.skipif(
    find_spec("xllamacpp") is None, reason="llama.cpp (the package xllamacpp) is not installed"
)

SCRIPT = """
import json, sys, urllib.request
import xllamacpp as x

path, asked = sys.argv[1], json.loads(sys.argv[2])
params = x.CommonParams()
params.model.path = path
params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 256, 1, False, 1
params.fit_params = False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_type_k = params.cache_type_v = x.ggml_type.GGML_TYPE_F32
params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = x.Server(params)
known = {"temperature": 0, "cache_prompt": False, "return_tokens": True, "ignore_eos": True}
answers = []
for where, each in asked:
    data = json.dumps({**known, **each}).encode()
    request = urllib.request.Request(f"{server.listening_address}/{where}", data)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        answers.append(json.load(answer))
print(json.dumps(answers))
"""


def answers(path, asked):
    """The answers of llama.cpp's server with this file to requests, each after its address."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def log_probabilities(path, texts, vocabulary):
    """Of each token of a vocabulary, after each text of token numbers."""
    more = {"n_predict": 1, "n_probs": vocabulary}
    found = []
    for answer in answers(path, [("completion", {"prompt": text, **more}) for text in texts]):
        (first,) = answer["completion_probabilities"]
        by_token = {each["id"]: each["logprob"] for each in first["top_logprobs"]}
        assert len(by_token) == vocabulary
        found.append([by_token[number] for number in range(vocabulary)])
    return found


def greedy(path, text, count):
    """The tokens that are most likely after a text, one after the other."""
    (answer,) = answers(path, [("completion", {"prompt": text, "n_predict": count})])
    return answer["tokens"]


def tokenized(path, texts):
    """The numbers of the tokens of texts."""
    asked = [("tokenize", {"content": text, "add_special": True}) for text in texts]
    return [answer["tokens"] for answer in answers(path, asked)]


def perplexity(log_probabilities, tokens):
    each = [of[token] for of, token in zip(log_probabilities, tokens, strict=True)]
    return math.exp(-sum(each) / len(each))
