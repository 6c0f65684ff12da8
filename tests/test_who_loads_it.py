"""The table of the page on who loads what: each cell is tried."""

import io
import re
import warnings
from pathlib import Path

import onnxruntime
import pytest
import torch
from llama_server import log_probabilities
from pickled import names_in
from small_llamas import VOCABULARY, built, tokenizer, transformers
from vllm_reader import is_served, read

import l0prune
from l0prune.errors import L0pruneWarning, UsageError
from l0prune.exporting.programs import FORMATS, is_missing

PAGE = Path(__file__).parents[1] / "docs" / "who-loads-it.md"
IDS = torch.tensor([[17, 3, 8, 4, 5, 61, 9], [20, 33, 74, 3, 5, 6, 7]])


def table():
    """Of each cut and program what the page says."""
    lines = [line for line in PAGE.read_text().split("\n\n")[2].splitlines() if "---" not in line]
    (_, *programs), *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {(row, p): cell for row, *of in rows for p, cell in zip(programs, of, strict=True)}


TABLE = table()


def exported(model, by, widths):
    """Cut by the first so many slots of each axis whose name has this text; none of a branch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", L0pruneWarning)
        l0prune.gate(model, (), {"input_ids": IDS}, loadable_by=by, progress=False)
    bank = l0prune.gates(model)
    for text, count in widths.items():
        found = [axis.name for axis in bank.plan.axes if re.search(text, axis.name)]
        assert found, text
        for name in found:
            bank.set_open(name, range(count))
    return l0prune.export(model, verify="float32", progress=False)


def llama(by, **widths):
    return exported(built("llama"), by, widths)


def of_experts():
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
    model = built("mixtral", **sizes)
    small = l0prune.shrink_experts(model, IDS, 3, score="load").model
    small.set_experts_implementation("batched_mm")  # of operators that a file can have
    return exported(small, "transformers", {})


def of_tokens():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    text = " ".join(f"w{n}" for n in range(80))
    model = l0prune.shrink_vocabulary(built("llama"), words, text=text).model
    return exported(model.eval(), "gguf", {})


HEADS, MLP = r"{}\.self_attn\.q_proj\.heads", r"{}\.mlp\.gate_proj$"
CUTS = {
    "MLP widths, alike in all layers": lambda: llama("transformers", **{MLP.format(""): 41}),
    "MLP widths, by layer": lambda: llama("gguf", **{MLP.format(0): 41, MLP.format(1): 64}),
    "heads, alike in all layers": lambda: llama("vllm", **{HEADS.format(""): 2}),
    "heads, by layer": lambda: llama("gguf", **{HEADS.format(0): 2, HEADS.format(1): 3}),
    "hidden size": lambda: llama("transformers", **{"embed_tokens": 48}),
    "whole layers": lambda: llama("transformers", **{r"layers\.1\.(self_attn|mlp)$": 0}),
    "one attention, one MLP": lambda: llama(
        "gguf", **{r"layers\.1\.self_attn$": 0, r"layers\.0\.mlp$": 0}
    ),
    "experts": of_experts,
    "vocabulary": of_tokens,
}


def with_l0prune(small, folder, request):
    small.save_pretrained(folder)
    return l0prune.from_pretrained(folder)(IDS).logits


def with_torch(small, folder, request):
    file = io.BytesIO()
    torch.save(small.module, file)
    assert not any(name.startswith("l0prune.") for name in names_in(file))
    file.seek(0)
    return torch.load(file, weights_only=False)(IDS).logits


def with_transformers(small, folder, request):
    said = small.save_pretrained(folder)
    if "So does" not in said:
        raise UsageError(said)
    (folder / "l0prune.json").unlink()
    return transformers.AutoModelForCausalLM.from_pretrained(folder)(IDS).logits


def with_vllm(small, folder, request):
    small.save_vllm(folder)
    config, weights = read(folder, request.getfixturevalue("monkeypatch"))
    assert is_served(small.module, config, weights, IDS)


def with_llama_cpp(small, folder, request):
    from tokenizers import pre_tokenizers

    folder.mkdir()
    tokens = small.module.config.vocab_size
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = folder / "words"
    tokenizer(words, split, "abcd", tokens)
    path = folder / "small.gguf"
    l0prune.save_gguf(small, path, tokenizer=words)
    found = torch.tensor(log_probabilities(path, IDS.tolist(), tokens))
    expected = small.module(IDS).logits[:, -1].log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def onnx_file(small, folder):
    folder.mkdir()
    (file,) = small.save_onnx(folder / "small.onnx", time=False)
    return file


def with_onnx_runtime(small, folder, request):
    session = onnxruntime.InferenceSession(onnx_file(small, folder))
    return torch.tensor(session.run(None, {"input_ids": IDS.numpy()})[0])


def with_openvino(small, folder, request):
    file = onnx_file(small, folder)  # which l0prune tries without it
    core = request.getfixturevalue("openvino").Core()
    return torch.tensor(
        core.compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([IDS.numpy()])[0]
    )


def program(ending):
    def with_program(small, folder, request):
        folder.mkdir()
        kind, path = FORMATS[ending], folder / f"small{ending}"
        if is_missing(kind):
            pytest.skip(f"{kind.label} is not installed")
        small.save(path)
        run = kind.loaded(path.read_bytes(), 1)
        return torch.cat([run(((), {"input_ids": each[None]}))[0] for each in IDS])

    return with_program


PROGRAMS = {
    "l0prune": with_l0prune,
    "torch alone": with_torch,
    "transformers": with_transformers,
    "vLLM": with_vllm,
    "llama.cpp": with_llama_cpp,
    "ONNX Runtime": with_onnx_runtime,
    "ExecuTorch": program(".pte"),
    "LiteRT": program(".tflite"),
    "OpenVINO": with_openvino,
}


@pytest.fixture(scope="module")
def smaller():
    made = {}
    return lambda cut: made.get(cut) or made.setdefault(cut, CUTS[cut]())


def test_the_table_has_all_cuts_and_programs_and_every_reason():
    assert list(dict.fromkeys(cut for cut, _ in TABLE)) == list(CUTS)
    assert list(dict.fromkeys(program for _, program in TABLE)) == list(PROGRAMS)
    reasons = re.findall(r"^- \*\*(\w)\*\*: ", PAGE.read_text(), re.MULTILINE)
    assert sorted({*TABLE.values()} - {"yes"}) == reasons


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other packages' own code
@pytest.mark.parametrize(("cut", "program"), TABLE, ids=[" - ".join(cell) for cell in TABLE])
@torch.no_grad()
def test_a_cell_of_the_table(cut, program, smaller, tmp_path, request):
    if program == "llama.cpp":
        pytest.importorskip("xllamacpp")
    small, load = smaller(cut), PROGRAMS[program]
    assert small.rebuilt, small.note
    if TABLE[cut, program] != "yes":
        with pytest.raises(UsageError):
            load(small, tmp_path / "small", request)
        return
    found = load(small, tmp_path / "small", request)
    if found is not None:
        torch.testing.assert_close(found, small.module(IDS).logits, rtol=1e-4, atol=1e-4)
