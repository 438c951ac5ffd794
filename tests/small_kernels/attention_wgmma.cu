// SPDX-License-Identifier: Apache-2.0
// Attention by TMA and wgmma with specialised warps, as small as it can be: out =
// softmax(scale q k^T) v for contiguous arrays of shape (heads, seqlen, 64), causal or not. sm_90a.
//
// A block has 128 queries of a head and three warpgroups. One thread of the first keeps two stages
// of 128 keys and values filled; the other two have 64 queries each, and store their results.
//
//     load       q k0 v0 k1 v1 . k2 v2 . k3 v3         . = waits for empty[stage]
//     compute            s0 o0  s1 o1  s2 o2           waits for k_full[stage], v_full[stage]
//
// Arrivals: k_full and v_full 1 and the tile's bytes, empty one of each computing warp. All tiles
// are swizzled by 128 bytes, the length of a row.
#include "hw/ldmatrix.cuh"
#include "hw/mbarrier.cuh"
#include "hw/memory.cuh"
#include "hw/sync.cuh"
#include "hw/tma.cuh"
#include "hw/wgmma.cuh"
#include "softmax.cuh"

struct Params {
    hw::TensorMap q, k, v, out;  // (64, seqlen, heads), innermost first; boxes of kQueries, kTile
                                 // and, of out, 64 rows
    int seqlen, causal;
    float scale;  // times log2(e)
    int unused[13];
};

namespace {

constexpr int kDim = 64, kQueries = 128, kTile = 128, kStages = 2;
constexpr int kGroup = 128;                // threads of a warpgroup
constexpr int kRowBytes = kDim * 2;        // also the swizzle
constexpr int kEightRows = 8 * kRowBytes;  // from 8 rows to the next, for descriptors
constexpr int kComputingWarps = 8;
using hw::Swizzle;

struct alignas(1024) Smem {
    plan::T q[kQueries * kDim];  // later out
    plan::T k[kStages][kTile * kDim];
    plan::T v[kStages][kTile * kDim];
    hw::MBarrier q_full, k_full[kStages], v_full[kStages], empty[kStages];
};

__device__ __forceinline__ void load(Smem& smem, const Params& p, int query, int head, int end) {
    hw::mbarrier_arrive_expect_tx(smem.q_full, sizeof(smem.q));
    hw::tma_load(smem.q, p.q, smem.q_full, 0, query, head);
    for (int tile = 0; tile < end; ++tile) {
        const int stage = tile % kStages;
        hw::mbarrier_wait(smem.empty[stage], (tile / kStages & 1) ^ 1);
        hw::mbarrier_arrive_expect_tx(smem.k_full[stage], sizeof(smem.k[0]));
        hw::tma_load(smem.k[stage], p.k, smem.k_full[stage], 0, tile * kTile, head);
        hw::mbarrier_arrive_expect_tx(smem.v_full[stage], sizeof(smem.v[0]));
        hw::tma_load(smem.v[stage], p.v, smem.v_full[stage], 0, tile * kTile, head);
    }
}

// s = q k^T for 64 queries and a tile of keys.
__device__ __forceinline__ void multiply_qk(float (&s)[kTile / 2],
                                            const plan::T* sQ,
                                            const plan::T* sK) {
    hw::wgmma_fence();
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {
        hw::wgmma<plan::T, kTile>(
            s, hw::wgmma_descriptor(sQ + 16 * j, 0, kEightRows, Swizzle::k128),
            hw::wgmma_descriptor(sK + 16 * j, 0, kEightRows, Swizzle::k128), j != 0);
    }
    hw::wgmma_commit();
    hw::wgmma_wait<0>();
    hw::pin(s);
}

// out += p v; v lies with its columns as rows.
__device__ __forceinline__ void multiply_pv(float (&out)[kDim / 2],
                                            const unsigned int (&p)[kTile / 16][4],
                                            const plan::T* sV) {
    hw::pin(out);
    hw::wgmma_fence();
#pragma unroll
    for (int j = 0; j < kTile / 16; ++j) {
        hw::wgmma<plan::T, kDim, true>(
            out, p[j], hw::wgmma_descriptor(sV + 16 * j * kDim, 0, kEightRows, Swizzle::k128),
            true);
    }
    hw::wgmma_commit();
    hw::wgmma_wait<0>();
    hw::pin(out);
}

// 64 rows of the result go to shared memory, over the queries of this warpgroup, and from there.
__device__ __forceinline__ void store(
    plan::T* sOut, const float (&out)[kDim / 2], const Params& p, int query, int head, int group) {
    const int thread = static_cast<int>(threadIdx.x) % kGroup, lane = thread % 32;
    const int row = thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {
        unsigned int r[4];
        small::pack_operand<plan::T>(r, out, j);
        const int piece = (2 * j + lane / 16) ^ (row % 8);
        hw::stmatrix(sOut + row * kDim + piece * 8, r);
    }
    hw::fence_proxy_async();
    hw::named_barrier_sync(1 + group, kGroup);
    if (thread / 32 == 0 && hw::elect_one()) {
        hw::tma_store(p.out, sOut, 0, query, head);
        hw::bulk_commit();
        hw::bulk_wait_read<0>();
    }
}

__device__ __forceinline__ void compute(
    Smem& smem, const Params& p, int query, int head, int end, int group) {
    const int thread = static_cast<int>(threadIdx.x) % kGroup, lane = thread % 32;
    plan::T* const sQ = smem.q + group * 64 * kDim;
    query += group * 64;
    const int row = query + thread / 32 * 16 + lane / 4;  // of the thread's first element
    float rOut[kDim / 2] = {};
    small::Rows rows;
    rows.start();
    hw::mbarrier_wait(smem.q_full, 0);
    for (int tile = 0; tile < end; ++tile) {
        const int stage = tile % kStages, parity = tile / kStages & 1;
        float rS[kTile / 2];
        hw::mbarrier_wait(smem.k_full[stage], parity);
        multiply_qk(rS, sQ, smem.k[stage]);
        small::hide(rS, row, tile * kTile + lane % 4 * 2, p.seqlen, p.causal);
        small::soften(rS, rows, rOut, p.scale);
        unsigned int rP[kTile / 16][4];
#pragma unroll
        for (int j = 0; j < kTile / 16; ++j) small::pack_operand<plan::T>(rP[j], rS, j);
        hw::mbarrier_wait(smem.v_full[stage], parity);
        multiply_pv(rOut, rP, smem.v[stage]);
        if (lane == 0) hw::mbarrier_arrive(smem.empty[stage]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float factor = hw::rcp_approx(small::over_lanes<false>(rows.sum[half]));
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) {
            if (i % 4 / 2 == half) rOut[i] *= factor;
        }
    }
    store(sQ, rOut, p, query, head, group);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(3 * kGroup, 1)
    attention_wgmma(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int blocks = (p.seqlen + kQueries - 1) / kQueries;
    const int query = static_cast<int>(blockIdx.x) % blocks * kQueries;
    const int head = static_cast<int>(blockIdx.x) / blocks;
    const int tiles = (p.seqlen + kTile - 1) / kTile;
    const int end = p.causal ? min(tiles, query / kTile + 1) : tiles;
    if (threadIdx.x == 0) {
        hw::mbarrier_init(smem.q_full, 1);
        for (int i = 0; i < kStages; ++i) {
            hw::mbarrier_init(smem.k_full[i], 1);
            hw::mbarrier_init(smem.v_full[i], 1);
            hw::mbarrier_init(smem.empty[i], kComputingWarps);
        }
        hw::fence_mbarrier_init();
    }
    __syncthreads();
    const int role = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kGroup, 0);
    if (role == 0) {
        hw::registers_decrease<24>();
        if (threadIdx.x < 32 && hw::elect_one()) load(smem, p, query, head, end);
    } else {
        hw::registers_increase<240>();
        compute(smem, p, query, head, end, role - 1);
    }
}
