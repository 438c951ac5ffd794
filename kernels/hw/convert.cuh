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

// Which of the two T is; any other type is a mistake.
template <class T>
constexpr bool kIsBfloat16 = T::is_neither_float16_nor_bfloat16;
template <>
constexpr bool kIsBfloat16<float16> = false;
template <>
constexpr bool kIsBfloat16<bfloat16> = true;

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

// Two numbers as from_float gives them, the first in the lower half: as products of matrices take
// them. PTX ISA, cvt.rn.{f16x2,bf16x2}, sm_80; before, two conversions.
template <class T>
__device__ __forceinline__ unsigned int pack2(float low, float high) {
#if __CUDA_ARCH__ >= 800
    unsigned int y;
    if constexpr (kIsBfloat16<T>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    }
    return y;
#else
    const unsigned int upper = from_float<T>(high).bits;
    return upper << 16 | from_float<T>(low).bits;
#endif
}

}  // namespace hw
