"""Settings of the documentation: `python -m sphinx -b html -W docs build/docs`."""

from smmd_jax import __version__

project = "smmd_jax"
author = copyright = "The smmd_jax authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 3
html_theme = "furo"
exclude_patterns = ["results"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
# Pages of the repository that are not part of the documentation.
suppress_warnings = ["myst.xref_missing"]


def setup(app):
    """Show docstrings as they are typed: they are written for a terminal, formulas and tables included."""

    def verbatim(app, what, name, obj, options, lines):
        lines[:] = ["::", "", *("    " + line for line in lines), ""] if any(lines) else []

    app.connect("autodoc-process-docstring", verbatim)
