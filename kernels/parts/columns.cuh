// SPDX-License-Identifier: Apache-2.0
// Which columns of a fragment (fragment.cuh) are of a run that is seen, for all that a lane has of
// a row at once: bit 2 n + i is column 8 n + fragment::col_of(i). Predicates are then set by the
// bits of a register, seven at a time, instead of by a compare each.
#pragma once
#include "parts/fragment.cuh"
#include "parts/mask.cuh"

namespace columns {

// How many columns behind `first`, that of bit 0, come before `end`.
__device__ __forceinline__ int before(int32 end, int32 first) {
    const int32 distance = max(end - first, 0);
    return distance / 8 * 2 + min(distance % 8, 2);
}

// The first `count` bits of 32.
__device__ __forceinline__ uint32 first_bits(int count) {
    return count < 32 ? (1u << count) - 1u : ~0u;
}

// Those of a run; `col` is the first column of a fragment of so many times 8.
template <int kColumns8>
__device__ __forceinline__ uint32 inside(const SeenRun& run, int32 col) {
    static_assert(kColumns8 <= 16, "a bit for each");
    const int32 first = hw::forget(col) + fragment::col_of(0);
    const int32 end = run.first + static_cast<int32>(run.count);
    return first_bits(before(end, first)) & ~first_bits(before(run.first, first));
}

__device__ __forceinline__ bool holds(uint32 bits, int n, int i) { return bits >> (2 * n + i) & 1; }

}  // namespace columns
