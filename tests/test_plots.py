# SPDX-License-Identifier: Apache-2.0
"""README's tables and the plots are those of the committed results."""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import peers, plots, report  # noqa: E402
from bench.plots import FIGURES, THEMES, Results  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = Results.read()


def test_tables_and_plots_are_those_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert plots.outdated(RESULTS) == []
    assert plots.main(["--check"]) == 0
    assert capsys.readouterr().out == "tables and plots are those of the results\n"


@pytest.mark.parametrize("part", ["grid", "record", "memory"])
def test_other_results_make_them_out_of_date(part: str) -> None:
    results = copy.deepcopy(RESULTS)
    for row in getattr(results, part):
        for name in ("tflops", "beyond_bytes", "ratio", "utilisation"):
            if row.get(name):
                row[name] *= 1.5
    figures = {"grid": {"speed-forward", "speed-backward", "ceiling"}, "memory": {"memory"}}
    names = {f"{figure}-{theme}.svg" for figure in figures.get(part, ()) for theme in THEMES}
    assert set(plots.outdated(results)) == {f"{name}: its numbers" for name in names} | {
        "README.md: its tables"
    }


def test_the_grid_is_complete_and_sound() -> None:
    assert [problem for row in RESULTS.grid for problem in report.problems(row)] == []
    cells: dict[str, set[Any]] = {}
    for row in RESULTS.grid:
        cells.setdefault(row["variant"], set()).add((row["case"], row["direction"]))
    assert len(cells["cuflash"]) == 2 * 36
    assert all(found <= cells["cuflash"] for found in cells.values())


def test_later_rows_count() -> None:
    row = {"kind": "speed", "case": "a", "direction": "forward", "dtype": "b", "variant": "c"}
    rows = [{**row, "tflops": 1.0}, {**row, "tflops": 2.0}, {**row, "wrong": ["out"]}]
    assert plots._timed(rows) == [rows[1]]


def test_times_that_scatter_are_left_out(tmp_path: Path) -> None:
    folder = ROOT / "bench" / "results"
    lines = (folder / "grid.jsonl").read_text(encoding="utf-8").splitlines()
    peer = next(row for row in RESULTS.grid if row["variant"] == "torch-cudnn")
    changed = {**peer, "p10": 1.0, "p90": 1.01 * plots.STEADY}
    (tmp_path / "grid.jsonl").write_text("\n".join([*lines, json.dumps(changed)]))
    shutil.copy(folder / "gpu-check.json", tmp_path)
    results = Results.read(tmp_path)
    assert results.grid == [row for row in RESULTS.grid if row != peer]
    assert results.unsteady == RESULTS.unsteady + 1
    assert plots.peers_table(results)[-1].endswith(
        f" Times whose rounds differ by more than 25 % are left out: {results.unsteady}."
    )


def test_every_peer_has_a_name() -> None:
    assert set(plots.NAMES) | {"naive", "unordered"} == set(peers.PEERS)


def test_tables_say_what_was_measured() -> None:
    grid, record = RESULTS.grid, RESULTS.record

    def cell(table: str, start: str) -> list[str]:
        block = re.search(f"<!-- {table} -->(.*)<!-- /{table} -->", README, re.DOTALL)
        assert block
        (line,) = (line for line in block[1].splitlines() if line.startswith(start))
        return [word.strip() for word in line.removeprefix(start).split("|")]

    (row,) = (
        row
        for row in record
        if (row["case"], row["dtype"]) == ("d128-s4096-causal", "bfloat16")
        and (row["variant"], row["direction"]) == ("cuflash", "backward")
    )
    assert float(cell("speed", "| bfloat16 | 128 | causal |")[2]) == round(row["tflops"])
    ratios = [r["ratio"] for r in grid if (r["variant"], r["direction"]) == ("fa3", "forward")]
    words = cell("peers", "| FlashAttention-3 |")[0]
    mean, least, most = (float(x) for x in re.findall(r"[\d.]+", words))
    assert (least, most) == (round(min(ratios), 2), round(max(ratios), 2)) and least < mean < most


def test_markers_must_be_there() -> None:
    with pytest.raises(ValueError, match="<!-- memory -->"):
        plots.with_tables(README.replace("<!-- /memory -->", ""), RESULTS)


def test_pages_show_plots_that_are_there() -> None:
    shown = set()
    for page in (ROOT / "README.md", ROOT / "docs" / "benchmarks.md"):
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r'src(?:set)?="([^"]+\.svg)"', text):
            assert (page.parent / path).is_file(), path
            shown.add(Path(path).name)
    assert shown == {f"{name}-{theme}.svg" for name in FIGURES for theme in THEMES}


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", FIGURES)
def test_plots_show_their_numbers(
    name: str, theme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    data = FIGURES[name](RESULTS)
    shown: list[list[list[float]]] = []

    def drawn(plt: Any, numbers: Any, look: Any, draw: Any = plots.DRAW[name]) -> Any:
        figure = draw(plt, numbers, look)
        figure.canvas.draw()  # sharing decides the limits of axes
        for axes in figure.axes:
            (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
            for line in axes.lines:
                curve = line.get_xydata().tolist()
                assert all(left < x < right and low <= y <= high for x, y in curve)
                shown.append(curve)
        return figure

    monkeypatch.setitem(plots.DRAW, name, drawn)
    path = tmp_path / "plot.svg"
    plots.draw(name, data, theme, path)
    panels = [data] if name == "memory" else data.values()
    assert sorted(shown) == sorted(curve for panel in panels for curve in panel.values())
    text = path.read_text(encoding="utf-8")
    assert plots.digest(data) in text
    assert THEMES[theme]["curves"][0] in text and THEMES[theme]["page"] not in text
    committed = plots.image(name, theme).read_text(encoding="utf-8")
    assert THEMES[theme]["text"] in committed and plots.digest(data) in committed


def test_a_legend_of_all_peers_is_within_the_plot() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot as plt

    data = {
        f"full {dim}": {name: [[512, 1.0], [1024, 2.0]] for name in plots.NAMES} for dim in "123"
    }
    with plt.rc_context(plots._look(THEMES["light"])):
        figure = plots.draw_speed(plt, data, THEMES["light"])
        figure.canvas.draw()
        (legend,) = figure.legends
        assert len(legend.get_texts()) == len(plots.NAMES)
        box, all_of_it = legend.get_window_extent(), figure.bbox
        assert 0 < box.x0 < box.x1 < all_of_it.x1 and 0 < box.y0 < box.y1 < all_of_it.y1 + 1
        plt.close(figure)


def test_numbers_have_one_digest() -> None:
    data = FIGURES["memory"](RESULTS)
    assert plots.digest(data) == plots.digest(json.loads(json.dumps(data)))
