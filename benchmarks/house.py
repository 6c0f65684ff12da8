"""Size and shape of the code: what a newcomer has to read, and how plainly it is written.

    python -m benchmarks.house

Prints, for the core, the features, the whole package, tests and benchmarks: lines and files; then
functions that are long or complex (McCabe, by ruff), docstrings that open as a riddle or a
question, and private names of other packages outside ``capture/compat.py``.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "l0prune"
FEATURES = PACKAGE / "features"
COMPLEXITY, LENGTH = 15, 70
COMPAT = PACKAGE / "capture" / "compat.py"
FOREIGN = "torch|torchvision|transformers|onnx|onnxscript|onnx_ir|onnxruntime|timm"
RIDDLE = re.compile(
    r"(What|How|Where|Which|Whether|Who|Why|Those|That|The same|Of|In|With|As|By|It|None|Nobody|"
    r"Does|Is|Are|Do)\b"
)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def lines(folder: Path) -> int:
    """Return the number of lines of all Python files below a folder."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def definitions() -> Iterator[tuple[Path, ast.AST]]:
    """Yield each module, class and function of the package with its file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, *Definition.__args__)):
                yield path, node


def is_riddle(docstring: str) -> bool:
    """Return whether the first line is a question, or opens with none of its own nouns."""
    first = docstring.splitlines()[0]
    return bool(RIDDLE.match(first)) or first.rstrip().endswith("?")


def private_names() -> list[str]:
    """Return the places that import or read a private name of another package."""
    direct = re.compile(rf"\b(?:{FOREIGN})(?!\.ops\.)(?:\.\w+)*\._[a-z]\w*")
    imported = re.compile(rf"from (?:{FOREIGN})[\w.]* import .*\b_[a-z]\w*")
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != COMPAT
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if direct.search(line) or imported.search(line)
    ]


def complex_functions() -> list[str]:
    """Return the functions whose cyclomatic complexity is above the limit, by ruff."""
    limit = f"lint.mccabe.max-complexity={COMPLEXITY}"
    command = ["ruff", "check", "--isolated", "--select", "C901", "--config", limit]
    done = subprocess.run(
        [sys.executable, "-m", *command, "--output-format", "json", str(PACKAGE)],
        capture_output=True,
        text=True,
    )
    return [found["message"].split("`")[1] for found in json.loads(done.stdout)]


def show(folders: Iterable[Path]) -> None:
    """Print lines and files of the folders, the longest first."""
    found = (each for each in folders if each.is_dir() and not each.name.startswith("__"))
    for each in sorted(found, key=lines, reverse=True):
        print(f"  {each.name:14}{lines(each):7,} lines {len(list(each.rglob('*.py'))):4} files")


def main() -> None:
    every = list(definitions())
    documented = [(path, doc) for path, node in every if (doc := ast.get_docstring(node))]
    riddles = [path for path, doc in documented if is_riddle(doc)]
    functions = [(p, n) for p, n in every if not isinstance(n, (ast.Module, ast.ClassDef))]
    long = [n.name for _, n in functions if n.end_lineno - n.lineno + 1 > LENGTH]
    found = private_names()
    entries = [path for path in PACKAGE.iterdir() if not path.name.startswith("__pycache__")]
    files = len(list(PACKAGE.rglob("*.py")))
    print(
        f"l0prune/: {lines(PACKAGE):,} lines in {files} files, {len(entries)} entries at its root"
    )
    of_features, in_features = lines(FEATURES), len(list(FEATURES.rglob("*.py")))
    core = lines(PACKAGE) - of_features
    print(f"core: {core:,} lines in {files - in_features} files")
    show(entry for entry in entries if entry != FEATURES)
    print(f"features: {of_features:,} lines in {in_features} files")
    show(FEATURES.iterdir())
    for name in ("tests", "benchmarks"):
        count = len(list((ROOT / name).rglob("*.py")))
        print(f"{name}/: {lines(ROOT / name):,} lines in {count} files")
    print(f"riddles: {len(riddles)} of {len(documented)} docstrings")
    above = complex_functions()
    print(f"complexity above {COMPLEXITY}: {len(above)}: {', '.join(above)}")
    print(f"functions over {LENGTH} lines: {len(long)}: {', '.join(long)}")
    print(f"private names of other packages: {len(found)}: {', '.join(found)}")


if __name__ == "__main__":
    main()
