// SPDX-License-Identifier: Apache-2.0
// How parts of a block wait for each other; one way for each value of `way`.
#include "hw/mbarrier.cuh"
#include "hw/sync.cuh"

enum class Way { kNamedBarriers, kMBarriers, kElectOne, kRegisters };

struct Params {
    int* out;
    Way way;
    int steps;
};

constexpr int kHalf = 64;

struct Smem {
    hw::MBarrier full, empty;
    int row[kHalf];
};

// The first half of 128 threads writes rows, the second half reads them backwards.
__device__ void named_barriers(const Params& p, Smem& smem) {
    constexpr int kFull = 1, kEmpty = 15;
    const int thread = threadIdx.x % kHalf;
    for (int step = 0; step < p.steps; ++step) {
        if (threadIdx.x < kHalf) {
            if (step > 0) hw::named_barrier_sync(kEmpty, 2 * kHalf);
            smem.row[thread] = step * kHalf + thread;
            hw::named_barrier_arrive(kFull, 2 * kHalf);
        } else {
            hw::named_barrier_sync(kFull, 2 * kHalf);
            hw::store(p.out + step * kHalf + thread, smem.row[kHalf - 1 - thread]);
            if (step + 1 < p.steps) hw::named_barrier_arrive(kEmpty, 2 * kHalf);
        }
    }
}

// The same through mbarriers, where nobody need be waited for at the end.
__device__ void mbarriers(const Params& p, Smem& smem) {
    const int thread = threadIdx.x % kHalf;
    if (threadIdx.x == 0) {
        hw::mbarrier_init(smem.full, kHalf);
        hw::mbarrier_init(smem.empty, kHalf);
        hw::fence_mbarrier_init();
    }
    __syncthreads();
    for (int step = 0; step < p.steps; ++step) {
        const int parity = step % 2;
        if (threadIdx.x < kHalf) {
            hw::mbarrier_wait(smem.empty, parity ^ 1);  // at once in the first step
            smem.row[thread] = step * kHalf + thread;
            hw::mbarrier_arrive(smem.full);
        } else {
            hw::mbarrier_wait(smem.full, parity);
            hw::store(p.out + step * kHalf + thread, smem.row[kHalf - 1 - thread]);
            hw::mbarrier_arrive(smem.empty);
        }
    }
}

// The first of three warpgroups gives registers to the others, which go on only then.
__device__ void registers(const Params& p, Smem& smem) {
    if (threadIdx.x < 128) {
        for (int i = 0; i < p.steps; ++i) __threadfence_block();
        atomicAdd(&smem.row[0], 1);
        hw::registers_decrease<24>();
    } else {
        hw::registers_increase<240>();
        hw::store(p.out + threadIdx.x, atomicAdd(&smem.row[0], 0));
    }
}

extern "C" __global__ void meetings(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    switch (p.way) {
        case Way::kNamedBarriers:
            return named_barriers(p, smem);
        case Way::kMBarriers:
            return mbarriers(p, smem);
        case Way::kElectOne:
            for (int i = 0; i < p.steps; ++i) {
                hw::store(p.out + i * blockDim.x + threadIdx.x, hw::elect_one() ? 1 : 0);
            }
            return;
        case Way::kRegisters:
            if (threadIdx.x == 0) smem.row[0] = 0;
            __syncthreads();
            return registers(p, smem);
    }
}
