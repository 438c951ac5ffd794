// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies of a few bytes from global to shared memory, since sm_80. Each thread puts
// its own into groups and waits for groups; other threads see the data after a barrier.
#pragma once

#include "hw/memory.cuh"

namespace hw {

// Copies so many bytes, aligned to as many; writes zeros and reads nothing if not valid. PTX ISA,
// cp.async, where 16 bytes pass by the L1 cache; any thread.
template <int Bytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global, bool valid) {
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async copies 4, 8 or 16 bytes");
    const unsigned int to = shared_address(shared);
    const int read = valid ? Bytes : 0;
    if constexpr (Bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
                     "r"(read)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global),
                     "n"(Bytes), "r"(read)
                     : "memory");
    }
}

// The thread's copies since the last call are a group. PTX ISA, cp.async.commit_group; any thread.
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the N latest groups of the thread are unfinished. PTX ISA,
// cp.async.wait_group; any thread.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    static_assert(N >= 0, "a number of groups");
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace hw
