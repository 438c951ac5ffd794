// SPDX-License-Identifier: Apache-2.0
// out = x^T y by mma: tiles of 16 rows of both through two stages of shared memory, by cp.async;
// with faults. 64 threads: a warp has 16 of the 32 rows of out, and each thread copies one piece of
// either tile.
#include "hw/cp_async.cuh"
#include "hw/ldmatrix.cuh"
#include "hw/memory.cuh"
#include "hw/mma.cuh"
#include "planted.cuh"

using Element = hw::float16;
constexpr int kWidth = 32, kRows = 16, kStages = 2, kPitch = kWidth + 8;

struct Params {
    const Element *x, *y;  // (rows, kWidth)
    float* out;            // (kWidth, kWidth)
    int rows;
    unsigned int fault;
};

struct Smem {
    alignas(16) Element x[kStages][kRows][kPitch];
    alignas(16) Element y[kStages][kRows][kPitch];
};

// Always a group, of nothing beyond the last tile.
__device__ void load_tile(const Params& p, Smem& smem, int tile) {
    const int stage = tile % kStages, row = threadIdx.x / 4, col = threadIdx.x % 4 * 8;
    const int global = tile * kRows + row;
    if (tile * kRows < p.rows) {
        const bool valid = global < p.rows || PLANTED("tail-read");
        const int skew = PLANTED("misaligned-cp-async") ? 4 : 0;
        if (valid || !PLANTED("tail-not-zeroed")) {
            hw::cp_async<16>(&smem.x[stage][row][col + skew], p.x + global * kWidth + col, valid);
            hw::cp_async<16>(&smem.y[stage][row][col], p.y + global * kWidth + col, valid);
        }
    }
    if (!PLANTED("no-cp-async-commit")) hw::cp_async_commit();
}

extern "C" __global__ void planted_cp_async(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float d[kWidth / 8][4] = {};
    load_tile(p, smem, 0);
    for (int tile = 0; tile * kRows < p.rows; ++tile) {
        load_tile(p, smem, tile + 1);
        if (PLANTED("cp-async-wait-too-lax")) {
            hw::cp_async_wait<2>();
        } else if (!PLANTED("no-cp-async-wait")) {
            hw::cp_async_wait<1>();
        }
        if (!PLANTED("no-barrier-after-cp-async-wait")) __syncthreads();
        const int stage = PLANTED("wrong-stage") ? (tile + 1) % kStages : tile % kStages;

        // Of x^T, row i is column i of x: matrices 0 to 3 are, of x, rows 0-7, columns 0-7; rows
        // 0-7, columns 8-15; rows 8-15, columns 0-7; ...
        unsigned int a[4];
        const int row = lane % 8 + lane / 16 * 8 + PLANTED("ldmatrix-a-row-too-far");
        const int col = 16 * warp + lane / 8 % 2 * 8;
        if (PLANTED("ldmatrix-not-transposed")) {
            hw::ldmatrix(a, &smem.x[stage][row][col]);
        } else {
            hw::ldmatrix<true>(a, &smem.x[stage][row][col]);
        }
        for (int n = 0; n < kWidth / 8; n++) {
            unsigned int b[2];
            hw::ldmatrix<true>(b, &smem.y[stage][lane % 16][8 * n]);
            hw::mma_m16n8k16<Element>(d[n], a, b);
        }
        if (!PLANTED("no-barrier-before-a-stage-is-reused")) __syncthreads();
    }
    for (int n = 0; n < kWidth / 8; n++) {
        for (int i = 0; i < 4; ++i) {
            int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
            if (PLANTED("wrong-order-of-accumulators")) {
                row = lane / 4 * 2 + i / 2, col = lane % 4 * 2 + i % 2;
            }
            hw::store(p.out + (16 * warp + row) * kWidth + 8 * n + col, d[n][i]);
        }
    }
}
