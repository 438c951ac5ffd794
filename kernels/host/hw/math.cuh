// SPDX-License-Identifier: Apache-2.0
// The CPU twin of hw/math.cuh: computed accurately, with zeros where a GPU has them for subnormal
// numbers.
#pragma once

namespace hw {

inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

inline float exp2_approx(float x) { return flushed(exp2f(flushed(x))); }

inline float log2_approx(float x) { return log2f(flushed(x)); }

inline float rcp_approx(float x) { return flushed(1.0f / flushed(x)); }

}  // namespace hw
