// SPDX-License-Identifier: Apache-2.0
// Blocks that wait for one another: for the one before, or block 0 for all later ones.
#include "hw/memory.cuh"
#include "hw/semaphore.cuh"

struct Params {
    int* counter;  // 0
    float* sum;    // (64), to which block i adds x[i] in the order of blocks
    const float* x;
    int* order;  // (grid): the blocks in the order in which they came to their end
    int backwards;
};

extern "C" __global__ void blocks(const __grid_constant__ Params p) {
    const int block = blockIdx.x;
    const int before = p.backwards ? block == 0 ? gridDim.x - 1 : 0 : block;
    if (threadIdx.x == 0) hw::semaphore_wait(p.counter, before);
    __syncthreads();
    if (p.backwards == 0) {
        float* const sum = p.sum + threadIdx.x;
        hw::store(sum, hw::load(sum) + hw::load(p.x + block));
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        hw::store(p.order + block, hw::load(p.counter));
        hw::semaphore_add(p.counter, 1);
    }
}
