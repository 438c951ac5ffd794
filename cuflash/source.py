# SPDX-License-Identifier: Apache-2.0
"""Where the kernel sources are, and digests of them with all that they include."""

from __future__ import annotations

import hashlib
import os
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


def _contents(text: str, includes: tuple[str, ...]) -> dict[str, bytes]:
    """Return what each file holds that a translation unit includes, directly or not."""
    root = os.path.realpath(KERNEL_ROOT)
    folders = [os.path.join(root, folder) for folder in includes]
    found: dict[str, bytes] = {}

    def visit(text: str, beside: tuple[str, ...]) -> None:
        for name in _INCLUDE.findall(text):
            # Paths are text here: each process that finds its kernels compiled waits for this.
            paths = (os.path.normpath(os.path.join(f, name)) for f in (*beside, *folders))
            path = next((path for path in paths if path in found or os.path.isfile(path)), None)
            if path is None:
                raise FileNotFoundError(f"kernel source {name!r} is not in {KERNEL_ROOT}")
            if path not in found:
                found[path] = b""  # its place in the order
                with open(path, "rb") as file:
                    found[path] = file.read()
                visit(found[path].decode(), (os.path.dirname(path),))

    visit(text, ())
    return found


def files(text: str, includes: tuple[str, ...] = (".",)) -> list[Path]:
    """Return every file that a translation unit includes, directly or not, in the order read."""
    return [Path(path) for path in _contents(text, includes)]


def digest(text: str, includes: tuple[str, ...] = (".",)) -> str:
    """Return a digest of a translation unit with all that it includes, as it is on disk now."""
    sha = hashlib.sha256(text.encode())
    for path, content in _contents(text, includes).items():
        sha.update(os.path.basename(path).encode() + b"\0" + content + b"\0")
    return sha.hexdigest()[:32]
