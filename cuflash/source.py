# SPDX-License-Identifier: Apache-2.0
"""Where the kernel sources are, and digests of them with all that they include."""

from __future__ import annotations

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


def files(text: str, includes: tuple[str, ...] = (".",)) -> list[Path]:
    """Return every file that a translation unit includes, directly or not, in the order read."""
    found: dict[Path, None] = {}

    def visit(text: str, beside: tuple[Path, ...]) -> None:
        for name in _INCLUDE.findall(text):
            folders = (*beside, *(KERNEL_ROOT / folder for folder in includes))
            path = next((f / name for f in folders if (f / name).is_file()), None)
            if path is None:
                raise FileNotFoundError(f"kernel source {name!r} is not in {KERNEL_ROOT}")
            path = path.resolve()
            if path not in found:
                found[path] = None
                visit(path.read_text(encoding="utf-8"), (path.parent,))

    visit(text, ())
    return list(found)


def digest(text: str, includes: tuple[str, ...] = (".",)) -> str:
    """Return a digest of a translation unit with all that it includes, as it is on disk now."""
    sha = hashlib.sha256(text.encode())
    for path in files(text, includes):
        sha.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()[:32]
