# SPDX-License-Identifier: Apache-2.0
"""Where the kernel sources are, and digests of them with all that they include."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

__all__ = ["HOST_INCLUDES", "KERNEL_ROOT", "digest", "files"]

_PACKAGE = Path(__file__).resolve().parent
_SHIPPED, _CHECKOUT = _PACKAGE / "kernels", _PACKAGE.parent / "kernels"

#: A wheel carries the sources inside the package; a checkout and an editable install beside it.
KERNEL_ROOT = _SHIPPED if _SHIPPED.is_dir() else _CHECKOUT

#: Searched in order: the CPU's twins of hw/ come before the device's.
HOST_INCLUDES = ("host", ".")

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def files(name: str, includes: tuple[str, ...] = (".",), root: Path | None = None) -> list[Path]:
    """Return `name` and every file that it includes, directly or not, in the order of reading."""
    root = KERNEL_ROOT if root is None else root
    found: dict[Path, None] = {}

    def visit(name: str, beside: Path | None) -> None:
        folders = [root / folder for folder in includes]
        if beside is not None:
            folders.insert(0, beside)
        path = next((f / name for f in folders if (f / name).is_file()), None)
        if path is None:
            raise FileNotFoundError(f"kernel source {name!r} is not in {root}")
        path = path.resolve()
        if path not in found:
            found[path] = None
            for inner in _INCLUDE.findall(path.read_text(encoding="utf-8")):
                visit(inner, path.parent)

    visit(name, None)
    return list(found)


@functools.cache
def digest(name: str, includes: tuple[str, ...] = (".",), root: Path | None = None) -> str:
    """Return a digest of the contents of `files`; read once a process."""
    sha = hashlib.sha256()
    for path in files(name, includes, root):
        sha.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()[:32]
