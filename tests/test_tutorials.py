"""The tutorials run from their first cell to their last, and end where they say."""

import re
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[1] / "docs/tutorials"
# Cells that are added to each.
ENDS = {
    "cnn-in-your-own-loop": "assert small.macs <= 0.5 * small.macs_before\nassert after < 0.05",
    "timm-on-the-command-line": """
import json
(budget,) = json.loads(Path("network.run/report.json").read_text())["budgets"]
assert budget["share"] <= budget["limit"] == 0.5 and Path("network.onnx").is_file()
""",
    "hugging-face-classifier": "assert sum(right) / len(right) > 0.9",
    "decoder": "assert small.params <= 0.6 * small.params_before\nassert torch.equal(found, slow)",
    "without-labels": "assert small.macs <= 0.33 * small.macs_before\nassert after < 0.15",
}


def test_all_of_them_are_here():
    pages = {path.stem: path.read_text() for path in TUTORIALS.glob("*.md")}
    assert {name for name, text in pages.items() if "file_format: mystnb" in text} == ENDS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_a_tutorial_runs(name, tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="pip install '.[docs]'")
    client = pytest.importorskip("nbclient")
    for package in {"hugging-face-classifier": ("accelerate",), "decoder": ("transformers",)}.get(
        name, ("sklearn", "timm")
    ):
        pytest.importorskip(package)
    text = (TUTORIALS / f"{name}.md").read_text()
    code = re.findall(r"^```\{code-cell\}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(code) == text.count("{code-cell}") > 4
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(each) for each in (*code, ENDS[name])]
    client.NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
