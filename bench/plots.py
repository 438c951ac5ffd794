# SPDX-License-Identifier: Apache-2.0
"""README's tables and plots, from the committed results: ``python -m bench.plots``.

Tables stand in README between pairs of comments, as in ``<!-- speed -->`` and ``<!-- /speed -->``.
Plots are SVG files for light and dark pages in ``docs/images``; each holds a digest of the numbers
that it shows, so that ``--check``, which needs no matplotlib, finds those that are out of date.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cases import groups
from bench.machine import ROOT
from bench.peer import OURS

__all__ = ["FIGURES", "TABLES", "THEMES", "Results", "digest", "draw", "outdated", "with_tables"]

Row = dict[str, Any]
README = ROOT / "README.md"
IMAGES = ROOT / "docs" / "images"
GIB, MIB = 2**30, 2**20
STEADY = 1.25  # the ninth decile of a call's rounds over the first, at most

#: Variants as a reader knows them; the order is that of legends and tables.
NAMES = {
    OURS: "cuflash",
    "fa3": "FlashAttention-3",
    "torch-cudnn": "cuDNN through PyTorch",
    "cudnn": "cuDNN through its front end",
    "torch-flash": "FlashAttention-2 through PyTorch",
}


# --- results -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """What was measured: the grid with peers, and two parts of the GPU record."""

    grid: list[Row]
    unsteady: int  # times that are left out of it
    record: list[Row]
    memory: list[Row]
    machine: Row  # of the record

    @classmethod
    def read(cls, folder: Path = ROOT / "bench" / "results") -> Results:
        """Read the committed files. Of a call that was timed twice, the later row counts.

        Of the grid, a time whose rounds differ by more than `STEADY` is left out: something else
        was timed, be it in our favour or in a peer's.
        """
        names = {case.name for case in groups()["grid"]}
        lines = (folder / "grid.jsonl").read_text(encoding="utf-8").splitlines()
        record = json.loads((folder / "gpu-check.json").read_text(encoding="utf-8"))
        parts = record["parts"]
        memory = [row for row in parts["memory"]["rows"] if row["kind"] == "memory"]
        grid = [
            row
            for row in _timed([json.loads(line) for line in lines])
            if row["case"] in names and row["dtype"] == "bfloat16"
        ]
        steady = [row for row in grid if row["p90"] <= STEADY * row["p10"]]
        return cls(
            steady,
            len(grid) - len(steady),
            _timed(parts["speed"]["rows"]),
            memory,
            record["machine"],
        )


def _timed(rows: list[Row]) -> list[Row]:
    """Return the rows that have a time, the last one of each call."""
    found = {}
    for row in rows:
        if row["kind"] == "speed" and "tflops" in row:
            found[row["case"], row["direction"], row["dtype"], row["variant"]] = row
    return list(found.values())


def _conditions(rows: list[Row], machine: Row) -> str:
    """Return how rows were measured, in a sentence."""
    mhz = [row["sm_mhz"] for row in rows if row["sm_mhz"] is not None]
    count = sorted({row["rounds"] for row in rows})
    rounds = f"{count[0]} rounds" if len(count) == 1 else f"{count[0]} to {count[-1]} rounds"
    dates = sorted({row["date"] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{machine['gpu']}, SM clock {min(mhz):.0f} to {max(mhz):.0f} MHz, {rounds}, {when}."


# --- tables --------------------------------------------------------------------------------------


def _table(head: list[str], align: str, rows: list[list[str]]) -> list[str]:
    """Return a table in Markdown; `align` has l or r for each column."""
    rule = "".join({"l": "---|", "r": "---:|"}[one] for one in align)
    first, *others = ("| " + " | ".join(line) + " |" for line in [head, *rows])
    return [first, "|" + rule, *others]


def _speed(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def speed_table(results: Results) -> list[str]:
    """Return our speed and the naive formula's, one line for each kind of call."""
    dtypes = ("float32", "float64", "bfloat16")
    rows = [row for row in results.record if row["dtype"] in dtypes]
    lines: dict[Any, dict[str, float]] = {}
    for row in rows:
        call = (dtypes.index(row["dtype"]), row["head_dim"], row["causal"])
        lines.setdefault(call, {})[f"{row['variant']} {row['direction']}"] = row["tflops"]
    table = []
    for (dtype, dim, causal), speeds in sorted(lines.items()):
        cells = [
            _speed(speeds.get(f"{variant} {direction}"))
            for direction in ("forward", "backward")
            for variant in (OURS, "naive")
        ]
        table.append([dtypes[dtype], str(dim), "causal" if causal else "full", *cells])
    head = ["dtype", "head size", "mask", "forward", "naive forward", "backward", "naive backward"]
    return [*_table(head, "lrlrrrr", table), "", _conditions(rows, results.machine)]


def memory_table(results: Results) -> list[str]:
    """Return what a call takes beyond its inputs and results, and one naive matrix."""
    table = [
        [
            str(row["seqlen"]),
            f"{row['beyond_bytes'] / MIB:.0f} MiB",
            _bytes(row["naive_p_bytes"]),
        ]
        for row in results.memory
    ]
    return _table(["length", "cuflash, measured", "naive, computed"], "rrr", table)


def peers_table(results: Results) -> list[str]:
    """Return how many times as fast as others we are, over the cells of the grid."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in results.grid:
        if row["variant"] != OURS and row["ratio"] is not None:
            ratios.setdefault((row["variant"], row["direction"]), []).append(row["ratio"])
    table = []
    for variant in NAMES:
        cells = [ratios.get((variant, way), []) for way in ("forward", "backward")]
        if any(cells):
            table.append([NAMES[variant], *(_spread(cell) for cell in cells)])
    cells = max((len(one) for one in ratios.values()), default=0)
    about = f"Geometric means over up to {cells} cells, in brackets the least and the most: "
    head = ["cuflash is as fast as", "forward, times", "backward, times"]
    text = about + "bfloat16, " + _conditions(results.grid, results.grid[0]["machine"])
    if results.unsteady:
        share = f"{STEADY - 1:.0%}".replace("%", " %")
        text += f" Times whose rounds differ by more than {share} are left out: {results.unsteady}."
    return [*_table(head, "lrr", table), "", text]


def _spread(ratios: list[float]) -> str:
    if not ratios:
        return "-"
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


TABLES: dict[str, Callable[[Results], list[str]]] = {
    "speed": speed_table,
    "memory": memory_table,
    "peers": peers_table,
}


def with_tables(text: str, results: Results) -> str:
    """Return a page with the tables between its markers written anew.

    Raises
    ------
    ValueError
        A pair of markers is not there exactly once.
    """
    for name, table in TABLES.items():
        pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"expected <!-- {name} --> and <!-- /{name} --> once, each on a line")
        block = "\n".join(table(results)) + "\n"
        text = pattern.sub(lambda found, block=block: found[1] + block + found[2], text)
    return text


# --- what plots show -----------------------------------------------------------------------------


def _panels(rows: list[Row], key: Callable[[Row], str], value: str) -> dict[str, Any]:
    """Return curves by panel and variant: [length, value], shortest length first."""
    found: dict[str, Any] = {}
    for row in sorted(rows, key=lambda row: row["seqlen_q"]):
        if row["variant"] in NAMES and row[value] is not None:
            panel = found.setdefault(key(row), {})
            panel.setdefault(row["variant"], []).append([row["seqlen_q"], row[value]])
    return found


def _mask(row: Row) -> str:
    return "causal" if row["causal"] else "full"


def speed_data(results: Results, direction: str) -> dict[str, Any]:
    """Return speeds by length, for each mask and head size."""
    rows = [row for row in results.grid if row["direction"] == direction]
    return _panels(rows, lambda row: f"{_mask(row)} {row['head_dim']}", "tflops")


def ceiling_data(results: Results) -> dict[str, Any]:
    """Return the part of the tensor cores' speed that we and the best of the others reach."""
    best: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in results.grid:
        if row["variant"] in NAMES and row["utilisation"] is not None:
            who = OURS if row["variant"] == OURS else "others"
            curve = best.setdefault((f"{row['direction']} {row['head_dim']}", who, _mask(row)), {})
            length = row["seqlen_q"]
            curve[length] = max(curve.get(length, 0.0), row["utilisation"])
    found: dict[str, Any] = {}
    for (panel, who, mask), curve in sorted(best.items()):
        found.setdefault(panel, {})[f"{who}, {mask}"] = [list(at) for at in sorted(curve.items())]
    return found


def memory_data(results: Results) -> dict[str, Any]:
    """Return bytes by length: one naive matrix, the arrays themselves, and what we take more."""
    rows = sorted(results.memory, key=lambda row: row["seqlen"])
    return {
        "naive": [[row["seqlen"], row["naive_p_bytes"]] for row in rows],
        "arrays": [[r["seqlen"], r["inputs_bytes"] + r["results_bytes"]] for r in rows],
        "cuflash": [[row["seqlen"], row["beyond_bytes"]] for row in rows],
    }


#: The numbers of each plot, by its name.
FIGURES: dict[str, Callable[[Results], dict[str, Any]]] = {
    "speed-forward": lambda results: speed_data(results, "forward"),
    "speed-backward": lambda results: speed_data(results, "backward"),
    "ceiling": ceiling_data,
    "memory": memory_data,
}


def digest(data: dict[str, Any]) -> str:
    """Return what a file says of the numbers that it was drawn from."""
    return "sha256 " + hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


# --- plots ---------------------------------------------------------------------------------------

#: Colours of text and grid, and of the variants in the order of NAMES, on pages of either kind.
THEMES: dict[str, dict[str, Any]] = {
    "light": {
        "page": "#ffffff",
        "text": "#1f2328",
        "grid": "#d1d9e0",
        "curves": ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#59636e"),
    },
    "dark": {
        "page": "#0d1117",
        "text": "#f0f6fc",
        "grid": "#3d444d",
        "curves": ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#9198a1"),
    },
}


def _look(theme: dict[str, Any]) -> dict[str, Any]:
    """Return matplotlib's settings."""
    text = {"text.color", "axes.labelcolor", "xtick.color", "ytick.color"}
    return {
        **dict.fromkeys(text, theme["text"]),
        **dict.fromkeys(("grid.color", "axes.edgecolor"), theme["grid"]),
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.labelsize": 10,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "xtick.major.pad": 14,  # down to the baseline
        "legend.frameon": False,
        "legend.fontsize": 10,
        "lines.markersize": 4,
        "grid.linewidth": 0.6,
        "figure.constrained_layout.use": True,
        "svg.fonttype": "none",
        "svg.hashsalt": "cuflash",  # the same file each time
    }


def _length(x: float) -> str:
    return f"{x / 1024:.0f}k" if x >= 1024 else f"{x:.0f}"


def _bytes(x: float) -> str:
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB")):
        if x >= unit:
            return f"{x / unit:.0f} {name}"
    return f"{x / 1024:.0f} KiB"


def _lengths(axes: Any, lengths: set[int]) -> None:
    """Label the lengths that were measured, and no others."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(lengths), [_length(x) for x in sorted(lengths)], va="baseline")


def draw_speed(plt: Any, data: dict[str, Any], theme: dict[str, Any]) -> Any:
    """Draw speeds: a panel for each mask and head size."""
    styles = {
        name: {
            "label": NAMES[name],
            "color": theme["curves"][i],
            "marker": "os^vD"[i],
            "linewidth": 2.2 if name == OURS else 1.3,
            "zorder": 3 if name == OURS else 2,
        }
        for i, name in enumerate(NAMES)
    }
    return _draw_panels(plt, data, ("full", "causal"), styles, "TFLOP/s")


def draw_ceiling(plt: Any, data: dict[str, Any], theme: dict[str, Any]) -> Any:
    """Draw the part of the tensor cores' speed that is reached: a panel for each pass and size."""
    ours, *_, grey = theme["curves"]
    styles = {
        f"{who}, {mask}": {
            "label": f"{'cuflash' if who == OURS else 'the best of the others'}, {mask}",
            "color": ours if who == OURS else grey,
            "marker": "o" if who == OURS else "s",
            "linewidth": 2.2 if who == OURS else 1.3,
            "linestyle": "-" if mask == "full" else "--",
            "zorder": 3 if who == OURS else 2,
        }
        for who in (OURS, "others")
        for mask in ("full", "causal")
    }
    figure = _draw_panels(plt, data, ("forward", "backward"), styles, "of the peak")
    for one in figure.axes:
        one.set_ylim(0, 1)
        one.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    return figure


def _draw_panels(
    plt: Any, data: dict[str, Any], rows: tuple[str, str], styles: dict[str, Any], unit: str
) -> Any:
    """Draw a row of panels for each of two kinds, with a column for each head size."""
    dims = sorted({int(panel.split()[1]) for panel in data})
    figure, axes = plt.subplots(
        *(2, len(dims)), figsize=(9, 5.2), sharex=True, sharey=True, squeeze=False
    )
    lengths = {x for panel in data.values() for curve in panel.values() for x, _ in curve}
    seen = {}
    for i, kind in enumerate(rows):
        axes[i, 0].set_ylabel(unit)
        for j, dim in enumerate(dims):
            one = axes[i, j]
            one.set_title(f"{kind}, head size {dim}")
            one.set_gid(f"{kind} {dim}")
            for name, curve in data.get(f"{kind} {dim}", {}).items():
                (seen[name],) = one.plot(*zip(*curve, strict=True), **styles[name])
            _lengths(one, lengths)
    figure.supxlabel("sequence length (16384 tokens a call)", fontsize=10)
    axes[0, 0].set_ylim(bottom=0)  # of all, once all is drawn
    handles = [seen[name] for name in styles if name in seen]
    lines = math.ceil(len(handles) / 4)
    columns = math.ceil(len(handles) / lines)
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, handlelength=3)
    return figure


def draw_memory(plt: Any, data: dict[str, Any], theme: dict[str, Any]) -> Any:
    """Draw bytes by length, each curve with its name beside it."""
    figure, axes = plt.subplots(figsize=(9, 3.4))
    names = {
        "naive": "naive: one matrix of probabilities",
        "arrays": "inputs and results",
        "cuflash": "cuflash, beyond inputs and results",
    }
    ours, naive, *_, grey = theme["curves"]
    colours = {"naive": naive, "arrays": grey, "cuflash": ours}
    for name, curve in data.items():
        x, y = zip(*curve, strict=True)
        axes.plot(x, y, color=colours[name], marker="o", linewidth=2, label=name)
        axes.annotate(
            f"{names[name]}: {_bytes(y[-1])}",
            (x[-1], y[-1]),
            (10, 0),
            textcoords="offset points",
            color=colours[name],
            va="center",
        )
    _lengths(axes, {x for curve in data.values() for x, _ in curve})
    axes.set_yscale("log", base=2)
    axes.set_yticks([2.0**n for n in range(20, 44, 3)])
    axes.yaxis.set_major_formatter(lambda y, _: _bytes(y))
    values = [y for curve in data.values() for _, y in curve]
    axes.set_ylim(min(values) / 3, max(values) * 3)
    axes.set_xlabel("sequence length")
    return figure


DRAW: dict[str, Callable[[Any, dict[str, Any], dict[str, Any]], Any]] = {
    "speed-forward": draw_speed,
    "speed-backward": draw_speed,
    "ceiling": draw_ceiling,
    "memory": draw_memory,
}


def draw(name: str, data: dict[str, Any], theme: str, path: Path, page: bool = False) -> None:
    """Draw a plot to a file, on no ground or on that of a page."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(_look(THEMES[theme])):
        figure = DRAW[name](plt, data, THEMES[theme])
        ground = THEMES[theme]["page"] if page else "none"
        more: dict[str, Any] = {"dpi": 92}
        if path.suffix == ".svg":
            about = {"Title": f"cuflash: {name}", "Description": digest(data)}
            more = {"metadata": {**about, "Creator": None, "Date": None}}
        figure.savefig(path, facecolor=ground, **more)
        plt.close(figure)


def image(name: str, theme: str, folder: Path = IMAGES) -> Path:
    """Return the file of a plot."""
    return folder / f"{name}-{theme}.svg"


def outdated(results: Results, readme: Path = README, folder: Path = IMAGES) -> list[str]:
    """Return which tables and plots are not those of the results."""
    text = readme.read_text(encoding="utf-8")
    found = [] if with_tables(text, results) == text else [f"{readme.name}: its tables"]
    for name, data in FIGURES.items():
        wanted = digest(data(results))
        for theme in THEMES:
            path = image(name, theme, folder)
            if not path.is_file() or wanted not in path.read_text(encoding="utf-8"):
                found.append(f"{path.name}: its numbers")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description=__doc__)
    parser.add_argument("--check", action="store_true", help="say what is out of date, and end")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="PNG files there, to look at")
    given = parser.parse_args(arguments)
    results = Results.read()
    if given.check:
        found = outdated(results)
        print("\n".join(found) if found else "tables and plots are those of the results")
        return 1 if found else 0
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("plots are drawn by matplotlib: pip install -e '.[bench]'", file=sys.stderr)
        return 2
    text = README.read_text(encoding="utf-8")
    README.write_text(with_tables(text, results), encoding="utf-8")
    folder = given.png or IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in FIGURES.items():
        for theme in THEMES:
            path = image(name, theme, folder)
            draw(name, data(results), theme, path)
            if given.png:
                draw(name, data(results), theme, path.with_suffix(".png"), page=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
