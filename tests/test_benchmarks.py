"""Benchmarks begin: what each imports is there, and its options can be parsed."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import l0prune

FOLDER = Path(l0prune.__file__).parents[1] / "benchmarks"
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("[!_]*.py"))}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_a_benchmark_begins_and_says_its_options(name, monkeypatch, capsys):
    try:
        module = importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] in ("l0prune", "benchmarks"):
            raise
        pytest.skip(f"{name} is about {error.name}, which is not installed")
    has_options = re.search(r"(parser_of|ArgumentParser|\.parse_args|options)\(", SOURCES[name])
    if not hasattr(module, "main") or not has_options:
        return
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        module.main()
    assert capsys.readouterr().out.startswith(f"usage: {name}.py")
