// SPDX-License-Identifier: Apache-2.0
// The 16-bit floating-point types and their conversions, one instruction each where the GPU has
// one. Own types, so that no header of the CUDA toolkit is needed.
#pragma once

namespace hw {

struct float16 {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};

// PTX ISA, cvt: exact widening.
__device__ __forceinline__ float to_float(float16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// A bfloat16 is the upper half of a float32.
__device__ __forceinline__ float to_float(bfloat16 x) {
    return __uint_as_float(static_cast<unsigned int>(x.bits) << 16);
}

template <class T>
__device__ T from_float(float x);

// PTX ISA, cvt.rn: round to nearest even, overflow to infinity, any NaN to 0x7fff.
template <>
__device__ __forceinline__ float16 from_float<float16>(float x) {
    float16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

template <>
__device__ __forceinline__ bfloat16 from_float<bfloat16>(float x) {
    bfloat16 y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    // Turing has no such instruction: add half a unit of the last kept bit, less one if it is even.
    const unsigned int bits = __float_as_uint(x);
    y.bits = x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#endif
    return y;
}

}  // namespace hw
