// SPDX-License-Identifier: Apache-2.0
// The CPU twin of hw/math.cuh: computed accurately, with zeros where a GPU has them for subnormal
// numbers, and a GPU's one NaN.
#pragma once

namespace hw {

inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

inline float as_on_a_gpu(float y) { return y == y ? flushed(y) : __uint_as_float(0x7fffffffu); }

inline float exp2_approx(float x) { return as_on_a_gpu(exp2f(flushed(x))); }

inline float log2_approx(float x) { return as_on_a_gpu(log2f(flushed(x))); }

inline float rcp_approx(float x) { return as_on_a_gpu(1.0f / flushed(x)); }

}  // namespace hw
