# SPDX-License-Identifier: Apache-2.0
"""Every plan of the matrix compiles for its architecture; nothing spills. Needs no GPU."""

from __future__ import annotations

import matrix
import pytest

from cuflash import compile, device, select
from cuflash.dtypes import DTYPES
from cuflash.plan import BackwardDkdvSimt, BackwardDqSimt, ForwardSimt, UnitPlan
from cuflash.problem import FEATURES, Traits

CUBINS = matrix.cubins()


NAMES = [f"{name}-{plan.kernel}-{i}" for i, (name, plan) in enumerate(CUBINS)]


@pytest.mark.parametrize(("name", "plan"), CUBINS, ids=NAMES)
def test_plan_compiles_without_spills(name: str, plan: UnitPlan) -> None:
    text = compile.translation_unit(plan, cpu=False)
    image, log = compile.compile_cubin(text, plan, matrix.ARCHITECTURES[name])
    usage = compile.usage(log)
    assert image[:4] == b"\x7fELF"
    assert usage.registers > 0, f"no report of registers in {log!r}"
    assert usage.spill_bytes == 0 and usage.stack_bytes == 0, f"{plan}: {usage}"
    assert not usage.warnings, usage.warnings
    assert usage.registers * plan.threads <= 65536


@pytest.mark.parametrize("row", matrix.ROWS + matrix.OPTION_ROWS, ids=lambda row: row.name)
def test_the_plans_that_tests_draw_fit_a_gpu(row: matrix.Row) -> None:
    for plan in row.forward + row.backward:
        assert plan.smem_bytes <= device.architecture(9, 0).smem_per_block, plan


@pytest.mark.parametrize("where", matrix.ARCHITECTURES.values(), ids=matrix.ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [(), FEATURES], ids=["plain", "options"])
def test_every_head_size_has_plans_that_fit(
    where: device.Device, dtype: str, options: tuple[str, ...]
) -> None:
    for head_dim in range(1, 513):
        for head_dim_v in {1, head_dim, 513 - head_dim}:
            traits = Traits(DTYPES[dtype], head_dim, head_dim_v, options)
            for direction in ("forward", "backward"):
                for plan in select.choose(direction, traits, where):
                    assert plan.smem_bytes <= where.smem_per_block
                    assert plan.threads <= 1024
                    if isinstance(plan, (ForwardSimt, BackwardDqSimt, BackwardDkdvSimt)):
                        chunks = plan.chunks * plan.chunk
                        assert chunks >= (head_dim_v if direction == "forward" else head_dim)
