// SPDX-License-Identifier: Apache-2.0
// Sums over a block, round after round, and rows reversed within each warp; with faults.
#include "hw/memory.cuh"
#include "hw/sync.cuh"
#include "planted.cuh"

constexpr int kThreads = 128, kWarps = 4;

struct Params {
    const float* x;      // (blocks, rounds, kThreads), read-only
    const float* scale;  // (1)
    float* sums;         // (blocks, rounds), times the scale
    float* reversed;     // as x
    int rounds;
    unsigned int fault;
};

struct Smem {
    float row[kThreads];
    float sums[kWarps];
};

extern "C" __global__ void planted_warps(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    if (PLANTED("early-return") && warp == 3) return;
    for (int round = 0; round < p.rounds; ++round) {
        const int first = (blockIdx.x * p.rounds + round) * kThreads;
        const float x = hw::load(p.x + first + thread);

        smem.row[thread] = x;
        if (!PLANTED("no-syncwarp")) __syncwarp();
        float* const to = PLANTED("store-to-read-only") ? const_cast<float*>(p.x) : p.reversed;
        const int place = first + thread + PLANTED("store-past-the-end");
        hw::store(to + place, smem.row[thread ^ 31]);
        __syncwarp();

        float sum = x;
        const unsigned int mask = PLANTED("shuffle-mask-lacks-lanes") ? 0x0000ffff : 0xffffffff;
        if (!PLANTED("divergent-shuffle") || lane < 16) {
            for (int step = PLANTED("shuffle-step-forgotten") ? 8 : 16; step; step /= 2) {
                sum += __shfl_xor_sync(mask, sum, step);
            }
        }
        if (lane == 0) smem.sums[warp] = sum;
        if (PLANTED("divergent-syncthreads") && warp == 0) {
            __syncthreads();
        } else if (!PLANTED("no-syncthreads-in-a-reduction")) {
            __syncthreads();
        }
        if (warp == 0) {
            float total = 0.0f;
            for (int i = 0; i < kWarps; ++i) total += smem.sums[i];
            bool elected = false;
            if (!PLANTED("divergent-elect-one") || lane < 8) elected = hw::elect_one();
            const float scale = elected ? hw::load(p.scale) : 0.0f;
            if (PLANTED("elected-lane-taken-for-0") ? lane == 0 : elected) {
                hw::store(p.sums + blockIdx.x * p.rounds + round, total * scale);
            }
        }
        if (!PLANTED("no-barrier-at-the-end-of-a-round")) __syncthreads();
    }
}
