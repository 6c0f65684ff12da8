"""llama.cpp itself, run on a file in a process of its own: a fault of it ends that one alone."""

import json
import math
import subprocess
import sys

from processes import LONGEST

SCRIPT = """
import json, sys
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
print(json.dumps([server.handle_completions({**known, **each}) for each in asked]))
"""


def completions(path, asked):
    """The answers of llama.cpp's server to requests for completions."""
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
    asked = [{"prompt": text, "n_predict": 1, "n_probs": vocabulary} for text in texts]
    found = []
    for answer in completions(path, asked):
        (first,) = answer["completion_probabilities"]
        by_token = {each["id"]: each["logprob"] for each in first["top_logprobs"]}
        assert len(by_token) == vocabulary
        found.append([by_token[number] for number in range(vocabulary)])
    return found


def greedy(path, text, count):
    (answer,) = completions(path, [{"prompt": text, "n_predict": count}])
    return answer["tokens"]


def perplexity(log_probabilities, tokens):
    each = [of[token] for of, token in zip(log_probabilities, tokens, strict=True)]
    return math.exp(-sum(each) / len(each))
