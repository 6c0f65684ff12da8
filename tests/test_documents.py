"""What README, docs and CONTRIBUTING point at is there, and the site builds."""

import ast
import copy
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import l0prune
from l0prune.training.settings import Settings

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
_NO_MODULES = ("toml", "json", "run", "preprocessing", "source", "int8")
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_leads_to_a_file(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_name_of_the_package_can_be_reached(page):
    for name in set(re.findall(r"\bl0prune(?:\.[A-Za-z_]\w*)+", page.read_text())):
        found = l0prune
        for attribute in name.split(".")[1:]:
            # l0prune.toml is a file, MODEL.run a folder, the others are keys in ONNX files
            if found is l0prune and attribute in _NO_MODULES:
                break
            try:
                found = getattr(found, attribute)
            except AttributeError:
                found = importlib.import_module(f"{found.__name__}.{attribute}")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_file_and_benchmark_that_is_named_exists(page):
    text = page.read_text()
    for name in re.findall(r"python -m (benchmarks\.[a-z0-9_]+)", text):
        assert importlib.util.find_spec(name), name
    for name in re.findall(r"`((?:tests|benchmarks|l0prune|docs)/[\w/]+\.(?:py|md|toml))`", text):
        assert (ROOT / name).is_file(), name


def _table_of_defaults():
    """The rows of the page on choosing a budget: names of settings, and what is said of them."""
    page = (ROOT / "docs/howto/choose-a-budget.md").read_text()
    section = page.split("## Defaults")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`(\w+)`", names), said) for names, said in rows]


DEFAULTS = [pytest.param(*row, id=" ".join(row[0])) for row in _table_of_defaults()]


@pytest.mark.parametrize(("names", "said"), DEFAULTS)
def test_the_table_of_defaults_is_that_of_the_settings(names, said):
    found = re.findall(r"(\d+(?:\.\d+)?(?:e-?\d+)?)( %)?", said)
    numbers = [float(number) / (100 if percent else 1) for number, percent in found]
    for name in names:
        default = Settings.model_fields[name].default
        if isinstance(default, str):
            assert default in said.lower()
        elif isinstance(default, bool):
            assert ("on" if default else "off") in said.split(", ")[-1]
        elif default is not None:
            assert default in numbers


def _examples():
    """The code of the pages on tasks: what all of it begins with, and each section's own."""
    start, *sections = (ROOT / "docs/tasks.md").read_text().split("\n## ")
    other, *more = (ROOT / "docs/dense-tasks.md").read_text().split("\n## ")
    assert re.findall(r"```python\n.*?```", other, re.DOTALL)[0] in start
    sections += more
    blocks = [re.findall(r"```python\n(.*?)```", text, re.DOTALL) for text in (start, *sections)]
    names = [text.split("\n")[0] for text in sections]
    return blocks[0], {name: code for name, code in zip(names, blocks[1:], strict=True) if code}


START, EXAMPLES = _examples()


def test_there_is_an_example_of_every_kind_of_task():
    kinds = "Regression Several Without Two Segmentation Language Detection"
    assert [name.split()[0] for name in EXAMPLES] == kinds.split()


KINDS = [
    pytest.param(name, marks=pytest.mark.slow if name.startswith("Detection") else ())
    for name in EXAMPLES
]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.one_in(3)
def test_the_examples_of_tasks_run(name, capsys):
    if name == "Language modelling":
        pytest.importorskip("transformers")
    scope = {}
    for code in (*START, *EXAMPLES[name]):
        exec(compile(code, name, "exec"), scope)
    last = scope["history"].last
    if name != "Without labels":  # whose loss begins at 0
        assert last["train_loss"] < scope["history"].records[0]["train_loss"]
    assert scope["small"].params == last["params"] < last["dense_params"]
    assert scope["history"].metric in last
    assert ("error" in last) == (name == "Segmentation")
    assert f"epoch {last['epoch']}/" in capsys.readouterr().err


def _alike(network, before, images):
    """The share of images that two networks put into one class."""
    with torch.no_grad():
        found, expected = (net(images).argmax(1) for net in (network, before))
    return (found == expected).double().mean().item()


class _Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.fc = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 4)
        self.layer1, self.layer2, self.layer3 = (self._block() for _ in range(3))

    def _block(self):
        return _Block(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1))

    def forward(self, x):
        x = self.conv1(x)
        for layer in (self.layer1, self.layer2, self.layer3):
            x = layer(x)
        return self.fc(x.relu().mean((2, 3)))


class _Block(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def _with_a_network():
    """What the snippets of the how-to guides take for granted, of a small residual network."""
    torch.manual_seed(0)
    example = torch.randn(8, 3, 8, 8)
    loader = [(example, torch.randint(0, 4, (8,))) for _ in range(2)]
    return {
        "model": _Residual().eval(),
        "example": example,
        "loader": loader,
        "held_out": loader,
        "epochs": 16,
    }


def _with_a_transformer():
    """The same of a small BERT."""
    from transformers import BertConfig, BertForSequenceClassification

    def build():
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=20,
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=4,
                intermediate_size=32,
            )
        ).eval()

    torch.manual_seed(0)
    ids = torch.randint(0, 20, (8, 6))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    loader = [inputs | {"labels": torch.randint(0, 2, (8,))} for _ in range(2)]
    return {"model": build(), "inputs": inputs, "loader": loader, "build": build}


def _with_a_vocabulary():
    """The same of a small Llama of 9,000 words, and a text beside it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(9000)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9000, intermediate_size=24, **sizes))
    Path("corpus.txt").write_text("w7 w8 w9", encoding="utf-8")
    fast = PreTrainedTokenizerFast(tokenizer_object=words)
    return {"model": model, "tokenizer": fast, "loader": []}


def _with_a_mixture():
    """The same of a small Mixtral of eight experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 20}
    model = MixtralForCausalLM(MixtralConfig(**sizes)).eval()
    return {"model": model, "inputs": torch.randint(0, 20, (8, 6)), "loader": []}


GUIDES = {
    path.stem: blocks
    for path in sorted((ROOT / "docs/howto").glob("*.md"))
    if (blocks := re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
}


LONG = {
    # A YOLO takes its time, and four steps are too few for its gates, as a warning says.
    "detectors": (pytest.mark.slow, pytest.mark.filterwarnings("ignore")),
    # torchao loads for seconds, and tests/integrations/test_quantized.py reads the same page.
    "in-eight-bits": pytest.mark.slow,
}


@pytest.mark.parametrize(
    "guide", [pytest.param(guide, marks=LONG.get(guide, ())) for guide in GUIDES]
)
@pytest.mark.filterwarnings("ignore:l0prune. exit")  # which random labels may leave without inputs
@pytest.mark.one_in(8)
def test_the_examples_of_how_to_guides_run(guide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(GUIDES[guide])
    for package in ("torchao", "ultralytics"):
        if package in code:
            pytest.importorskip(package)
    if ".cuda()" in code and not torch.cuda.is_available():
        pytest.skip("its examples are for a GPU, and there is none")
    if guide in ("load-the-result", "free-sizes"):
        pytest.importorskip("transformers")
        scope = _with_a_transformer()
        args = ((), scope["inputs"])
    elif guide == "vocabulary":
        pytest.importorskip("transformers")
        scope, args = _with_a_vocabulary(), ()
    elif guide == "experts":
        pytest.importorskip("transformers")
        scope = _with_a_mixture()
        args = (scope["inputs"],)
    else:
        scope = _with_a_network()
        args = (scope["example"],)
        scope["inputs"] = torch.randn(32, *scope["example"].shape[1:])
        scope["network"] = before = copy.deepcopy(scope["model"])
        scope["images"] = images = scope["inputs"]
        scope["right"] = lambda network: _alike(network, before, images)
    if '"model.onnx")' in code and "save_onnx" not in code:
        torch.onnx.export(scope["model"], args, "model.onnx", dynamo=True)
    data = (scope["loader"], scope["loader"])
    criterion = nn.functional.cross_entropy
    scope |= {"l0prune": l0prune, "torch": torch, "data": data, "criterion": criterion}
    if "l0prune.gate(" not in code:
        l0prune.gate(scope["model"], *args)
    if "small =" not in code and "small." in code:
        l0prune.fit(scope["model"], "params=0.8", l0prune.score(scope["model"], "magnitude"))
        scope["small"] = l0prune.export(scope["model"])
    whole = sum(p.numel() for p in scope["model"].parameters())
    exec(compile(code, guide, "exec"), scope)
    if guide == "experts":  # of which little else can be cut
        assert scope["result"].params < whole
        return
    if "small" not in scope:
        l0prune.fit(scope["model"], "params=0.9", l0prune.score(scope["model"], "magnitude"))
    exported = scope.get("small") or l0prune.export(scope["model"])
    assert exported.params < exported.params_before


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("myst_nb", reason="pip install '.[docs]'")
    options = ["-W", "--keep-going", "-q", "-D", "nb_execution_mode=off"]  # test_tutorials.py
    options += ["-D", "suppress_warnings=myst-nb.lexer"]  # known from what ran alone
    options += ["-D", "gallery=0"]  # the next test
    command = [sys.executable, "-m", "sphinx", *options, "docs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "l0prune.survey" in (tmp_path / "api.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "vit", "decoder", "detector", "milliseconds"])
def test_the_gallery_shows_budgets_that_are_met(name, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    gallery = importlib.import_module("benchmarks.gallery")
    assert name in gallery.WORKS
    assert f'href="gallery/{name}.html"' in (ROOT / "docs/gallery.md").read_text()
    gallery.write(name, tmp_path)
    found = l0prune.Report.load(tmp_path / f"{name}.json").content
    (budget,) = found.budgets
    assert budget.share <= budget.limit * (1.1 if name == "milliseconds" else 1)
    assert [each.name for each in found.trainings] == ["dense", "finetune"]
    assert found.certificate is not None
    assert (tmp_path / f"{name}.html").is_file()


@pytest.mark.slow
def test_a_wheel_holds_all_that_the_main_job_needs(tmp_path):
    """The bare environment itself is CI's; here the wheel is put before everything else."""
    pytest.importorskip("sklearn")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert l0prune.__version__ in wheel.name
    home = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", home, wheel], check=True)
    code = "import l0prune; print(l0prune.__file__); from l0prune.cli.app import main; main()"
    job = ("run", "digits-wide", "dense.epochs=1", "finetune.epochs=1", "finetune.settle=0.2")
    done = subprocess.run(
        [sys.executable, "-c", code, *job],
        cwd=tmp_path,
        env={"PYTHONPATH": str(home), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(home))
    assert list(tmp_path.rglob("*.onnx"))


def test_every_test_that_a_page_names_exists():
    """Tests that stand for what works are there."""
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"^def (test_\w+)", tests, re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert named
    assert named <= there, named - there


def _texts(path):
    """The texts in a Python file, each in one piece; what is put in counts for nothing."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (each.value for each in node.values if isinstance(each, ast.Constant))
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_page_and_section_that_a_message_names_exists():
    texts = {text for path in (ROOT / "l0prune").rglob("*.py") for text in _texts(path)}
    pages = {page for text in texts for page in re.findall(r"\b(?:docs/)?[\w/-]+\.md\b", text)}
    assert len(pages) > 2
    assert not {page for page in pages if not (ROOT / page).is_file()}
    named = {
        found for text in texts for found in re.findall(r"(docs/[\w/-]+\.md), '([^']+)'", text)
    }
    assert len(named) > 1
    missing = [
        (page, section)
        for page, section in named
        if not re.search(rf"^#+ {re.escape(section)}$", (ROOT / page).read_text(), re.MULTILINE)
    ]
    assert not missing
