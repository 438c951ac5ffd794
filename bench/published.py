# SPDX-License-Identifier: Apache-2.0
"""Speeds of other libraries that were measured elsewhere, beside those of this run.

A harness that cannot reproduce what is known of others should not be believed about anything else.
``peer_cells.json`` says where its numbers come from.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

__all__ = ["cells", "compare"]

NEAR = 0.10


def cells() -> dict[str, Any]:
    """Return the file: TFLOP/s of each case, direction and variant, and how they were measured."""
    path = Path(__file__).with_name("peer_cells.json")
    return json.loads(path.read_text(encoding="utf-8"))


def compare(rows: list[dict[str, Any]], gpu: str) -> list[str]:
    """Return the lines of a table of measured over published speeds."""
    known = cells()
    if gpu != known["gpu"]:
        return [f"published speeds are of an {known['gpu']}, this is an {gpu}: not compared"]
    speeds = {(cell["case"], cell["direction"]): cell for cell in known["cells"]}
    lines, ratios = [], []
    for row in rows:
        if row["kind"] != "speed" or "wrong" in row or row["dtype"] != known["dtype"]:
            continue
        cell = speeds.get((row["case"], row["direction"]), {}).get(row["variant"])
        if cell is None:
            continue
        ratio = row["tflops"] / cell
        ratios.append(ratio)
        near = "" if abs(ratio - 1) <= NEAR else f"  differs by more than {NEAR:.0%}"
        lines.append(
            f"{row['case']:26}{row['direction']:10}{row['variant']:13}{row['tflops']:10.1f}"
            f"{cell:11.1f}{ratio:8.3f}{near}"
        )
    if not ratios:
        return ["nothing that was measured has a published speed"]
    title = f"{'case':26}{'pass':10}{'variant':13}{'measured':>10}{'published':>11}{'ratio':>8}"
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
    last = (
        f"{near} of {len(ratios)} within {NEAR:.0%}; median of the ratios "
        f"{statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
    )
    source = f"published, TFLOP/s: {known['source']} {known['date']}. {known['method']}"
    return [title, *lines, last, source]
