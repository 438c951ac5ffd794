# SPDX-License-Identifier: Apache-2.0
"""Folders that are full, or that no library can be loaded from, and what is said of them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Unusable", "explain", "load"]

_ROOM = 8 * 2**20  # bytes; the largest library is a tenth of that, with what it is made from
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Unusable(RuntimeError):
    """A folder cannot be used; the text says which, why, and what to do."""


def _has_room(folder: Path) -> bool:
    """Whether some megabytes can be had there, which are given back at once."""
    while not folder.exists():  # who was to make it may not have come so far
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, _ROOM)
    except OSError as error:
        return error.errno not in _FULL
    return True


def explain(error: Exception, folders: Mapping[str, Path] | None = None) -> Unusable | None:
    """Return what to raise in place of an error that came of a full disk, or None.

    Compilers say it in many ways, and some crash. So the folders are tried.

    Parameters
    ----------
    error : Exception
        What writing, or a compiler, has failed with.
    folders : mapping of str to path, optional
        What was written to besides the folder of temporary files, by the variable of the
        environment that names the place.
    """
    if isinstance(error, Unusable):
        return None  # it says so already
    places = dict(folders or {})
    with contextlib.suppress(FileNotFoundError):  # where there is no place for temporary files
        # What is set comes first: Python passes over a full folder, and compilers do not.
        places["TMPDIR"] = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    full = [name for name, folder in places.items() if not _has_room(folder)]
    if not full and isinstance(error, OSError) and error.errno in _FULL:
        full = [*places][:1]
    if not full:
        return None
    where = " and ".join(str(places[name]) for name in full)
    return Unusable(
        f"kernels cannot be compiled, since no room is left in {where}: delete something there, "
        f"or name a folder on another disk in {' and '.join(full)}"
    )


def load(library: Path, variable: str) -> ctypes.CDLL:
    """Load a shared library; `variable` names the place of its folder in the environment."""
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        if not os.statvfs(library.parent).f_flag & os.ST_NOEXEC:
            raise
        raise Unusable(
            f"kernels for the CPU cannot be loaded from {library.parent}, whose file system does "
            "not let programs run (it is mounted with the option noexec): name a folder on another "
            f"one in {variable}"
        ) from error
