// SPDX-License-Identifier: Apache-2.0
// Fixed-width aliases and the element types. NVRTC has no <cstdint>, and no header of the CUDA
// toolkit is needed anywhere in kernels/, so a machine without a toolkit compiles them all.
#pragma once
#include "hw/convert.cuh"

using int32 = int;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

using hw::bfloat16;
using hw::float16;

// The type that products, sums and exponentials of an element type are computed in.
template <class Element>
struct AccumOf {
    using type = float;
};
template <>
struct AccumOf<double> {
    using type = double;
};

__device__ __forceinline__ int32 ceil_div(int32 a, int32 b) { return (a + b - 1) / b; }

// Element -> accumulator type, exact.
__device__ __forceinline__ float widen(float16 x) { return hw::to_float(x); }
__device__ __forceinline__ float widen(bfloat16 x) { return hw::to_float(x); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }

// Accumulator type -> element, rounded once to nearest even.
template <class Element>
__device__ __forceinline__ Element narrow(float x) {
    if constexpr (sizeof(Element) == sizeof(float)) {
        return x;
    } else {
        return hw::from_float<Element>(x);
    }
}
template <class Element>
__device__ __forceinline__ double narrow(double x) {
    return x;
}
