# SPDX-License-Identifier: Apache-2.0
"""Links from pages to files of the repository outside docs/ lead to a page with that file.

On the pages they are plain relative links, so they work where the Markdown itself is read.
"""

import os
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "files"


def _lexer(path):
    if path.suffix in (".cu", ".cuh", ".h"):
        return get_lexer_by_name("cuda")
    try:
        return get_lexer_for_filename(path.name)
    except ClassNotFound:
        return get_lexer_by_name("text")


def _link(app, doctree):
    """Replace downloads of files outside docs/ by links to their pages."""
    page = app.env.docname
    for node in list(doctree.findall(addnodes.download_reference)):
        path = Path(app.env.relfn2path(node["reftarget"], page)[1]).resolve()
        if path.is_relative_to(app.srcdir) or not path.is_relative_to(ROOT):
            continue
        name = path.relative_to(ROOT).as_posix()
        app.env.source_pages[name] = page
        uri = f"{os.path.relpath(f'{FOLDER}/{name}', os.path.dirname(page) or '.')}.html"
        link = nodes.reference("", "", *node.children, refuri=uri, internal=True)
        node.replace_self(link)


def _pages(app):
    for name in sorted(app.env.source_pages):
        path = ROOT / name
        code = highlight(path.read_text(encoding="utf-8"), _lexer(path), HtmlFormatter())
        body = f"<h1>{name}</h1>\n{code}"
        yield f"{FOLDER}/{name}", {"title": name, "body": body}, "page.html"


def setup(app):
    app.connect("builder-inited", lambda app: setattr(app.env, "source_pages", {}))
    app.connect("doctree-read", _link)
    app.connect("html-collect-pages", _pages)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
