# SPDX-License-Identifier: Apache-2.0
"""First aid: environments in which something lacks, and the sentence that each gives.

Each runs in a process of its own, where modules are hidden, or a folder with a stand-in for CuPy
comes first on the path. The same sentence comes from ``python -m cuflash`` and from a call.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cuflash
from cuflash import cache, compile, device, environment, firstaid, host
from cuflash.plan import Delta

ROOT = Path(__file__).parent.parent
SELF_TEST = "import sys; from cuflash.firstaid import main; sys.exit(main())"

#: Arrays of another library that lie on a GPU, without a GPU.
STRANGERS = """
class Dlpack:
    def __dlpack_device__(self): return 2, 0
    def __dlpack__(self, **options): raise BufferError("never asked")
class Interface:
    __cuda_array_interface__ = {
        "typestr": "<f4", "shape": (5, 2, 8), "data": (4096, False), "version": 3, "strides": None
    }
"""

#: A stand-in for CuPy: as much as is asked before a kernel runs.
STAND_IN = """
__version__ = "99.0"
class ndarray: pass
from . import cuda
"""
CUDA = """
import types
def fail(message):
    def function(*arguments): raise RuntimeError(message)
    return function
class NVRTCError(Exception): pass
class nvrtc:
    NVRTCError = NVRTCError
    getVersion = staticmethod({version})
    createProgram = staticmethod(lambda *arguments: 1)
    destroyProgram = staticmethod(lambda program: None)
    getProgramLog = staticmethod(lambda program: "error: invalid value for --gpu-architecture")
    @staticmethod
    def compileProgram(program, options): raise NVRTCError("NVRTC_ERROR_INVALID_OPTION")
class runtime:
    getDeviceCount = staticmethod({count})
    getDevice = staticmethod(lambda: 0)
    driverGetVersion = staticmethod(lambda: 12080)
    getDeviceProperties = staticmethod(lambda index: dict(
        name=b"Tesla V100", major={major}, minor=0, multiProcessorCount=80,
        sharedMemPerBlockOptin=98304, sharedMemPerMultiprocessor=98304,
    ))
"""


def stand_in(
    folder: Path, count: str = "lambda: 1", version: str = "lambda: (13, 0)", major: int = 9
) -> str:
    """Write a stand-in for CuPy; returns the folder to put on the path."""
    (folder / "cupy").mkdir()
    (folder / "cupy" / "__init__.py").write_text(STAND_IN)
    text = CUDA.replace("{version}", version).replace("{count}", count)
    (folder / "cupy" / "cuda.py").write_text(text.replace("{major}", str(major)))
    return str(folder)


def run(code: str, hidden: tuple[str, ...] = (), first: str = "", **variables: str) -> Any:
    """Run code in a process where modules are hidden and a folder comes first on the path."""
    hide = "".join(f"sys.modules[{name!r}] = None; " for name in hidden)
    path = os.pathsep.join(filter(None, (first, str(ROOT))))
    return subprocess.run(
        [sys.executable, "-c", f"import sys; {hide}\n{code}"],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def problems(done: Any) -> list[str]:
    assert not done.stderr, done.stderr
    return [x.removeprefix("problem: ") for x in done.stdout.splitlines() if "problem: " in x]


def absent(done: Any) -> list[str]:
    assert not done.stderr, done.stderr
    return [x.removeprefix("absent: ") for x in done.stdout.splitlines() if "absent: " in x]


def said(code: str, **options: Any) -> str:
    """Run code that raises; returns the error's kind and message, which must be one sentence."""
    done = run(code, **options)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.rstrip().splitlines()[-1]


CPU_CALL = "import numpy as np, cuflash; x = np.ones((5, 2, 8), 'f4'); cuflash.attention(x, x, x)"
NO_CUPY = "arrays on a GPU need CuPy, which is not installed; install the packages for the CUDA"
NO_COMPILER = "running kernels on the CPU needs a C++ compiler: install one (`pip install ziglang`"


def stranger(name: str) -> str:
    return f"{STRANGERS}\nimport cuflash\ncuflash.attention({name}(), {name}(), {name}())"


# --- something lacks ------------------------------------------------------------------------------


def test_a_page_about_this_machine(backend: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cuflash"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for part in (
        *(f"cuflash {cuflash.__version__} in ", "Python 3.", "NumPy ", "CuPy ", "ml_dtypes "),
        *("cache: ", " files, ", "C++ compiler: ", "NVRTC: ", "NumPy arrays: work ("),
    ):
        assert part in done.stdout
    if backend.name == "gpu":
        assert "CuPy arrays on GPU 0: work" in done.stdout and "no problems" in done.stdout


@pytest.mark.parametrize("name", ["Dlpack", "Interface"])
def test_no_cupy(name: str) -> None:
    message = said(stranger(name), hidden=("cupy",))
    assert message.startswith(f"RuntimeError: q: {NO_CUPY}") and "cupy-cuda13x" in message
    done = run(SELF_TEST, hidden=("cupy",))
    assert any(text.startswith(NO_CUPY) for text in absent(done))
    assert problems(done) == [] and "no problems" in done.stdout
    assert done.returncode == 0 and "no CuPy" in done.stdout and "NVRTC:" not in done.stdout


def test_a_cupy_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("raise ImportError('libcudart: no such file')")
    want = "CuPy does not load (libcudart: no such file); install the packages for the CUDA"
    assert f"RuntimeError: q: {want}" in said(stranger("Dlpack"), first=str(tmp_path))
    done = run(SELF_TEST, first=str(tmp_path))
    assert any(problem.startswith(want) for problem in problems(done))
    assert "CuPy that does not load" in done.stdout


def test_a_cupy_that_hides_its_reason(tmp_path: Path) -> None:
    """As CuPy does: a page of text, which begins with a line of dashes."""
    (tmp_path / "cupy").mkdir()
    wrapped = (
        "try: import no_such_part\nexcept ImportError as e: raise ImportError('===\\nx') from e"
    )
    (tmp_path / "cupy" / "__init__.py").write_text(wrapped)
    done = run(SELF_TEST, first=str(tmp_path))
    want = "CuPy does not load (No module named 'no_such_part'); install the packages"
    assert any(problem.startswith(want) for problem in problems(done))


@pytest.mark.parametrize(
    ("reason", "want"),
    [
        ("cudaErrorInsufficientDriver: too old", "there is no driver for NVIDIA GPUs, or it is"),
        ("cudaErrorNoDevice: none", "CUDA finds no GPU (cudaErrorNoDevice: none); look whether"),
    ],
    ids=["no libcuda", "no GPU"],
)
def test_no_gpu(tmp_path: Path, reason: str, want: str) -> None:
    first = stand_in(tmp_path, count=f'fail("{reason}")')
    for name in ("Dlpack", "Interface"):
        assert said(stranger(name), first=first).startswith(f"RuntimeError: q: {want}")
    ahead = "import cuflash; cuflash.precompile('float32', 64)"
    assert said(ahead, first=first).startswith(f"RuntimeError: {want}")
    done = run(SELF_TEST, first=first)
    assert any(problem.startswith(want) for problem in problems(done))
    assert "NVRTC: 13.0" in done.stdout and done.returncode == 0


def test_a_gpu_that_is_too_old(tmp_path: Path) -> None:
    first = stand_in(tmp_path, major=7)
    want = "Tesla V100 has compute capability 7.0, and cuflash needs 7.5 (Turing) or later"
    ahead = "import cuflash; cuflash.precompile('float32', 64)"
    assert want in said(ahead, first=first)
    done = run(SELF_TEST, first=first)
    assert any(problem.startswith(want) for problem in problems(done))
    assert "CuPy arrays" not in done.stdout and done.returncode == 0
    assert "driver: CUDA 12.8\n" in done.stdout


def test_no_nvrtc(tmp_path: Path) -> None:
    first = stand_in(tmp_path, version='fail("No such file: libnvrtc.so.13\\nmore")')
    want = (
        "NVRTC, CUDA's run-time compiler, cannot be loaded (No such file: libnvrtc.so.13); install "
        "it with `pip install nvidia-cuda-nvrtc` for CUDA 13"
    )
    ahead = "import cuflash; cuflash.precompile('float32', 64, arch='sm_90')"
    assert said(ahead, first=first).startswith(f"RuntimeError: {want}")
    done = run(SELF_TEST, first=first)
    assert any(problem.startswith(want) for problem in problems(done))
    assert "NVRTC: none" in done.stdout


@pytest.mark.parametrize(
    ("version", "package"), [("12, 1", "nvidia-cuda-nvrtc-cu12"), ("13, 0", "nvidia-cuda-nvrtc")]
)
def test_an_nvrtc_that_is_too_old(tmp_path: Path, version: str, package: str) -> None:
    first = stand_in(tmp_path, version=f"lambda: ({version})", major=12)
    number = version.replace(", ", ".")
    want = rf"NVRTC {number} does not know .*, of compute capability 12\.0; install a version that "
    want += rf"does \(`pip install -U {package}`\)"
    ahead = "import cuflash; cuflash.precompile('float32', 64, direction='forward')"
    assert re.search(want, said(ahead, first=first, CUFLASH_CACHE_DIR=str(tmp_path / "cache")))


@pytest.mark.parametrize("reason", ["CUDA_ERROR_INVALID_IMAGE: no", "CUDA_ERROR_OUT_OF_MEMORY"])
def test_a_driver_that_is_older_than_nvrtc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    import cupy

    class Function:
        def __setattr__(self, name: str, value: int) -> None:
            raise OSError(reason)

    class Module:
        def __init__(self, path: str) -> None:
            assert Path(path).read_bytes()[:4] == b"\x7fELF"

        def get_function(self, name: str) -> Function:
            return Function()

    monkeypatch.setattr(cupy, "RawModule", Module)
    version = ".".join(map(str, compile.nvrtc_version()))
    want = rf"^the driver does not load what NVRTC {version} compiles for sm_90 .*nvidia-smi"
    with pytest.raises(RuntimeError if "IMAGE" in reason else OSError) as caught:
        plan, where = Delta("float32"), device.architecture(9, 0)
        compile.GpuKernel(plan, compile.cubin(plan, where), where)
    assert bool(re.search(want, str(caught.value))) == ("IMAGE" in reason)


def test_no_compiler(tmp_path: Path) -> None:
    nothing = dict(PATH=str(tmp_path), CXX="", hidden=("ziglang", "cupy"))
    assert said(CPU_CALL, **nothing).startswith(f"RuntimeError: {NO_COMPILER}")
    done = run(SELF_TEST, **nothing)
    assert done.returncode == 1
    assert any(problem.startswith(NO_COMPILER) for problem in problems(done))
    assert "C++ compiler: none" in done.stdout and "NumPy arrays: do not work" in done.stdout


def test_a_cache_whose_name_leads_nowhere() -> None:
    nowhere = dict(CUFLASH_CACHE_DIR="~nobody-of-this-name/cuflash")
    for arguments in ("", "['--clear']"):
        done = run(SELF_TEST.replace("main()", f"main({arguments})"), **nowhere)
        assert done.returncode == 1
        assert any("~nobody-of-this-name" in problem for problem in problems(done))


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    want = f"not caching in {tmp_path / 'file'}, where no file can be made; every process compiles"
    variables = dict(CUFLASH_CACHE_DIR=str(tmp_path / "file"))
    done = run(CPU_CALL, **variables)
    assert done.returncode == 0 and f"RuntimeWarning: cuflash: {want}" in done.stderr
    done = run(SELF_TEST, hidden=("cupy",), **variables)
    assert done.returncode == 0 and any(problem.startswith(want) for problem in problems(done))


def test_a_cache_that_others_may_write_to(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    want = f"not caching in {tmp_path / 'cache'}, since it belongs to somebody else or others can"
    done = run(SELF_TEST, hidden=("cupy",), CUFLASH_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0 and any(problem.startswith(want) for problem in problems(done))


def test_no_ml_dtypes() -> None:
    code = """
import cuflash
class Tensor:
    dtype = "torch.bfloat16"
    def __dlpack_device__(self): return 1, 0
    def __dlpack__(self, **options): raise BufferError("Unsupported dtype")
cuflash.attention(Tensor(), Tensor(), Tensor())
"""
    want = "bfloat16 arrays need the package ml_dtypes, which is not installed: `pip install"
    message = said(code, hidden=("ml_dtypes",))
    assert message.startswith("TypeError: q: Tensor does not come in through DLPack: Unsupported")
    assert f"; {want}" in message
    message = said(code)
    assert want not in message and "; NumPy takes no bfloat16 that way: pass a NumPy" in message
    done = run(SELF_TEST, hidden=("ml_dtypes", "cupy"))
    assert [text.startswith(want) for text in absent(done)] == [False, True]
    assert problems(done) == [] and done.returncode == 0


@pytest.mark.parametrize(
    "fault",
    ["ImportError('made for NumPy 1\\nmore')", "ModuleNotFoundError('made for NumPy 1', name='x')"],
    ids=["import", "module"],
)
def test_an_ml_dtypes_that_does_not_load(tmp_path: Path, fault: str) -> None:
    noise = "import sys; print('A module that was compiled using NumPy 1.x', file=sys.stderr)\n"
    (tmp_path / "ml_dtypes.py").write_text(f"{noise}raise {fault}")
    want = (
        "bfloat16 arrays need the package ml_dtypes, which does not load (made for NumPy 1); "
        "install it anew, for this Python and NumPy: `pip install -U --force-reinstall --no-deps"
    )
    done = run(SELF_TEST, hidden=("cupy",), first=str(tmp_path))
    assert [text[: len(want)] for text in problems(done)] == [want]
    assert "ml_dtypes that does not load" in done.stdout and done.returncode == 0
    code = "from cuflash.testing.cases import numpy_dtype; numpy_dtype('bfloat16')"
    assert want in said(code, first=str(tmp_path))


def test_a_compiler_that_does_not_work_is_shown_once() -> None:
    """Each attempt has another folder, so that the text differs."""
    command = f"{shlex.join(host.find_compiler().command)} --no-such-option"
    done = run(SELF_TEST, hidden=("cupy",), CXX=command)
    assert done.returncode == 1 and not done.stderr
    assert done.stdout.count("problem: ") == 1
    assert f"problem: the C++ compiler that $CXX names does not work: {command} " in done.stdout
    assert "C++ compiler: none\n" in done.stdout and "NumPy arrays: do not work\n" in done.stdout


# --- the page on machines with GPUs ---------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let there be a Hopper GPU and a Turing GPU; returns what is tested on them."""
    ran: list[str] = []
    monkeypatch.setattr(environment, "gpu_count", lambda: 2)
    monkeypatch.setattr(
        device, "gpu", lambda index: device.architecture(*((9, 0) if index == 0 else (7, 5)))
    )
    monkeypatch.setattr(firstaid, "_test_cpu", lambda: ran.append("cpu"))
    monkeypatch.setattr(firstaid, "_test_gpu", lambda index: ran.append(f"gpu {index}"))
    monkeypatch.setattr(firstaid, "_test_cupy", lambda index: ran.append(f"cupy {index}"))
    return ran


def test_gpus_and_who_serves_them(two_gpus: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert firstaid.main([]) == 0
    page = capsys.readouterr().out
    assert two_gpus == ["cpu", "gpu 0", "gpu 1", "cupy 0", "cupy 1"]
    for part in (
        "GPU 0: sm_90, compute capability 9.0; float16 by sm90, bfloat16 by sm90, float32 by simt",
        "GPU 1: sm_75, compute capability 7.5; float16 by simt, bfloat16 by simt, float32 by simt",
        "CuPy arrays on GPU 1: work (",
        "no problems",
    ):
        assert part in page


def test_a_self_test_that_fails(
    two_gpus: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: int) -> None:
        raise RuntimeError("all is wrong")

    monkeypatch.setattr(firstaid, "_test_gpu", fails)
    assert firstaid.main([]) == 0  # the CPU is usable
    monkeypatch.setattr(firstaid, "_test_cpu", fails)
    assert firstaid.main([]) == 1
    page = capsys.readouterr().out
    assert page.count("problem: all is wrong") == 2  # once a page
    assert "NumPy arrays: do not work" in page and "GPU 1: do not work" in page


def test_headers_that_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        class cuda:
            Device = staticmethod(lambda index: pytest.MonkeyPatch.context())

        @staticmethod
        def asarray(x: Any) -> Any:
            raise RuntimeError("cannot open source file cuda_fp16.h\nin line 1")

    monkeypatch.setattr(environment, "import_cupy", lambda: Module)
    message = r"kernels of its own \(cannot open source file cuda_fp16\.h\); .* nvidia-cuda-runtime"
    with pytest.raises(RuntimeError, match=message):
        firstaid._test_cupy(0)


def test_wrong_results_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true = cuflash.attention_vjp

    def false(*arrays: Any, **options: Any) -> Any:
        out, vjp = true(*arrays, **options)
        return out * 1.001, vjp

    firstaid._test_cpu()
    monkeypatch.setattr(cuflash, "attention_vjp", false)
    with pytest.raises(RuntimeError, match=r"^out in float32 is wrong .* cuflash --clear"):
        firstaid._test_cpu()


# --- the cache ------------------------------------------------------------------------------------


def test_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    cache._readable.cache_clear()
    (made,) = cuflash.precompile("float32", 16, direction="forward", arch="sm_90")
    folder, names = made.path.parent, [".compile-old", f".{made.path.name}.old_1", made.path.name]
    for age in ("old", "new"):  # left by a process that was stopped, and by one at work
        (folder / f".compile-{age}").mkdir()
        (folder / f".{made.path.name}.{age}_1").touch()
    for name in names[:2]:
        os.utime(folder / name, (0, 0))
    (folder / ".compile-old" / f".{made.path.name}.cpp").touch()
    os.utime(folder / ".compile-old", (0, 0))
    (folder / ".compile-settings").mkdir()
    (folder / ".compile-settings" / "mine.txt").touch()
    os.utime(folder / ".compile-settings", (0, 0))
    (folder / "delta-cpu-0123456789abcdef01234567.so").mkdir()
    (folder / "libother.so").write_text("somebody's")
    assert [path.name for path in cache.contents()] == names
    assert firstaid.main(["--clear"]) == 0
    left = {".compile-new", f".{made.path.name}.new_1", "libother.so", ".compile-settings"}
    left |= {"delta-cpu-0123456789abcdef01234567.so"}
    assert {path.name for path in folder.iterdir()} == left
    said = capsys.readouterr().out
    assert f"removed from {folder}: 3 files, " in said
    assert "left there: 5 entries that cuflash has not made, or is making" in said
    assert firstaid.main(["--clear"]) == 0  # also of a cache that is empty, or not there
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "nowhere"))
    assert firstaid.main(["--clear"]) == 0
    cache._readable.cache_clear()


def test_clear_refuses_the_folder_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root could."""
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    kernel = tmp_path / "delta-sm_90-0123456789abcdef01234567.cubin"
    kernel.touch()
    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "getuid", lambda: tmp_path.stat().st_uid + 1)
        assert firstaid.main(["--clear"]) == 1
    said = capsys.readouterr().out
    owner = tmp_path.owner()
    assert kernel.exists()
    assert said.startswith(f"problem: nothing is removed from {tmp_path}, which belongs to {owner}")
    assert said.endswith("name your own folder in CUFLASH_CACHE_DIR\n")
    assert firstaid.main(["--clear"]) == 0 and not kernel.exists()


def test_debug_says_what_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUFLASH_DEBUG", "1")
    cuflash.precompile("float32", 16, direction="forward", arch="sm_90")
    line = r"cuflash: compiled forward_simt for sm_90: \d+ registers, 0 bytes spilled\n"
    assert re.fullmatch(line, capsys.readouterr().err)
    assert compile.nvrtc_version() >= (12, 0)
