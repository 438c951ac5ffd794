# SPDX-License-Identifier: Apache-2.0
"""What lies outside docs/: a few Markdown files are pages of the site, and links show the others.

In the Markdown all of these are plain relative links, so they work where that is read as well. A
link to a file that is not there is a warning, as any other broken link.
"""

import os
import re
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "files"

#: Pages whose text is that of a file elsewhere.
PAGES = {"readme": "README.md", "kernels": "kernels/README.md", "contributing": "CONTRIBUTING.md"}

_LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")
_PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)


def _read(app, page, text):
    """Take the text of a page from its file, with links from there; pictures by light and dark."""
    file = ROOT / PAGES[page] if page in PAGES else Path(app.env.doc2path(page))
    folder = (Path(app.srcdir) / page).parent

    def here(name):
        return os.path.relpath(file.parent / name, folder)

    def picture(match):
        dark, alt, light = match.groups()
        sides = (("dark", dark), ("light", light))
        return "\n\n".join(
            f"```{{image}} {here(name)}\n:class: only-{side}\n:alt: {alt}\n```"
            for side, name in sides
        )

    if page in PAGES:
        text[0] = _LINK.sub(lambda m: f"]({here(m[1])})", file.read_text(encoding="utf-8"))
    if file.suffix == ".md":
        text[0] = _PICTURE.sub(picture, text[0])


def _link(app, doctree):
    """Let links to files outside docs/ lead to the pages that show them."""
    page = app.env.docname
    for node in list(doctree.findall(addnodes.pending_xref)):
        if node.get("refdomain") == "doc" and node["reftarget"] not in app.env.found_docs:
            path = Path(f"{node['reftarget']}.md")
            known = next((x for x, name in PAGES.items() if ROOT / name == path), None)
            if known:
                node["reftarget"] = known
            else:
                _show(app, page, node, path)
        elif node.get("reftype") == "myst" and not node.get("refdomain"):  # a folder, or nothing
            _show(app, page, node, Path(app.env.relfn2path(node["reftarget"], page)[1]).resolve())
    for node in list(doctree.findall(addnodes.download_reference)):
        _show(app, page, node, Path(app.env.relfn2path(node["reftarget"], page)[1]).resolve())


def _show(app, page, node, path):
    """Replace a link by one to the page of a file, or of a folder with its files."""
    if path.exists() and path.is_relative_to(ROOT) and not path.is_relative_to(app.srcdir):
        name = path.relative_to(ROOT).as_posix()
        app.env.shown_files |= {name, *(f"{name}/{file}" for file in _files(path))}
        uri = f"{os.path.relpath(f'{FOLDER}/{name}', os.path.dirname(page) or '.')}.html"
        node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))


def _pages(app):
    for name in sorted(app.env.shown_files):
        path = ROOT / name
        if path.is_dir():
            links = [f'<li><a href="{path.name}/{x}.html">{x}</a></li>' for x in _files(path)]
            body = f"<h1>{name}</h1>\n<ul>{''.join(links)}</ul>"
            yield f"{FOLDER}/{name}", {"title": name, "body": body}, "page.html"
            continue
        code = highlight(path.read_text(encoding="utf-8"), _lexer(path), HtmlFormatter())
        yield f"{FOLDER}/{name}", {"title": name, "body": f"<h1>{name}</h1>\n{code}"}, "page.html"


def _files(path):
    """Return the names of the files of a folder; nothing if it is none."""
    return sorted(x.name for x in path.iterdir() if x.is_file()) if path.is_dir() else []


def _lexer(path):
    if path.suffix in (".cu", ".cuh", ".h"):
        return get_lexer_by_name("cuda")
    try:
        return get_lexer_for_filename(path.name)
    except ClassNotFound:
        return get_lexer_by_name("text")


def setup(app):
    # Builds are always from scratch (-E): what is shown is known when all pages have been read.
    app.connect("builder-inited", lambda app: setattr(app.env, "shown_files", set()))
    app.connect("source-read", _read)
    app.connect("doctree-read", _link, priority=400)  # before files to download are collected
    app.connect("html-collect-pages", _pages)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
