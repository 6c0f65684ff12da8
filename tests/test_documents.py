"""What README, docs and CONTRIBUTING point at is there, and the site builds."""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import l0prune
from l0prune.training.settings import Settings

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
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
            # l0prune.toml is a file, MODEL.run a folder, l0prune.preprocessing a key in ONNX files
            if found is l0prune and attribute in ("toml", "json", "run", "preprocessing"):
                break
            try:
                found = getattr(found, attribute)
            except AttributeError:
                found = importlib.import_module(f"{found.__name__}.{attribute}")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_file_and_benchmark_that_is_named_exists(page):
    text = page.read_text()
    for name in re.findall(r"python -m (benchmarks\.[a-z_]+)", text):
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
    """The code of docs/tasks.md: what all of it begins with, and each section's own."""
    start, *sections = (ROOT / "docs/tasks.md").read_text().split("\n## ")
    blocks = [re.findall(r"```python\n(.*?)```", text, re.DOTALL) for text in (start, *sections)]
    names = [text.split("\n")[0] for text in sections]
    return blocks[0], {name: code for name, code in zip(names, blocks[1:], strict=True) if code}


START, EXAMPLES = _examples()


def test_there_is_an_example_of_every_kind_of_task():
    kinds = "Regression Several Without Segmentation Language Two Detection"
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
    assert scope["dense"].params == last["params"] < last["dense_params"]
    assert scope["history"].metric in last
    assert ("error" in last) == (name == "Segmentation")
    assert f"epoch {last['epoch']}/" in capsys.readouterr().err


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="pip install '.[docs]'")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "l0prune.survey" in (tmp_path / "api.html").read_text()


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
    job = ("run", "digits-lenet", "dense.epochs=1", "finetune.epochs=1", "finetune.settle=0.2")
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
    pages = {page for text in texts for page in re.findall(r"\b(?:docs/)?\w+\.md\b", text)}
    assert len(pages) > 2
    assert not {page for page in pages if not (ROOT / page).is_file()}
    named = {found for text in texts for found in re.findall(r"(docs/\w+\.md), '([^']+)'", text)}
    assert len(named) > 1
    missing = [
        (page, section)
        for page, section in named
        if not re.search(rf"^#+ {re.escape(section)}$", (ROOT / page).read_text(), re.MULTILINE)
    ]
    assert not missing
