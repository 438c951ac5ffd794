# SPDX-License-Identifier: Apache-2.0
"""The disk cache, what its keys depend on, and what is said when there is nothing to compile with.

The tests may run as root, whom permissions do not stop: where a folder that cannot be written is
the point, `cache._can_write` is replaced.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builder import needs_zig

import cuflash
from cuflash import cache, compile, device, disk, host, launch, select, source
from cuflash.dtypes import DTYPES
from cuflash.plan import Delta, UnitPlan
from cuflash.problem import Traits

ROOT = Path(__file__).parent.parent
PLAN = Delta("float32")
SM90 = device.architecture(9, 0)


def clear() -> None:
    """Forget everything that a process remembers of the cache."""
    for remembered in (cache._readable, cache._private, compile._runtime):
        remembered.cache_clear()
    for remembered in (host.find_compiler, select.choose):
        remembered.cache_clear()
    launch.forget()
    compile._kernels.clear()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty place for the cache, and nothing remembered."""
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    clear()
    yield tmp_path / "cache"
    clear()


def build(text: bytes = b"made", made: list[Path] | None = None) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        if made is not None:
            made.append(path)
        path.write_bytes(text)

    return write


def content(path: Path) -> bytes:
    """What `build` wrote; a digest follows."""
    return path.read_bytes()[:-32]


def never(path: Path) -> None:
    raise AssertionError("built again")


def run(code: str, *options: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env={name: value for name, value in environment.items() if value is not None},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )


def attend() -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(5, 2, 8)).astype("f4")
    return cuflash.attention(x, x, x)


# --- the folder ----------------------------------------------------------------------------------


def test_files_are_made_once_and_appear_whole(folder: Path) -> None:
    made: list[Path] = []
    path = cache.cached("a.so", build(made=made))
    assert path == folder / "a.so" and content(path) == b"made"
    assert cache.cached("a.so", never) == path
    assert made[0] != path and made[0].parent == folder  # so that a rename is enough
    assert list(folder.iterdir()) == [path]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_libraries_are_the_owners_alone(folder: Path) -> None:
    """Whatever the umask and the compiler make of it."""
    before = os.umask(0)
    try:
        path = compile.host_library(PLAN)
    finally:
        os.umask(before)
    assert path.parent == folder and path.stat().st_mode & 0o077 == 0


def test_nothing_stays_of_a_failed_build(folder: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.cached("a.so", fail)
    assert list(folder.iterdir()) == []
    assert content(cache.cached("a.so", build())) == b"made"


def test_what_is_missing_is_made_at_the_same_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each build waits for the other two."""
    monkeypatch.setattr(cache, "_processors", lambda: 3)
    barrier = threading.Barrier(3)

    def meet(path: Path) -> None:
        barrier.wait(timeout=60)
        path.write_bytes(b"met")

    there = cache.cached("b.so", build())
    files = [("a.so", meet), ("b.so", never), ("c.so", meet), ("d.so", meet)]
    paths = cache.all_cached(files)
    assert paths == [folder / name for name, _ in files] and paths[1] == there
    assert [content(path) for path in paths] == [b"met", b"made", b"met", b"met"]
    assert set(folder.iterdir()) == set(paths)


def test_there_are_no_threads_without_need(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "at_once", None)
    assert cache.all_cached([]) == []
    paths = [cache.cached("a.so", build()), folder / "b.so"]
    assert cache.all_cached([("a.so", never), ("b.so", build())]) == paths
    assert cache.all_cached([("a.so", never), ("b.so", never)]) == paths


def test_one_of_several_builds_may_fail(folder: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        cache.all_cached([("a.so", fail), ("b.so", build()), ("c.so", build())])
    assert {path.name for path in folder.iterdir()} <= {"b.so", "c.so"}
    paths = cache.all_cached([(name, build()) for name in ("a.so", "b.so", "c.so")])
    assert [content(path) for path in paths] == [b"made"] * 3


def test_the_private_folder_is_one_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="no file can be made") as caught:
        paths = cache.all_cached([(f"{n}.so", build()) for n in range(8)])
    assert len(caught) == 1 and len({path.parent for path in paths}) == 1


@pytest.mark.parametrize("damaged", [b"", b"half", b"made"])
def test_files_that_are_not_whole_are_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, damaged: bytes
) -> None:
    folder.mkdir(mode=0o700)
    (folder / "a.so").write_bytes(damaged)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_can_write", lambda path: path != folder)  # as in a read-only folder
        with pytest.warns(RuntimeWarning, match="no file can be made"):
            elsewhere = cache.cached("a.so", build())
    assert elsewhere.parent != folder and content(elsewhere) == b"made"
    path = cache.cached("a.so", build())
    assert path.parent == folder and content(path) == b"made"


@pytest.mark.parametrize(
    ("variables", "want"),
    [
        ({"CUFLASH_CACHE_DIR": "{tmp}/x"}, "{tmp}/x"),
        ({"CUFLASH_CACHE_DIR": "~/x", "HOME": "{tmp}"}, "{tmp}/x"),
        ({"CUFLASH_CACHE_DIR": "", "XDG_CACHE_HOME": "{tmp}/x"}, "{tmp}/x/cuflash"),
        ({"CUFLASH_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "{tmp}"}, "{tmp}/.cache/cuflash"),
    ],
    ids=["chosen", "home", "xdg", "default"],
)
def test_where_the_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], want: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    assert cache.folder() == Path(want.format(tmp=tmp_path))


def test_a_relative_folder_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "further").mkdir()
    monkeypatch.setenv("CUFLASH_CACHE_DIR", f"relative-{tmp_path.name}")
    monkeypatch.chdir(tmp_path)
    before = cache.wanted()
    monkeypatch.chdir("further")
    assert cache.wanted() == before == tmp_path / f"relative-{tmp_path.name}"
    monkeypatch.delenv("CUFLASH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.wanted() == Path.home() / ".cache" / "cuflash"


def test_a_read_only_folder_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.cached("a.so", build())
    folder.chmod(0o500)
    monkeypatch.setattr(cache, "_can_write", lambda path: path != folder)  # root could
    assert cache.cached("a.so", never) == folder / "a.so"
    message = rf"not caching in {folder}, where no file can be made; .* CUFLASH_CACHE_DIR"
    with pytest.warns(RuntimeWarning, match=message):
        elsewhere = cache.cached("b.so", build())
    assert elsewhere.parent not in (folder, folder.parent)
    assert elsewhere.parent.stat().st_mode & 0o777 == 0o700
    assert cache.cached("b.so", never) == elsewhere
    folder.chmod(0o700)


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o707])
def test_a_folder_that_others_may_write_to_is_not_used(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    (folder / "a.so").write_bytes(b"from somebody else")
    with pytest.warns(RuntimeWarning, match=r"not caching in .* compiles its kernels anew"):
        path = cache.cached("a.so", build())
    assert path.parent != folder and content(path) == b"made"


def test_a_folder_of_somebody_else_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.cached("a.so", build(b"from somebody else"))
    clear()
    other = os.getuid() + 1
    monkeypatch.setattr(cache.os, "getuid", lambda: other)
    with pytest.warns(RuntimeWarning, match="belongs to somebody else"):
        path = cache.cached("a.so", build())
    assert path.parent != folder and content(path) == b"made"


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    """A file is in the way: calls work all the same, for as long as the process lives."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "file" / below))
    with pytest.warns(RuntimeWarning, match="no file can be made; every process compiles"):
        path = cache.cached("a.so", build())
    assert content(path) == b"made" and tmp_path not in path.parents
    assert cache.cached("a.so", never) == path
    assert np.isfinite(attend()).all()


def test_a_folder_that_vanishes(folder: Path) -> None:
    cache.cached("a.so", build())
    shutil.rmtree(folder)
    with pytest.warns(RuntimeWarning, match="no file can be made"):
        assert content(cache.cached("a.so", build())) == b"made"


def test_the_private_folder_goes_with_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    code = """
import os, sys
from cuflash import cache
path = cache.cached("a", lambda path: path.write_bytes(b"made"))
child = os.fork()
if not child:
    sys.exit()  # with the exit handlers of its parent
os.waitpid(child, 0)
assert path.is_file()
print(path)
"""
    result = run(code, CUFLASH_CACHE_DIR=str(tmp_path / "file"), TMPDIR=str(tmp_path / "tmp"))
    assert result.returncode == 0, result.stderr
    path = Path(result.stdout.strip())
    assert tmp_path / "tmp" in path.parents and not path.parent.exists()


def test_the_warning_names_the_line_of_the_call(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    x = np.ones((5, 2, 8), "f4")
    with pytest.warns(RuntimeWarning, match="^cuflash: not caching in ") as caught:
        line = sys._getframe().f_lineno + 1
        cuflash.attention(x, x, x)
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, line)]


# --- disks that are full, and disks that run no programs ------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["disk", "quota"])
def test_a_full_disk_is_named(folder: Path, number: int) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(number, os.strerror(number))

    message = rf"no room is left in {folder}: delete something there, .* in CUFLASH_CACHE_DIR$"
    with pytest.raises(RuntimeError, match=message) as caught:
        cache.cached("a.so", fail)
    assert isinstance(caught.value.__cause__, OSError)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("full", [("cache",), ("tmp",), ("cache", "tmp")], ids=" and ".join)
def test_a_compiler_that_found_a_full_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: tuple[str, ...]
) -> None:
    """Whatever it said."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(disk, "_has_room", lambda path: path.name not in full)

    def fail(path: Path) -> None:
        raise RuntimeError("it ended with signal 7")

    names = {"cache": "CUFLASH_CACHE_DIR", "tmp": "TMPDIR"}
    with pytest.raises(RuntimeError) as caught:
        cache.cached("a.so", fail)
    folders = " and ".join(str(tmp_path / name) for name in full)
    assert f"no room is left in {folders}: " in str(caught.value)
    assert str(caught.value).endswith(f" in {' and '.join(names[name] for name in full)}")


@pytest.mark.parametrize(
    ("variable", "below"), [("XDG_CACHE_HOME", "zig"), ("HOME", ".cache/zig"), ("ZIG", "")]
)
def test_the_cache_of_zig_on_a_full_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, below: str
) -> None:
    """With a program in the place of zig, which says something else each time."""
    for name in ("XDG_CACHE_HOME", "ZIG_GLOBAL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    variable = variable.replace("ZIG", "ZIG_GLOBAL_CACHE_DIR")
    monkeypatch.setenv(variable, str(tmp_path / "small"))
    zig = tmp_path / "zig"
    zig.write_text("#!/bin/sh\necho it crashed\nexit 1\n")
    zig.chmod(0o755)
    with pytest.raises(RuntimeError, match="it crashed") as plain:
        host._run([str(zig)])
    assert not isinstance(plain.value, disk.Unusable)
    full = [tmp_path / "small" / below]
    monkeypatch.setattr(disk, "_has_room", lambda path: path not in full)
    cure = "XDG_CACHE_HOME" if variable == "HOME" else variable
    message = rf"no room is left in {full[0]}: delete something there, .* in {cure}$"
    with pytest.raises(disk.Unusable, match=message):
        host._run([str(zig)])
    full.append(folder)  # a disk that both share: what moves both is said
    with pytest.raises(disk.Unusable, match=message):
        cache.cached("a.so", lambda path: print(host._run([str(zig)])))


def test_zig_caches_elsewhere_if_its_place_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("ZIG_GLOBAL_CACHE_DIR", raising=False)
    for base, own in ((tmp_path, True), (tmp_path / "file", False)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(base))
        host._zig_caches.cache_clear()
        assert (host._zig_caches() == {}) == own
    host._zig_caches.cache_clear()


def test_other_errors_come_through(folder: Path) -> None:
    for error in (RuntimeError("does not compile"), OSError(errno.EIO, "the disk is broken")):

        def fail(path: Path, error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            cache.cached("a.so", fail)
        assert caught.value is error


def test_a_folder_that_libraries_cannot_be_loaded_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "a.so"
    library.write_text("no library")
    with pytest.raises(OSError, match=r"a\.so"):
        disk.load(library, "CUFLASH_CACHE_DIR")
    status = types.SimpleNamespace(f_flag=os.ST_NOEXEC)
    monkeypatch.setattr(disk.os, "statvfs", lambda path: status)
    message = rf"cannot be loaded from {tmp_path}, .* noexec\): .* in CUFLASH_CACHE_DIR$"
    with pytest.raises(RuntimeError, match=message):
        disk.load(library, "CUFLASH_CACHE_DIR")


_APART = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")


def _can_mount() -> bool:
    """Whether a process may have file systems of its own: not in every container, nor on every
    kernel. What the tests mount is not part of the question."""
    mount = f"mount -t tmpfs tmpfs {tempfile.gettempdir()}"
    return shutil.which(_APART[0]) is not None and not subprocess.call(
        [*_APART, mount], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


#: The same errors without a mount are tested above, everywhere.
needs_mounts = pytest.mark.skipif(not _can_mount(), reason="a user may mount nothing here")


def mounted(folder: Path, options: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that sees a file system of its own in a folder."""
    folder.mkdir()
    mount = f"mount -t tmpfs -o mode=700,{options} tmpfs {folder}"
    return subprocess.run(
        [*_APART, f'{mount} && exec "$@"', "sh", sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


CALL = "import numpy as np, cuflash; x = np.ones((5, 2, 8), 'f4'); cuflash.attention(x, x, x)"
AHEAD = "import cuflash; cuflash.precompile('float32', 8, arch='sm_90', direction='forward')"


@needs_mounts
@pytest.mark.parametrize(
    ("variable", "code"),
    [("CUFLASH_CACHE_DIR", CALL), ("CUFLASH_CACHE_DIR", AHEAD), ("TMPDIR", CALL)],
    ids=["cpu", "gpu", "temporary files"],
)
def test_a_disk_that_is_really_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, code: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "small"))
    done = mounted(tmp_path / "small", "size=8k", code)
    last = done.stderr.rstrip().splitlines()[-1]
    assert f"no room is left in {tmp_path / 'small'}: delete" in last
    assert last.endswith(f" in {variable}")


@needs_mounts
@needs_zig
def test_a_cache_of_zig_that_is_really_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZIG_GLOBAL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "small"))
    monkeypatch.setenv("CXX", f"{sys.executable} -m ziglang c++")
    done = mounted(tmp_path / "small", "size=1m", CALL)
    last = done.stderr.rstrip().splitlines()[-1]
    assert f"no room is left in {tmp_path / 'small' / 'zig'}: delete" in last
    assert last.endswith(" in XDG_CACHE_HOME")


@needs_mounts
@pytest.mark.parametrize("variable", ["CUFLASH_CACHE_DIR", "TMPDIR"])
def test_a_disk_that_really_runs_no_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "noexec"))
    done = mounted(tmp_path / "noexec", "noexec", CALL)
    last = done.stderr.rstrip().splitlines()[-1]
    assert f"cannot be loaded from {tmp_path / 'noexec'}" in last and "noexec)" in last
    assert last.endswith(f" in {variable}") and "install" not in last


# --- files that are damaged, and processes that meet ----------------------------------------------


DAMAGE = {
    "empty": lambda x: b"",
    "a tenth": lambda x: x[: len(x) // 10],  # where the loader would meet a bus error
    "a half": lambda x: x[: len(x) // 2],
    "a byte short": lambda x: x[:-1],
    "zeros at the end": lambda x: x[:4096] + bytes(len(x) - 4096),
    "text": lambda x: b"?" * len(x),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_libraries_are_made_again(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    """In a process of its own, which a damaged library could end."""
    attend()  # fills the cache
    libraries = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(libraries) == 2  # the executor and one kernel
    for path, whole in libraries.items():
        path.unlink()  # this process has it mapped
        path.write_bytes(damage(whole))
    result = run(
        "import numpy as np, cuflash; x = np.ones((5, 2, 8), 'f4');"
        "assert (cuflash.attention(x, x, x) == 1).all()"
    )
    assert result.returncode == 0, f"{result.returncode} {result.stderr}"
    assert set(folder.iterdir()) == set(libraries)
    for path, whole in libraries.items():
        assert len(path.read_bytes()) == len(whole)


def test_what_fails_in_a_thread_is_not_done_again() -> None:
    done = []

    def do(x: int) -> int:
        done.append(x)
        if x == 1:
            raise RuntimeError("c++ -fno-threadsafe-statics failed, at threadIdx")
        return x

    with pytest.raises(RuntimeError, match="threadIdx") as caught:
        cache.at_once(do, [0, 1, 2, 3])
    assert len(done) == len(set(done)) and caught.value.__context__ is None


def test_where_no_thread_starts_one_is_done_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    assert cache.at_once(str, [1, 2, 3]) == ["1", "2", "3"]


def test_processes_may_start_at_once_with_an_empty_cache(folder: Path) -> None:
    code = """
import sys
import numpy as np, cuflash
x = np.random.default_rng(0).normal(size=(5, 2, 8)).astype("f4")
sys.stdin.readline()  # all of them are here
print(cuflash.attention(x, x, x).tobytes().hex())
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            **dict(stdin=pipe, stdout=pipe, stderr=pipe, env=environment, text=True),
        )
        for _ in range(4)
    ]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    results = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, results
    assert {out.strip() for out, _ in results} == {attend().tobytes().hex()}
    assert len(list(folder.iterdir())) == 2  # the executor and one kernel, and nothing else


# --- keys ----------------------------------------------------------------------------------------


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the kernel sources, to be edited."""
    copy = tmp_path / "kernels"
    shutil.copytree(source.KERNEL_ROOT, copy)
    monkeypatch.setattr(source, "KERNEL_ROOT", copy)
    return copy


def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Names of the files that a kernel would be kept in, for both kinds of machine."""
    with monkeypatch.context() as patch:
        patch.setattr(compile, "cached", lambda name, build: Path(name))
        return {"cpu": compile.host_library(PLAN).name, "gpu": compile.cubin(PLAN, SM90).name}


def test_names_tell_kernel_machine_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    got = names(monkeypatch)
    assert re.fullmatch(r"delta-cpu-[0-9a-f]{24}\.so", got["cpu"])
    assert re.fullmatch(r"delta-sm_90-[0-9a-f]{24}\.cubin", got["gpu"])


def test_an_edit_in_the_middle_of_a_session_is_seen(kernels: Path) -> None:
    """A digest that is remembered from before an edit would file the new code under the old key."""
    clean = compile.host_library(PLAN)
    path = kernels / "attention" / "delta.cu"
    text = path.read_text(encoding="utf-8")
    path.write_text(text + "// edited\n", encoding="utf-8")
    assert compile.host_library(PLAN) != clean
    path.write_text(text, encoding="utf-8")
    assert compile.host_library(PLAN) == clean


def test_an_edit_during_a_compilation_is_refused(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.find_compiler()  # which compiles too

    def edit(*_: object, **__: object) -> None:
        with (kernels / "attention" / "delta.cu").open("a", encoding="utf-8") as file:
            file.write("// edited\n")

    monkeypatch.setattr(host, "compile_library", edit)
    with pytest.raises(RuntimeError, match=r"delta.*changed while it was compiled"):
        compile.host_library(Delta("float64"))


def test_keys_do_not_depend_on_the_place(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = names(monkeypatch)
    monkeypatch.setattr(source, "KERNEL_ROOT", ROOT / "kernels")
    assert names(monkeypatch) == copied


def test_an_edited_source_has_another_key(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = names(monkeypatch)
    used = {
        "cpu": {p for n in ("host/cuda.h", "host/entry.h") for p in _files(n, ("host", "."))}
        | set(_files("attention/delta.cu", ("host", "."))),
        "gpu": set(_files("attention/delta.cu", (".",))),
    }
    assert kernels / "parts" / "types.cuh" in used["cpu"] & used["gpu"]
    assert kernels / "hw" / "convert.cuh" in used["gpu"] - used["cpu"]
    assert kernels / "host" / "hw" / "convert.cuh" in used["cpu"] - used["gpu"]
    for path in sorted(kernels.rglob("*")):
        if path.is_file():
            text = path.read_bytes()
            path.write_bytes(text + b"\n// edited\n")
            after = names(monkeypatch)
            for machine in ("cpu", "gpu"):
                changed = after[machine] != before[machine]
                assert changed == (path in used[machine]), f"{machine}: {path}"
            path.write_bytes(text)
    assert names(monkeypatch) == before


def _files(name: str, includes: tuple[str, ...]) -> list[Path]:
    return source.files(f'#include "{name}"\n', includes)


def test_all_that_is_included_is_found(kernels: Path) -> None:
    """By the compiler's own account: -MM lists what it read."""
    text = compile.translation_unit(PLAN, cpu=True)
    unit = kernels.parent / "unit.cpp"
    unit.write_text(text)
    # What only instrumented kernels include belongs to the digest of all.
    command = [*host.find_compiler().command, "-std=c++17", "-MM", "-DCUFLASH_INSTRUMENTED"]
    command += [str(unit)]
    command += [f"-I{kernels / folder}" for folder in source.HOST_INCLUDES]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    read = {Path(word).resolve() for word in output.replace("\\\n", " ").split()[2:]}
    found = [
        path
        for name in ("host/cuda.h", "attention/delta.cu", "host/entry.h")
        for path in _files(name, source.HOST_INCLUDES)
    ]
    assert read == set(found)


def test_a_missing_source_is_named(kernels: Path) -> None:
    (kernels / "parts" / "types.cuh").unlink()
    with pytest.raises(FileNotFoundError, match=r"kernel source 'parts/types\.cuh' is not in"):
        compile.host_library(PLAN)


def test_options_and_versions_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = names(monkeypatch)
    compiler = host.find_compiler()
    for patched, name, value, machine in [
        (host, "flags", lambda *_: ("-O3",), "cpu"),
        (host, "find_compiler", lambda: host.Compiler(("g++",), compiler.version + "1"), "cpu"),
        (host, "find_compiler", lambda: host.Compiler(("other",), compiler.version), "cpu"),
        (compile, "_nvrtc_options", lambda device: ("-O1",), "gpu"),
        (compile, "nvrtc_version", lambda: (99, 0), "gpu"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(patched, name, value)
            after = names(patch)
        other = "gpu" if machine == "cpu" else "cpu"
        assert after[machine] != before[machine] and after[other] == before[other]
    architectures = {
        compile._nvrtc_options(device.architecture(*c)) for c in [(7, 5), (8, 0), (9, 0)]
    }
    assert len(architectures) == 3


def test_plans_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "cached", lambda name, build: Path(name))
    plans = {
        plan
        for dtype in DTYPES.values()
        for head_dim in (8, 64, 128)
        for direction in ("forward", "backward")
        for plan in select.choose(direction, Traits(dtype, head_dim, head_dim), device.CPU)
    }
    assert len({compile.host_library(plan) for plan in plans}) == len(plans)
    assert len({compile.cubin(plan, SM90) for plan in plans}) == len(plans)


# --- nothing to compile with ---------------------------------------------------------------------


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError) as caught:
        attend()
    message = str(caught.value)
    assert "needs a C++ compiler: install one (`pip install ziglang`" in message
    assert "CXX" in message and "\n" not in message
    monkeypatch.undo()
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    assert np.isfinite(attend()).all()  # once there is one, the same process goes on


@pytest.mark.parametrize("chosen", ["/no/such/compiler", "false", "true", "g++ 'unfinished"])
def test_a_broken_compiler_is_not_replaced(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv("CXX", chosen)
    message = (
        r"(?s)^the C\+\+ compiler that \$CXX names does not work: .*; name another one in CXX, or"
    )
    with pytest.raises(RuntimeError, match=message):
        attend()


def test_a_chosen_compiler_may_have_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = host.find_compiler()
    monkeypatch.setenv("CXX", f"{' '.join(plain.command)} -DCHOSEN")
    clear()
    assert host.find_compiler().command == (*plain.command, "-DCHOSEN")
    assert np.isfinite(attend()).all()


# --- NVRTC, which needs no GPU --------------------------------------------------------------------


def test_cubins_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compile.cubin(PLAN, SM90)
    assert path.parent == folder and path.read_bytes()[:4] == b"\x7fELF"
    monkeypatch.setattr(compile, "compile_cubin", never)
    assert compile.cubin(PLAN, SM90) == path


def test_kernels_of_a_call_are_compiled_at_the_same_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = select.choose("backward", Traits(DTYPES["float32"], 8, 8), SM90)
    assert len(plans) == 3
    monkeypatch.setattr(cache, "_processors", lambda: len(plans))
    monkeypatch.setenv("CUFLASH_DEBUG", "1")
    barrier = threading.Barrier(len(plans))

    def compile_cubin(text: str, plan: UnitPlan, where: device.Device) -> tuple[bytes, str]:
        barrier.wait(timeout=60)
        return plan.kernel.encode(), "Used 7 registers"

    class Kernel:
        def __init__(self, plan: UnitPlan, path: Path, where: device.Device) -> None:
            assert content(path) == plan.kernel.encode()

    monkeypatch.setattr(compile, "_kernels", {})
    monkeypatch.setattr(compile, "compile_cubin", compile_cubin)
    monkeypatch.setattr(compile, "GpuKernel", Kernel)
    found = compile.kernels(plans, SM90, 0)
    said = capsys.readouterr().err.splitlines()
    assert sorted(said) == sorted(
        f"cuflash: compiled {plan.kernel} for sm_90: 7 registers, 0 bytes spilled" for plan in plans
    )
    assert [compile.kernel(plan, SM90, 0) for plan in plans] == [*found]
    assert compile.kernels(plans, SM90, 1) != found  # of another GPU, from the same files


def test_threads_change_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_processors", lambda: 4)
    monkeypatch.setattr(compile, "GpuKernel", lambda plan, path, where: (plan, path))
    plans = [Delta(dtype) for dtype in DTYPES]
    for plan, path in compile.kernels(plans, SM90, 0):
        text = compile.translation_unit(plan, cpu=False)
        assert content(path) == compile.compile_cubin(text, plan, SM90)[0]


def test_libraries_of_a_call_are_compiled_at_the_same_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three kernels and the executor."""
    host.find_compiler()  # which compiles too
    monkeypatch.setattr(cache, "_processors", lambda: 4)
    barrier, compile_library = threading.Barrier(4), host.compile_library

    def meet(*given: Any, **named: Any) -> None:
        barrier.wait(timeout=60)
        compile_library(*given, **named)

    monkeypatch.setattr(host, "compile_library", meet)
    x = np.ones((5, 2, 8), "f4")
    out, lse = x, np.zeros((2, 5), "f4")
    dq, dk, dv = cuflash.attention_backward(x, x, x, x, out, lse)
    assert np.isfinite(dq).all() and np.isfinite(dk).all() and np.isfinite(dv).all()
    assert len(list(folder.iterdir())) == 4


def test_an_architecture_that_nvrtc_does_not_know() -> None:
    future = device.Device("GeForce 9999", (99, 0), 100, 65536, 65536)
    with pytest.raises(RuntimeError) as caught:
        compile.compile_cubin("", Delta("float32"), future)
    message = str(caught.value)
    for part in ("NVRTC ", "GeForce 9999", "compute capability 99.0", "pip install -U nvidia-cuda"):
        assert part in message
    assert "\n" not in message


def test_a_source_that_does_not_compile_shows_the_log() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^delta does not compile for sm_90:\n.*nonsense"):
        compile.compile_cubin("nonsense", Delta("float32"), SM90)


def test_no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import nvrtc

    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13 is not here")

    monkeypatch.setattr(nvrtc, "getVersion", missing)
    with pytest.raises(RuntimeError) as caught:
        compile.cubin(PLAN, SM90)
    message = str(caught.value)
    for part in ("NVRTC", "libnvrtc.so.13", "pip install nvidia-cuda-nvrtc", "nvrtc-cu12"):
        assert part in message
    assert "\n" not in message


def test_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import runtime

    facts = {"major": 7, "minor": 0, "name": b"Tesla V100"}
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda index: facts)
    device.gpu.cache_clear()
    message = r"^Tesla V100 has compute capability 7\.0, and cuflash needs 7\.5 \(Turing\) or later"
    with pytest.raises(RuntimeError, match=message):
        device.gpu(0)


# --- imports and locales --------------------------------------------------------------------------


def test_import_does_nothing(tmp_path: Path) -> None:
    code = """
import os, sys
import cuflash
for name in ("cupy", "ml_dtypes", "torch", "jax"):
    assert name not in sys.modules, name
"""
    variables = dict(HOME=str(tmp_path), XDG_CACHE_HOME=None, TMPDIR=str(tmp_path))
    result = run(code, "-W", "error", CUFLASH_CACHE_DIR=None, CXX="/no/such", **variables)
    assert result.returncode == 0, result.stderr
    assert result.stdout == result.stderr == "" and list(tmp_path.iterdir()) == []


def test_numpy_arrays_need_neither_cupy_nor_ml_dtypes() -> None:
    code = """
import sys
sys.modules["cupy"] = sys.modules["ml_dtypes"] = None  # an import of them fails
import numpy as np, cuflash
x = np.ones((5, 2, 8), "f4")
out, vjp = cuflash.attention_vjp(x, x, x)
vjp(out)
"""
    result = run(code, "-W", "error", CUFLASH_CACHE_DIR=None)
    assert result.returncode == 0, result.stderr


def test_kernels_are_read_in_any_locale(kernels: Path) -> None:
    """Sources are UTF-8, whatever the machine speaks."""
    with (kernels / "parts" / "types.cuh").open("a", encoding="utf-8") as file:
        file.write("// Gauß\n")
    code = """
import locale, os, pathlib
import numpy as np, cuflash
from cuflash import compile, device, select, source
from cuflash.dtypes import DTYPES
from cuflash.problem import Traits
source.KERNEL_ROOT = pathlib.Path(os.environ["KERNELS"])
assert locale.getpreferredencoding(False).lower().replace("-", "") != "utf8"
x = np.ones((5, 2, 8), "f4")
assert (cuflash.attention(x, x, x) == 1).all()
for plan in select.choose("forward", Traits(DTYPES["float32"], 8, 8), device.architecture(9, 0)):
    compile.cubin(plan, device.architecture(9, 0))
"""
    variables = dict(LC_ALL="C", PYTHONCOERCECLOCALE="0", KERNELS=str(kernels))
    result = run(code, "-X", "utf8=0", **variables)
    assert result.returncode == 0, result.stderr


def test_a_folder_with_a_strange_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "with space 'and' ü"))
    assert np.isfinite(attend()).all()
    assert (tmp_path / "with space 'and' ü").is_dir()
