# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/ and README.md: what they show is run, and says what they say that it does.

Marks are comments before a block of code, which readers do not see:

- ``<!-- run -->``: a Python program, run by itself;
- ``<!-- run: torch -->``: it needs a package, and is skipped by its name where that is absent;
- ``<!-- run: gpu, torch -->``: it needs a GPU as well;
- ``<!-- continued -->``: goes on where the block before it ended;
- ``<!-- prints -->``: what the program so far printed, word for word; ``…`` is anything in a line;
- ``<!-- from: kernels/parts/tile.cuh -->``: lines of that file, in their order; ``...`` leaves out.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = {"gpu", "jax", "numba", "torch"}

_BLOCK = re.compile(
    r"^<!-- (?P<mark>[a-z]+)(?:: (?P<rest>[^>]*))? -->\n```[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_MARKS = ("run", "continued", "prints", "from", "ci")


class Block(NamedTuple):
    """A marked block of a page."""

    place: str  # page and line
    mark: str
    rest: str
    text: str


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("text"))
        place = f"{name}:{line}"
        found.append(Block(place, match["mark"], match["rest"] or "", match["text"]))
    return found


class Program(NamedTuple):
    """A program of a page, and what the page says that it prints."""

    place: str
    needs: tuple[str, ...]
    text: str
    output: str | None


def programs() -> list[Program]:
    """Return what is to be run; lines keep their numbers in the page."""
    found: list[Program] = []
    for path in PAGES:
        begun = False
        for block in blocks(path):
            first_line = int(block.place.rpartition(":")[2])
            if block.mark == "run":
                needs = tuple(name.strip() for name in block.rest.split(",") if name.strip())
                assert set(needs) <= NEEDS, f"{block.place}: {block.rest} is none of {NEEDS}"
                found.append(Program(block.place, needs, "\n" * first_line + block.text, None))
                begun = True
            elif block.mark == "continued":
                assert begun, f"{block.place} continues nothing"
                text = found[-1].text
                gap = "\n" * (first_line - text.count("\n"))
                found[-1] = found[-1]._replace(text=text + gap + block.text)
            elif block.mark == "prints":
                assert begun, f"{block.place}: nothing was run"
                output = (found[-1].output or "") + block.text
                found[-1] = found[-1]._replace(output=output)
    return found


def _parameters() -> list:
    def marks(p: Program) -> list:
        if "gpu" in p.needs:
            return [pytest.mark.gpu]
        return [pytest.mark.library] if p.needs else []

    return [pytest.param(p, id=p.place, marks=marks(p)) for p in programs()]


@pytest.mark.parametrize("program", _parameters())
def test_program(program: Program, tmp_path: Path) -> None:
    for package in program.needs:
        if package != "gpu" and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
        if package != "gpu":  # one that is there may be too old for this NumPy
            command = [sys.executable, "-W", "ignore", "-c", f"import {package}"]
            if package == "numba" and "gpu" in program.needs:  # and may say so when it compiles
                command[-1] = "from numba import cuda; cuda.jit('void()')(lambda: None)"
            trial = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300)
            if trial.returncode:
                pytest.skip(f"needs a {package} that works here: {trial.stderr[-200:]}")
    script = tmp_path / "page.py"
    script.write_text(program.text, encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, f"{program.place}\n{done.stdout}{done.stderr}"
    if program.output is not None:
        pattern = ".*".join(re.escape(part) for part in program.output.split("…"))
        assert re.fullmatch(pattern, done.stdout), f"{program.place} prints\n{done.stdout}"


def _excerpts() -> list:
    return [
        pytest.param(block, id=block.place)
        for path in PAGES
        for block in blocks(path)
        if block.mark == "from"
    ]


@pytest.mark.parametrize("excerpt", _excerpts())
def test_excerpt_is_in_the_file(excerpt: Block) -> None:
    """Lines may be indented less than in the file, all of them by the same."""
    lines = (ROOT / excerpt.rest).read_text(encoding="utf-8").splitlines()
    at = 0
    for part in re.split(r"^ *\.\.\.\n", excerpt.text, flags=re.MULTILINE):
        wanted = part.splitlines()
        at = next(
            (i + len(wanted) for i in range(at, len(lines)) if _same(lines[i:], wanted)),
            None,
        )
        assert at is not None, f"{excerpt.rest} has no such lines in a row:\n{part}"


def _same(lines: list[str], wanted: list[str]) -> bool:
    lines = lines[: len(wanted)]
    if len(lines) < len(wanted):
        return False
    indent = lines[0][: len(lines[0]) - len(wanted[0])]
    return all(
        line == (indent + want if want else "") for line, want in zip(lines, wanted, strict=True)
    )


def test_every_mark_is_known_and_before_a_block() -> None:
    """A mark that is misspelt, or apart from its block, would silently check nothing."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        marks = re.findall(r"^<!-- ([a-z]+)(?::[^>]*)? -->\n(?=\n*```)", text, re.MULTILINE)
        assert set(marks) <= set(_MARKS), path
        assert len(marks) == len(blocks(path)), path


def test_pictures_are_those_of_the_script() -> None:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    assert {path.stem for path in figures.FOLDER.glob("*.svg")} == set(figures.FIGURES)
    for name, figure in figures.FIGURES.items():
        kept = (figures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
        assert kept == str(figure()), f"{name}.svg is out of date: python docs/figures.py"
