// SPDX-License-Identifier: Apache-2.0
// Counters in global memory by which blocks wait for one another. A block may wait only for blocks
// that are sure to run, such as those started before it.
#pragma once

namespace hw {

// Waits until the counter is at least so large; then sees what was written before it was. PTX ISA,
// ld.acquire.gpu; any thread, for others after a barrier.
__device__ __forceinline__ void semaphore_wait(const int* counter, int at_least) {
    int value;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    } while (value < at_least);
}

// Adds to the counter, after all that the thread has written, or has seen written at a barrier. PTX
// ISA, red.release.gpu; any thread.
__device__ __forceinline__ void semaphore_add(int* counter, int value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

}  // namespace hw
