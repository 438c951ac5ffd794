// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory that count arrivals of threads and bytes of asynchronous copies. They
// go through phases: one is complete when all have arrived and all announced bytes have come, and
// then the next begins. A wait names its phase by parity: 0 for the first, then 1, 0, ...
#pragma once

#include "hw/memory.cuh"

namespace hw {

struct MBarrier {
    unsigned long long word;
};

// Begins the first phase; each phase needs so many arrivals. PTX ISA, mbarrier.init, sm_80; one
// thread, then fence_mbarrier_init, then a barrier of those who use it.
__device__ __forceinline__ void mbarrier_init(MBarrier& b, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&b)), "r"(arrivals)
                 : "memory");
}

// Asynchronous copies see the barriers that this thread has initialised. PTX ISA,
// fence.mbarrier_init, sm_90; the thread that called mbarrier_init.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival; what the thread did before is seen by those who wait. PTX ISA, mbarrier.arrive,
// sm_90; any thread.
__device__ __forceinline__ void mbarrier_arrive(MBarrier& b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&b)) : "memory");
}

// Announces bytes of asynchronous copies for this phase, and arrives. PTX ISA,
// mbarrier.arrive.expect_tx, sm_90; any thread, usually the one that starts the copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(MBarrier& b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&b)),
                 "r"(bytes)
                 : "memory");
}

// Returns once the phase of this parity is complete; at once if it is the phase before the current
// one. PTX ISA, mbarrier.try_wait.parity, sm_90, which sleeps for a while; any thread.
__device__ __forceinline__ void mbarrier_wait(MBarrier& b, int parity) {
    const unsigned int address = shared_address(&b);
    unsigned int complete;
    do {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(complete)
            : "r"(address), "r"(parity)
            : "memory");
    } while (complete == 0);
}

}  // namespace hw
