// SPDX-License-Identifier: Apache-2.0
// 64 threads write rows, 64 read them backwards; they take turns by named barriers. With faults.
#include "hw/memory.cuh"
#include "hw/sync.cuh"
#include "planted.cuh"

constexpr int kHalf = 64, kThreads = 2 * kHalf, kFull = 1, kEmpty = 2;

struct Params {
    const int* x;  // (rows, kHalf)
    int* out;      // the same, rows reversed
    int rows;
    unsigned int fault;
};

struct Smem {
    int row[kHalf];
};

__device__ void produce(const Params& p, Smem& smem) {
    for (int row = 0; row < p.rows; ++row) {
        const int x = hw::load(p.x + row * kHalf + threadIdx.x);
        if (!PLANTED("no-named-barrier-for-empty")) hw::named_barrier_sync(kEmpty, kThreads);
        smem.row[threadIdx.x] = x;
        const int full = PLANTED("wrong-barrier") ? kEmpty : PLANTED("barrier-16") ? 16 : kFull;
        hw::named_barrier_arrive(full, PLANTED("other-count") ? kHalf : kThreads);
    }
}

__device__ void consume(const Params& p, Smem& smem) {
    const int thread = threadIdx.x - kHalf;
    if (!PLANTED("barriers-in-a-circle")) hw::named_barrier_arrive(kEmpty, kThreads);
    for (int row = 0; row < p.rows; ++row) {
        if (PLANTED("arrive-where-sync")) {
            hw::named_barrier_arrive(kFull, kThreads);
        } else if (!PLANTED("half-of-a-warp-at-a-barrier") || thread % 32 < 16) {
            hw::named_barrier_sync(kFull, PLANTED("too-few-at-both") ? kHalf : kThreads);
        }
        hw::store(p.out + row * kHalf + thread, smem.row[kHalf - 1 - thread]);
        if (row + 1 < p.rows) hw::named_barrier_arrive(kEmpty, kThreads);
    }
}

extern "C" __global__ void planted_barriers(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    if (threadIdx.x < kHalf) {
        produce(p, smem);
    } else {
        consume(p, smem);
    }
}
