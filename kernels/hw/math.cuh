// SPDX-License-Identifier: Apache-2.0
// Quick approximations, one instruction of the special function unit each. Arguments and results
// that are subnormal count as zero.
#pragma once

namespace hw {

// 2^x, within 2 units of the last place. PTX ISA, ex2.approx.ftz; any thread.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The logarithm to base 2. PTX ISA, lg2.approx.ftz; any thread.
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x. PTX ISA, rcp.approx.ftz; any thread.
__device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace hw
