"""One file of plain torch that loads a smaller model where l0prune is not installed."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType

from l0prune.files.pretrained import cut_layers, given_sizes, layers, standalone

NAME = "l0prune_model.py"


def loading_code() -> str:
    """What ``standalone`` is, with all that it takes from the package written into it."""
    parts = "\n\n".join(_body(each) for each in (cut_layers, given_sizes, layers, standalone))
    return f'"""{standalone.__doc__}"""\n\n{parts}\n'


def _body(module: ModuleType) -> str:
    """The source without its docstring, and without imports from the package."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    for node in ast.parse(source).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_import = isinstance(node, ast.ImportFrom) and str(node.module).startswith(
            ("l0prune.", "__future__")
        )
        if is_import or (is_docstring and node.lineno == 1):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)  # type: ignore[operator]
    return "\n".join(lines).strip()
