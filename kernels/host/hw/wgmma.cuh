// SPDX-License-Identifier: Apache-2.0
// The CPU twin of hw/wgmma.cuh. Addresses in descriptors count from where the block's shared memory
// begins. Registers of A are read when the product is waited for, or before: they must live on.
#pragma once

#include "hw/convert.cuh"
#include "hw/memory.cuh"

namespace hw {

enum class Swizzle { kNone, k32, k64, k128 };

inline unsigned long long wgmma_descriptor(const void* shared,
                                           int leading_bytes,
                                           int stride_bytes,
                                           Swizzle swizzle) {
    const auto field = [](unsigned long long bytes) { return (bytes & 0x3ffff) >> 4; };
    const unsigned char* const base = host::self().shared;
    const unsigned long long start = static_cast<const unsigned char*>(shared) - base;
    const unsigned long long kind = -static_cast<int>(swizzle) & 3;
    return field(start) | field(static_cast<unsigned int>(leading_bytes)) << 16 |
           field(static_cast<unsigned int>(stride_bytes)) << 32 | kind << 62;
}

inline void wgmma_fence(HOST_PLACE) {
    host::self().executor->wgmma_fence({"wgmma_fence", file, line});
}

inline void wgmma_commit(HOST_PLACE) {
    host::self().executor->wgmma_commit({"wgmma_commit", file, line});
}

template <int N>
inline void wgmma_wait(HOST_PLACE) {
    static_assert(N >= 0 && N <= 7, "wgmma.wait_group takes 0 to 7");
    host::self().executor->wgmma_wait({"wgmma_wait", file, line}, N);
}

template <int N>
constexpr bool kIsWgmmaWidth = N >= 8 && N <= 256 && N % 8 == 0;

template <class T, int N, bool TransA = false, bool TransB = false>
inline void wgmma(
    float (&d)[N / 2], unsigned long long a, unsigned long long b, bool accumulate, HOST_PLACE) {
    static_assert(kIsWgmmaWidth<N>, "wgmma has 8 to 256 columns, a multiple of 8");
    host::self().executor->wgmma({"wgmma", file, line},
                                 {d, nullptr, a, b, N, kElement<T>, TransA, TransB, accumulate});
}

template <class T, int N, bool TransB = false>
inline void wgmma(float (&d)[N / 2],
                  const unsigned int (&a)[4],
                  unsigned long long b,
                  bool accumulate,
                  HOST_PLACE) {
    static_assert(kIsWgmmaWidth<N>, "wgmma has 8 to 256 columns, a multiple of 8");
    host::self().executor->wgmma({"wgmma", file, line},
                                 {d, a, 0, b, N, kElement<T>, false, TransB, accumulate});
}

}  // namespace hw
