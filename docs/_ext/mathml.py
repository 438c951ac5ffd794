# SPDX-License-Identifier: Apache-2.0
"""Formulas as MathML, which browsers show by themselves: no script, nothing from other servers."""

from docutils import nodes
from docutils.utils.math import latex2mathml


def _inline(self, node):
    self.body.append(latex2mathml.tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def _block(self, node):
    tex = rf"\begin{{aligned}}{node.astext()}\end{{aligned}}"
    self.body.append(latex2mathml.tex2mathml(tex, as_block=True))
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.config.html_math_renderer = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
