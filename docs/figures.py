# SPDX-License-Identifier: Apache-2.0
"""The pictures of the tutorial: ``python docs/figures.py`` writes docs/figures/*.svg.

Colours come from classes whose values depend on the reader's light or dark mode.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent / "figures"

_STYLE = """
text { font: 14px system-ui, sans-serif; fill: #24292f; }
.small { font-size: 12px; }
.muted { fill: #59636e; }
.code { font: 13px ui-monospace, monospace; }
.plain { fill: #eaeef2; stroke: #8c959f; }
.none { fill: none; stroke: #afb8c1; stroke-dasharray: 3 3; }
.blue { fill: #d0e4ff; stroke: #0969da; }
.orange { fill: #ffdfbf; stroke: #bc4c00; }
.green { fill: #cdf0d2; stroke: #1a7f37; }
.line { fill: none; stroke: #59636e; stroke-width: 1.5; }
.tip { fill: #59636e; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .muted { fill: #a5aeb8; }
  .plain { fill: #2b313a; stroke: #768390; }
  .none { stroke: #545d68; }
  .blue { fill: #1b3b66; stroke: #6cb0ff; }
  .orange { fill: #5c3712; stroke: #f0954f; }
  .green { fill: #16432a; stroke: #4fc463; }
  .line { stroke: #a5aeb8; }
  .tip { fill: #a5aeb8; }
}
"""


class Picture:
    """An SVG that grows from left to right and top to bottom; sizes are in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
        ]

    def box(self, kind: str, x: float, y: float, width: float, height: float) -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        self.parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def line(self, *points: tuple[float, float], arrow: bool = True) -> None:
        """Draw through the points, with a tip at the last one; the end runs along an axis."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline class="line" points="{path}"/>')
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
            tip = [(x, y), (x - 8 * dx + 4 * dy, y - 8 * dy + 4 * dx)]
            tip.append((x - 8 * dx - 4 * dy, y - 8 * dy - 4 * dx))
            self.parts.append(
                f'<polygon class="tip" points="{" ".join(f"{a:g},{b:g}" for a, b in tip)}"/>'
            )

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def matrix() -> Picture:
    """The plain formula beside tiles that stream by."""
    p = Picture(720, 300, "The whole matrix of scores, and a tile of it at a time")
    p.text(165, 24, "the plain formula")
    p.box("blue", 40, 60, 24, 200)
    p.text(52, 280, "Q", "small")
    p.box("green", 80, 32, 200, 18)
    p.text(294, 46, "K", "small")
    p.box("orange", 80, 60, 200, 200)
    p.text(180, 156, "N x N scores,")
    p.text(180, 176, "in memory")

    p.text(535, 24, "tiles")
    p.box("blue", 400, 60, 24, 200)
    p.box("green", 440, 32, 200, 18)
    for row in range(4):
        for col in range(4):
            kind = "orange" if (row, col) == (1, 2) else "none"
            p.box(kind, 440 + 50 * col, 60 + 50 * row, 50, 50)
    p.box("plain", 400, 110, 24, 50)
    p.box("plain", 540, 32, 50, 18)
    p.line((446, 135), (532, 135))
    p.text(412, 280, "Q", "small")
    p.text(654, 46, "K", "small")
    p.text(550, 280, "one tile of scores exists, on the chip", "small muted")
    return p


def online() -> Picture:
    """What the tutorial prints of row 0."""
    p = Picture(720, 300, "The state of one row while three tiles of keys go by")
    # largest score of the tile, then maximum, factor and sum behind it
    tiles = [
        ("1.970", "1.970", "0", "7.777"),
        ("1.431", "1.970", "1", "13.769"),
        ("2.156", "2.156", "0.830", "16.147"),
    ]
    p.text(20, 46, "tile of keys", "muted small", "start")
    p.text(20, 126, "state of the row", "muted small", "start")
    for n, (largest, maximum, factor, total) in enumerate(tiles):
        x = 150 + 200 * n
        p.box("green", x, 20, 150, 44)
        p.text(x + 75, 39, f"keys {32 * n} to {32 * n + 31}", "small")
        p.text(x + 75, 56, f"largest score {largest}", "small")
        p.line((x + 75, 64), (x + 75, 92))
        p.box("blue", x, 94, 150, 62)
        p.text(x + 75, 114, f"maximum {maximum}", "small")
        p.text(x + 75, 131, f"sum {total}", "small")
        p.text(x + 75, 148, "o: weighted values", "small")
        if n:
            p.line((x - 50, 125), (x - 2, 125))
        p.box("orange", x, 186, 150, 44)
        rule = "nothing yet" if n == 0 else "unchanged" if factor == "1" else "rescaled"
        p.text(x + 75, 205, f"factor {factor}", "small")
        p.text(x + 75, 222, f"sum and o: {rule}", "small")
        p.line((x + 75, 186), (x + 75, 158))
    p.text(20, 212, "exp(before - now)", "muted small", "start")
    p.text(425, 268, "at the end: out = o / sum, lse = maximum + log(sum)", "code")
    return p


def band() -> Picture:
    """Which tiles exist in a causal call."""
    p = Picture(720, 310, "Tiles of a causal call: visited, partly hidden, never visited")
    size = 44
    for row in range(6):
        for col in range(6):
            x, y = 70 + size * col, 32 + size * row
            if col > row:
                p.box("none", x, y, size, size)
                continue
            p.box("blue" if col < row else "orange", x, y, size, size)
            if col == row:
                corner = f"{x},{y} {x + size},{y} {x + size},{y + size}"
                p.parts.append(f'<polygon class="plain" points="{corner}"/>')
    p.text(70 + 3 * size, 22, "keys", "small muted")
    p.text(58, 32 + 3 * size, "queries", "small muted", "end")
    for n, (kind, one, two) in enumerate(
        [
            ("blue", "seen as a whole:", "computed without a compare"),
            ("orange", "partly hidden:", "each pair is asked about"),
            ("none", "seen by nobody:", "never loaded, never computed"),
        ]
    ):
        y = 70 + 70 * n
        p.box(kind, 390, y, size, size)
        p.text(450, y + 19, one, anchor="start")
        p.text(450, y + 38, two, "muted", "start")
    return p


def backward() -> Picture:
    """Who owns what in the two kernels of the backward."""
    p = Picture(720, 330, "One kernel owns rows of dq, another one owns rows of dk and dv")
    p.text(180, 24, "backward_dq_simt: a block owns rows of dq", "small")
    p.text(545, 24, "backward_dkdv_simt: a block owns rows of dk, dv", "small")
    for x, walks_keys in ((60, True), (420, False)):
        for row in range(4):
            for col in range(4):
                mine = row == 1 if walks_keys else col == 2
                p.box("plain" if mine else "none", x + 50 * col, 64 + 50 * row, 50, 50)
        if walks_keys:
            p.line((x + 8, 139), (x + 192, 139))
            p.box("orange", x + 214, 114, 26, 50)
            p.text(x + 254, 144, "dq", anchor="start")
            p.text(x + 100, 290, "walks keys: computes P and dP, adds dS K", "small muted")
        else:
            p.line((x + 125, 72), (x + 125, 256))
            p.box("orange", x + 214, 164, 26, 50)
            p.box("orange", x + 244, 164, 26, 50)
            p.text(x + 242, 234, "dk, dv", anchor="middle")
            p.text(x + 115, 290, "walks queries: computes P and dP again,", "small muted")
            p.text(x + 115, 307, "adds dS^T Q and P^T dO", "small muted")
        p.text(x + 100, 54, "keys", "small muted")
        p.text(x - 8, 168, "queries", "small muted", "end")
    return p


def visit() -> Picture:
    """One visit of a tile of keys in forward_simt.cu."""
    p = Picture(720, 340, "One visit of a tile of keys by a block of forward_simt")
    p.text(96, 46, "global memory", "small muted", "end")
    p.text(96, 126, "smem.chunk", "code", "end")
    p.text(96, 206, "registers", "small muted", "end")
    p.text(96, 296, "shared memory", "small muted", "end")
    for x, name in ((110, "K"), (440, "V")):
        p.box("green", x, 24, 120, 34)
        p.text(x + 60, 46, f"tile of {name}")
        p.line((x + 60, 58), (x + 60, 102))
        p.box("green", x, 104, 120, 34)
        p.text(x + 60, 126, name)
        p.line((x, 94), (x, 148), arrow=False)
        p.line((x + 120, 94), (x + 120, 148), arrow=False)
        p.text(x + 126, 100, "barriers", "small muted", "start")
        p.line((x + 60, 138), (x + 60, 182))
    p.box("orange", 110, 184, 120, 38)
    p.text(170, 208, "scores += Q K^T", "small")
    p.line((230, 203), (262, 203))
    p.box("orange", 264, 184, 140, 38)
    p.text(334, 201, "mask, maximum,", "small")
    p.text(334, 216, "exponentials", "small")
    p.box("orange", 440, 184, 220, 38)
    p.text(550, 208, "result = result * factor + P V", "small")
    p.line((334, 222), (334, 272))
    p.box("blue", 264, 274, 236, 34)
    p.text(382, 296, "smem.probabilities", "code")
    p.line((470, 274), (470, 224))
    p.box("blue", 110, 274, 120, 34)
    p.text(170, 296, "smem.q", "code")
    p.line((170, 274), (170, 224))
    p.line((660, 203), (700, 203))
    p.text(700, 238, "next tile", "small muted", "end")
    return p


FIGURES = {f.__name__: f for f in (matrix, online, band, backward, visit)}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, figure in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(str(figure()), encoding="utf-8")
