"""The documentation site: ``sphinx-build -W docs build/docs`` fails on a broken link or name."""

import re
import subprocess
import sys
from pathlib import Path

from sphinx.application import Sphinx

import l0prune

project = "l0prune"
release = version = l0prune.__version__
copyright = "the l0prune developers"  # Sphinx reads this name
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_theme = "furo"
html_title = "l0prune"
html_theme_options = {"top_of_page_buttons": []}
exclude_patterns = ["_build"]
nb_execution_mode = "cache"  # tutorials: run again when they have changed
nb_execution_raise_on_error = True
nb_execution_timeout = 900  # seconds for a cell, on a machine that does other things, too
nb_execution_in_temp = True
nb_output_stderr = "remove"
nb_merge_streams = True
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_ambiguous"]
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_use_ivar = True

# What axe, a checker of accessibility, misses in the pages of the theme.
_LABELS = {
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Site">',
    '<aside class="toc-drawer">': '<aside class="toc-drawer" aria-label="Page">',
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<th class="head"><p></p></th>': "<td></td>",
}
_SCROLLED = re.compile('(<pre|<div class="table-wrapper[^"]*")(?! tabindex)')  # by keys, too


def _label(app: Sphinx, error: Exception | None) -> None:
    for page in Path(app.outdir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for before, after in _LABELS.items():
            text = text.replace(before, after)
        text = _SCROLLED.sub(r'\1 tabindex="0"', text)
        page.write_text(text, encoding="utf-8")


def _gallery(app: Sphinx, error: Exception | None) -> None:
    folder = Path(app.outdir, "gallery")
    if app.config.gallery and app.builder.format == "html" and not error and not folder.exists():
        command = [sys.executable, "-m", "benchmarks.gallery", str(folder)]
        subprocess.run(command, cwd=Path(app.srcdir).parent, check=True)


def setup(app: Sphinx) -> None:
    """Label the pages when all are written, and make those of the gallery."""
    app.add_config_value("gallery", True, "", bool)
    app.connect("build-finished", _label)
    app.connect("build-finished", _gallery)
