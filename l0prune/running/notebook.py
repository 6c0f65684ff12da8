"""Display in notebooks: the tables of a terminal, as HTML."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

_WIDTH = 120
_FORM = '<pre style="line-height:1.2;overflow-x:auto;white-space:pre">{code}</pre>'


def as_html(shown: RenderableType) -> str:
    """Return rich's output as one HTML element without a style sheet; text is escaped."""
    console = Console(
        record=True, file=io.StringIO(), width=_WIDTH, force_jupyter=False, highlight=False
    )
    console.print(shown)
    return console.export_html(inline_styles=True, code_format=_FORM)
