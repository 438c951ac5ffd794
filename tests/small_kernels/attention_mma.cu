// SPDX-License-Identifier: Apache-2.0
// Attention by mma.sync, as small as it can be: out = softmax(scale q k^T) v for contiguous arrays
// of shape (heads, seqlen, 64), causal or not. sm_80 and later.
//
// A block of 4 warps has 64 queries of a head, 16 a warp. Tiles of 64 keys and values come by
// cp.async, the next one while this one is worked on:
//
//     copy      k0 v0 | k1 v1 | k2 v2 |
//     compute         |   0   |   1   |   2      | = cp_async_wait and __syncthreads
//
// Rows of tiles have 128 bytes, whose 16-byte pieces are permuted so that ldmatrix reads all banks.
#include "hw/cp_async.cuh"
#include "hw/ldmatrix.cuh"
#include "hw/memory.cuh"
#include "hw/mma.cuh"
#include "softmax.cuh"

struct Params {
    const plan::T *q, *k, *v;  // [heads][seqlen][64]
    plan::T* out;              // [heads][seqlen][64]
    int seqlen, causal;
    float scale;  // times log2(e)
    int unused;
};

namespace {

constexpr int kDim = 64, kTile = 64, kStages = 2, kThreads = 128;
constexpr int kPieces = kDim / 8;  // of 16 bytes, in a row

struct alignas(1024) Smem {
    plan::T q[kTile * kDim];
    plan::T k[kStages][kTile * kDim];
    plan::T v[kStages][kTile * kDim];
};

__device__ __forceinline__ plan::T* piece(plan::T* tile, int row, int i) {
    return tile + row * kDim + (i ^ row % 8) * 8;
}

// Starts to copy 64 rows from row `first` on; rows past the end become zeros.
__device__ __forceinline__ void load(plan::T* tile, const plan::T* gRows, int first, int rows) {
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kPieces; i += kThreads) {
        const int row = i / kPieces;
        const bool valid = first + row < rows;
        const plan::T* from = gRows + (valid ? (first + row) * kDim + i % kPieces * 8 : 0);
        hw::cp_async<16>(piece(tile, row, i % kPieces), from, valid);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_mma(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int tiles = (p.seqlen + kTile - 1) / kTile;
    const int first_query = static_cast<int>(blockIdx.x) % tiles * kTile;
    const long long head =
        static_cast<long long>(static_cast<int>(blockIdx.x) / tiles) * p.seqlen * kDim;
    const plan::T *gK = p.k + head, *gV = p.v + head;
    const int end = p.causal ? first_query / kTile + 1 : tiles;

    load(smem.q, p.q + head, first_query, p.seqlen);
    load(smem.k[0], gK, 0, p.seqlen);
    load(smem.v[0], gV, 0, p.seqlen);
    hw::cp_async_commit();

    unsigned int rQ[kDim / 16][4];
    float rOut[kDim / 2] = {};
    small::Rows rows;
    rows.start();
    const int row = warp * 16 + lane / 4;  // of the thread's first element, in the tile
    for (int tile = 0; tile < end; ++tile) {
        const int stage = tile % kStages;
        hw::cp_async_wait<0>();
        __syncthreads();  // this tile is there for all, and nobody reads the one before any more
        if (tile + 1 < end) {
            load(smem.k[1 - stage], gK, (tile + 1) * kTile, p.seqlen);
            load(smem.v[1 - stage], gV, (tile + 1) * kTile, p.seqlen);
            hw::cp_async_commit();
        }
        if (tile == 0) {
#pragma unroll
            for (int j = 0; j < kDim / 16; ++j) {
                hw::ldmatrix(rQ[j], piece(smem.q, warp * 16 + lane % 16, 2 * j + lane / 16));
            }
        }
        float rS[kTile / 2] = {};
#pragma unroll
        for (int n = 0; n < kTile / 8; ++n) {
            float s[4] = {};
#pragma unroll
            for (int j = 0; j < kDim / 16; j += 2) {
                unsigned int b[4];  // 8 keys, 32 columns
                hw::ldmatrix(b, piece(smem.k[stage], n * 8 + lane % 8, 2 * j + lane / 8));
                const unsigned int low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
                hw::mma_m16n8k16<plan::T>(s, rQ[j], low);
                hw::mma_m16n8k16<plan::T>(s, rQ[j + 1], high);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) rS[4 * n + i] = s[i];
        }
        small::hide(rS, first_query + row, tile * kTile + lane % 4 * 2, p.seqlen, p.causal);
        small::soften(rS, rows, rOut, p.scale);
#pragma unroll
        for (int j = 0; j < kTile / 16; ++j) {
            unsigned int a[4];
            small::pack_operand<plan::T>(a, rS, j);
#pragma unroll
            for (int n = 0; n < kDim / 8; n += 2) {
                unsigned int b[4];  // 16 keys, 16 columns
                hw::ldmatrix<true>(b, piece(smem.v[stage], j * 16 + lane % 16, n + lane / 16));
                const unsigned int low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float sum[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) sum[i] = rOut[4 * (n + half) + i];
                    hw::mma_m16n8k16<plan::T>(sum, a, half ? high : low);
#pragma unroll
                    for (int i = 0; i < 4; ++i) rOut[4 * (n + half) + i] = sum[i];
                }
            }
        }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float factor = hw::rcp_approx(small::over_lanes<false>(rows.sum[half]));
        const int query = first_query + row + 8 * half;
        if (query >= p.seqlen) continue;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
            const unsigned int pair = hw::pack2<plan::T>(rOut[4 * n + 2 * half] * factor,
                                                         rOut[4 * n + 2 * half + 1] * factor);
            plan::T* to = p.out + head + query * kDim + n * 8 + lane % 4 * 2;
            hw::store(reinterpret_cast<unsigned int*>(to), pair);
        }
    }
}
