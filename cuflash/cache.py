# SPDX-License-Identifier: Apache-2.0
"""The disk cache of compiled kernels.

``$CUFLASH_CACHE_DIR``, else ``cuflash`` in the user's cache directory. Files appear whole
(temporary name, then rename), so several processes may fill the cache at once. Libraries are
executed, so a folder that others may write to is not used. Each file ends with a digest of itself,
which loaders do not look at: to load a library that a full disk or a crash cut short would end the
process. Where no folder can be used, a warning says so, and a private temporary one lives as long
as the process.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from . import disk, notice

__all__ = [
    "all_cached",
    "at_once",
    "cached",
    "clear",
    "contents",
    "folder",
    "made",
    "problem",
    "wanted",
]

T = TypeVar("T")
U = TypeVar("U")

#: The files that this process has made.
made: list[Path] = []


def wanted() -> Path:
    """Return the folder of the cache, whether it can be used or not."""
    chosen = os.environ.get("CUFLASH_CACHE_DIR")
    if chosen:
        try:
            return _absolute(Path(chosen).expanduser())
        except RuntimeError as error:
            raise RuntimeError(
                f"CUFLASH_CACHE_DIR is {chosen!r}: {error}; name a folder by its whole path"
            ) from error
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # A relative one is to be ignored, by the specification.
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "cuflash"
    except RuntimeError:  # no home directory
        return Path(tempfile.gettempdir()) / f"cuflash-{os.getuid()}"


@functools.cache
def _absolute(chosen: Path) -> Path:
    """Return where a path leads, once and for all: the process may move to another folder.

    Absolute, since a library whose path has no slash would be looked for in the system's folders.
    """
    return chosen.absolute()


def _is_ours(path: Path) -> bool:
    """Whether nobody else can put files there. Root may read anybody's folder, and must not."""
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _can_write(path: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


@functools.cache
def _private(process: int) -> Path:
    path = Path(tempfile.mkdtemp(prefix="cuflash-"))

    def remove() -> None:
        if os.getpid() == process:  # a forked child must not take its parent's folder away
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return path


@functools.cache
def _readable(place: Path) -> Path | None:
    """Return the cache folder if it can be read and nobody else writes to it."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(place):
            return place
    except OSError:
        _warn(_not_writable(place))
        return None
    _warn(_not_ours(place))
    return None


def _not_ours(place: Path) -> str:
    return (
        f"not caching in {place}, since it belongs to somebody else or others can write to it "
        "(chmod go-w); every process compiles its kernels anew: mend that, or name another folder "
        "in CUFLASH_CACHE_DIR"
    )


def _not_writable(place: Path) -> str:
    return (
        f"not caching in {place}, where no file can be made; every process compiles its kernels "
        "anew, but for those that it finds there: make it a folder with room that you can write "
        "to, or name another one in CUFLASH_CACHE_DIR"
    )


@functools.cache
def _warn(message: str) -> None:
    notice.warn(message)


def problem() -> str | None:
    """Return why compiled kernels cannot be kept, with the cure, or None."""
    place = wanted()
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(place):
            return _not_ours(place)
    except OSError:
        return _not_writable(place)
    return None if _can_write(place) else _not_writable(place)


def folder() -> Path:
    """Return the folder that new files go to."""
    place = _readable(wanted())
    if place is not None and _can_write(place):
        return place
    if place is not None:
        _warn(_not_writable(place))
    return _private(os.getpid())


def _is_whole(path: Path) -> bool:
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return data[-32:] == hashlib.sha256(data[:-32]).digest()


def _seal(path: Path) -> None:
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)
    path.chmod(0o700)  # compilers leave it to the umask


def _find(name: str) -> Path | None:
    place = _readable(wanted())
    return place / name if place is not None and _is_whole(place / name) else None


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """Return the file `name`, made by ``build(path)`` if no folder holds it whole.

    `name` carries a digest of all that decides the contents. A read-only cache is read. A full disk
    is a RuntimeError that says so.
    """
    found = _find(name)
    if found is not None:
        return found
    path = folder() / name
    if not _is_whole(path):
        try:
            _make(path, build)
        except (OSError, RuntimeError) as error:
            full = disk.explain(error, {"CUFLASH_CACHE_DIR": path.parent})
            if full is None:
                raise
            raise full from error
    return path


def _make(path: Path, build: Callable[[Path], None]) -> None:
    """Let ``build`` make a file, which appears whole or not at all."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        build(Path(temporary))
        _seal(Path(temporary))
        os.replace(temporary, path)
        made.append(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def all_cached(files: Sequence[tuple[str, Callable[[Path], None]]]) -> list[Path]:
    """Return what `cached` does of several files; those that are missing are made at once."""
    found = [_find(name) for name, _ in files]
    missing = [file for file, path in zip(files, found, strict=True) if path is None]
    if len(missing) > 1:
        folder()  # here, so that its warnings come once
        paths = at_once(lambda file: cached(*file), missing)
    else:
        paths = [cached(*file) for file in missing]
    rest = iter(paths)
    return [path or next(rest) for path in found]


def at_once(do: Callable[[T], U], things: Sequence[T]) -> list[U]:
    """Return what `do` returns of each thing, in threads, as many as there are processors.

    Where no thread can be started, as while the interpreter ends, one after the other. If one
    fails, those that have not begun are left out.
    """
    from concurrent.futures import ThreadPoolExecutor  # which most processes do without

    with ThreadPoolExecutor(_processors()) as pool:
        try:
            results = pool.map(do, things)
        except RuntimeError:  # of starting: what `do` raises comes with its result
            pool.shutdown(cancel_futures=True)
        else:
            return list(results)
    return [do(thing) for thing in things]


def _processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


#: Names of files as `compile` makes them, and of what a process that was stopped left half made.
_FILE = re.compile(r"\w+-(cpu|sm_\d+a?)-[0-9a-f]{24}\.(so|cubin)")
_HALF_MADE = re.compile(rf"\.{_FILE.pattern}\.\w+")
#: Names of the folders that `host` compiles in, and of what they hold.
_WORKPLACE = re.compile(r"\.compile-\w+")
_IN_WORKPLACE = re.compile(rf"{_HALF_MADE.pattern}.*")
_PATIENCE = 60 * 60  # seconds after which nobody is at work on it any more


def contents() -> list[Path]:
    """Return the files of the cache, and what was left half made."""
    try:
        return sorted(path for path in wanted().iterdir() if _is_content(path))
    except OSError:
        return []


def _is_content(path: Path) -> bool:
    """Whether this is ours, and done with: the folder may hold other things."""
    try:
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and _FILE.fullmatch(path.name):
            return True
        if time.time() - status.st_mtime <= _PATIENCE:
            return False
        if stat.S_ISREG(status.st_mode):
            return _HALF_MADE.fullmatch(path.name) is not None
        return (
            stat.S_ISDIR(status.st_mode)
            and _WORKPLACE.fullmatch(path.name) is not None
            and all(_IN_WORKPLACE.fullmatch(inner.name) for inner in path.iterdir())
        )
    except OSError:  # another process has cleared it
        return False


def clear() -> None:
    """Delete the contents of the cache. What is loaded stays usable.

    Raises
    ------
    RuntimeError
        The folder belongs to somebody else, as it may where root asks; nothing is deleted.
    """
    place = wanted()
    if place.exists() and place.stat().st_uid != os.getuid():
        raise RuntimeError(
            f"nothing is removed from {place}, which belongs to {_owner(place)} and not to you: "
            "let its owner empty it, or name your own folder in CUFLASH_CACHE_DIR"
        )
    for path in contents():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except KeyError:  # a number without a name
        return f"user {path.stat().st_uid}"
