# SPDX-License-Identifier: Apache-2.0
"""What a wheel and an sdist hold, and that a wheel runs outside the checkout."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import cuflash

ROOT = Path(__file__).parent.parent


def build(what: str, source: Path, folder: Path) -> Path:
    """Build a "wheel" or an "sdist" of a source tree."""
    pytest.importorskip("hatchling", reason="the build back end hatchling is not installed")
    code = f"import sys; from hatchling import build; print(build.build_{what}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(folder)]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return folder / result.stdout.split()[-1]


def unpacked(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(wheel, tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", ROOT, folder)) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"cuflash-{cuflash.__version__}"


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_kernels_hold_no_python() -> None:
    suffixes = {path.suffix for path in (ROOT / "kernels").rglob("*") if path.is_file()}
    assert suffixes <= {".cu", ".cuh", ".cpp", ".h", ".md"}


def test_a_wheel_holds_the_package_and_the_kernels(installed: Path) -> None:
    shipped = files(installed)
    expected = {f"cuflash/{name}": text for name, text in files(ROOT / "cuflash").items()}
    expected |= {f"cuflash/kernels/{name}": text for name, text in files(ROOT / "kernels").items()}
    rest = {name for name in shipped if name not in expected}
    assert rest == {
        name for name in rest if name.startswith(f"cuflash-{cuflash.__version__}.dist-")
    }
    assert {name: text for name, text in shipped.items() if name not in rest} == expected
    assert "cuflash/py.typed" in shipped


def test_a_wheel_is_for_any_machine_and_needs_numpy_alone(wheel: Path, installed: Path) -> None:
    assert wheel.name == f"cuflash-{cuflash.__version__}-py3-none-any.whl"
    (metadata,) = installed.glob("*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").splitlines()
    needs = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert needs == ["Requires-Dist: numpy>=2.0"]
    assert f"Version: {cuflash.__version__}" in lines


def ignored() -> list[str]:
    """The patterns of .gitignore, which are names of files or folders, and the folder of git."""
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    return [".git", *(line.strip("/") for line in lines)]


def kept(folder: Path) -> set[str]:
    """The files of a source tree that git would keep."""
    patterns = ignored()
    names = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    return {
        str(name)
        for name in names
        if not any(fnmatch.fnmatch(part, pattern) for part in name.parts for pattern in patterns)
    }


def test_an_sdist_holds_all_sources(sources: Path) -> None:
    """Tests, examples and what they read included: what a checkout has, an sdist has."""
    assert kept(sources) == kept(ROOT) | {"PKG-INFO"}


def test_an_sdist_gives_the_same_wheel(sources: Path, installed: Path, tmp_path: Path) -> None:
    again = unpacked(build("wheel", sources, tmp_path), tmp_path / "site")
    assert files(again) == files(installed)


def test_a_wheel_runs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
import numpy as np
import cuflash
from cuflash import source
here = Path(sys.argv[1])
assert here in Path(cuflash.__file__).parents
assert here / "cuflash" / "kernels" == source.KERNEL_ROOT
x = np.random.default_rng(0).normal(size=(9, 2, 8)).astype("f4")
np.testing.assert_allclose(cuflash.attention(x, x, x), cuflash.reference.attention(x, x, x), 1e-4)
"""
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "CUFLASH_CACHE_DIR": str(tmp_path / "cache"),
    }
    result = subprocess.run(
        [sys.executable, "-c", code, str(installed)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
