# SPDX-License-Identifier: Apache-2.0
"""Run by .ci/package in an environment that holds an installed cuflash, far from any checkout."""

import importlib.metadata
import sys
from pathlib import Path

import numpy as np

import cuflash
from cuflash import source

environment = Path(sys.prefix).resolve()
assert environment in Path(cuflash.__file__).resolve().parents, cuflash.__file__
assert Path(cuflash.__file__).parent in source.KERNEL_ROOT.parents, source.KERNEL_ROOT
assert importlib.metadata.version("cuflash") == cuflash.__version__
# Nothing else came with it.
installed = {Path(str(path)).parts[0] for path in importlib.metadata.files("cuflash") or ()}
assert installed == {"cuflash", f"cuflash-{cuflash.__version__}.dist-info"}, installed

rng = np.random.default_rng(0)
q, k, v, dout = rng.standard_normal((4, 1, 40, 2, 16), np.float32)
out, vjp = cuflash.attention_vjp(q, k, v, causal=True)
np.testing.assert_allclose(out, cuflash.reference.attention(q, k, v, causal=True), atol=1e-5)
grads = cuflash.reference.attention_backward(dout, q, k, v, causal=True)
for x, y in zip(vjp(dout), grads, strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5)
print(f"cuflash {cuflash.__version__} in {environment}: right")
