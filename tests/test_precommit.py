# SPDX-License-Identifier: Apache-2.0
"""The hooks of pre-commit run the linters that continuous integration runs."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def pins(text: str) -> dict[str, set[str]]:
    """Return the versions of each package that is pinned somewhere."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r'"([a-z-]+)==([^"]+)"', text):
        found.setdefault(name, set()).add(version)
    return found


def test_hooks_have_the_versions_of_the_extra() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(r"^lint = \[.*\]$", project, re.MULTILINE)
    assert extra
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    known = pins(extra[0])
    assert pins(hooks) == {name: known[name] for name in ("ruff", "clang-format")}


def test_hooks_format_the_files_that_are_checked() -> None:
    """The same folders and suffixes in the hook, in `make lint` and in continuous integration."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    found = re.search(r"files: \^\((.*)\)/\.\*\\\.\((.*)\)\$", hooks)
    assert found
    names = " -o ".join(f"-name '*.{suffix}'" for suffix in found[2].split("|"))
    command = f"find {found[1].replace('|', ' ')} {names}"
    for name in ("Makefile", ".ci/run"):
        assert command in (ROOT / name).read_text(encoding="utf-8")
