// SPDX-License-Identifier: Apache-2.0
// Each thread draws two tickets and notes itself there; the last one to have drawn its second says
// so. All atomic functions are used.
#include "hw/memory.cuh"

struct Params {
    int* order;  // (2 * threads of all blocks), the global index of each ticket's thread
    unsigned int* count;
    float* sums;               // (3), of 1 by float, by comparison and exchange, of nothing
    double* sum;               // of 0.5
    unsigned long long* wide;  // of 2^32
    int* extremes;             // greatest and least thread, number of exchanges won
};

struct Smem {
    int claimed;
};

extern "C" __global__ void tickets(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (threadIdx.x == 0) smem.claimed = 0;
    __syncthreads();
    for (int round = 0; round < 2; ++round) {
        hw::store(p.order + atomicAdd(p.count, 1u), thread);
    }
    atomicAdd(p.sums, 1.0f);
    atomicAdd(p.sum, 0.5);
    atomicAdd(p.wide, 1ull << 32);
    atomicMax(p.extremes, thread);
    atomicMin(p.extremes + 1, thread);
    if (atomicExch(&smem.claimed, 1) == 0) atomicAdd(p.extremes + 2, 1);

    unsigned int* bits = reinterpret_cast<unsigned int*>(p.sums + 1);
    unsigned int seen = atomicCAS(bits, 0u, 0u), before;
    do {
        before = seen;
        seen = atomicCAS(bits, before, __float_as_uint(__uint_as_float(before) + 1.0f));
    } while (seen != before);
}
