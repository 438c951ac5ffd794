# SPDX-License-Identifier: Apache-2.0
"""The documentation site: ``make docs``, which writes build/docs."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

project = "cuflash"
author = copyright = "the cuflash contributors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "mathml", "sources"]
exclude_patterns = ["_ext", "_static"]

# Single backticks in docstrings are names of objects where there is one, else of arguments.
default_role = "py:obj"
autodoc_typehints = "none"  # numpydoc sections say what they are
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
numpydoc_show_class_members = False

myst_heading_anchors = 3  # so that links to headings are checked
myst_links_external_new_tab = False

html_theme = "furo"
html_title = "cuflash"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "native"
