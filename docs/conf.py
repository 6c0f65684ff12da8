"""The documentation site: ``sphinx-build -W docs build/docs`` fails on a broken link or name."""

import l0prune

project = "l0prune"
release = version = l0prune.__version__
copyright = "the l0prune developers"  # Sphinx reads this name
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_theme = "furo"
html_title = "l0prune"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_ambiguous"]
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
