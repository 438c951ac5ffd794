// SPDX-License-Identifier: Apache-2.0
// What warps with different roles have in common: rings of stages, and arrivals at barriers.
#pragma once
#include "hw/mbarrier.cuh"
#include "hw/sync.cuh"
#include "parts/types.cuh"

// Where somebody is in a ring of slots or stages, of which he has passed `count`.
template <int kCount>
struct Ring {
    uint32 count = 0;

    __device__ __forceinline__ int at() const { return static_cast<int>(count % kCount); }
    __device__ __forceinline__ int parity() const {
        return static_cast<int>(count / kCount % 2);  // of the phase that barriers are in
    }
    __device__ __forceinline__ void next() { ++count; }
};

// The same number, of which the compiler knows that all lanes have it.
__device__ __forceinline__ int32 uniform(int32 x) { return __shfl_sync(0xffffffffu, x, 0); }

// One arrival for the warp, once all its lanes have come here.
__device__ __forceinline__ void arrive(hw::MBarrier& barrier) {
    __syncwarp();
    if (hw::elect_one()) hw::mbarrier_arrive(barrier);
}
