// SPDX-License-Identifier: Apache-2.0
// The gradient of q from its sums: scaled, rounded, and where the caller wants it.
//
//     dq[i] = scale * sum_j dscore[i][j] slope[i][j] k[j]
//
// A block has a tile of queries. A tile that sees no key has no sums; its gradient is zero.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "parts/gradient_mma.cuh"
#include "parts/mask.cuh"
#include "parts/operand.cuh"

constexpr int kWarps = plan::kThreads / 32;
constexpr int kCols8 = plan::kDim / 8;

__device__ __forceinline__ void dq_tile(const Params& p, const Work& work) {
    const Entry& entry = work.entry;
    const Matrix dq = query_matrix(p.dq, entry, work.head, p.head_dim);
    const int32 first = work.tile * plan::kTileQ;
    const TileRange keys = Band::of(p, entry).key_tiles(first, plan::kTileQ, plan::kTileKv);
    const bool any = keys.first < keys.last;
    const int64 slot = any ? query_slot<plan::kTileQ>(p, entry, work.head, work.tile) : 0;
    const float scale = static_cast<float>(p.scale);
    const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 4
    for (int i = warp; i < plan::kTileQ / fragment::kSlab * kCols8; i += kWarps) {
        const int slab = i / kCols8, n = i % kCols8;
        float x[4] = {};
        if (any) {
            const auto sums =
                hw::load(reinterpret_cast<const hw::Vec<float, 4>*>(dq_sums(p, slot, slab, n)));
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] = sums.v[e] * scale;
        }
        fragment::write(dq, x, first + fragment::kSlab * slab, 8 * n);
    }
}

extern "C" __global__ void __launch_bounds__(plan::kThreads)
    backward_dq_mma(const __grid_constant__ Params p) {
    const int64 parts = work_parts<Queries, plan::kTileQ>(p);
    for (int64 index = blockIdx.x; index < parts; index += gridDim.x) {
        Work work;
        if (work_at<Queries, plan::kTileQ>(p, index, work)) dq_tile(p, work);
    }
}
