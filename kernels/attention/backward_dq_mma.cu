// SPDX-License-Identifier: Apache-2.0
// The gradient of q from its sums: scaled, rounded, and where the caller wants it.
//
//     dq[i] = scale * sum_j dscore[i][j] slope[i][j] k[j]
//
// A block has a tile of queries, of which a warp moves 16 rows and kUnit columns at a time, through
// shared memory, so that it writes whole sectors. A tile that sees no key has no sums; its gradient
// is zero.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "parts/gradient_mma.cuh"
#include "parts/mask.cuh"
#include "parts/operand.cuh"

constexpr int kWarps = plan::kThreads / 32;
constexpr int kUnit = plan::kDqDim % 64 == 0 ? 64 : plan::kDqDim % 32 == 0 ? 32 : 16;
constexpr int kUnits = plan::kDqDim / kUnit;  // of a slab

using Unit = fragment::Tile<fragment::kSlab, kUnit>;

struct Smem {
    Unit units[kWarps];
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

// Writes a unit, from row `row` and column `col` on; rows can be moved by 16 bytes. A warp.
__device__ __forceinline__ void write_unit(const Matrix& to,
                                           const Unit& unit,
                                           int32 row,
                                           int32 col) {
    constexpr int kPieces = kUnit / 8;  // of a row
    using Piece = hw::Vec<uint32, 4>;
#pragma unroll
    for (int i = fragment::lane(); i < fragment::kSlab * kPieces; i += 32) {
        const int r = i / kPieces, c = i % kPieces * 8;
        if (row + r >= to.rows || col + c >= to.cols) continue;
        hw::store(reinterpret_cast<Piece*>(to.data + (row + r) * to.stride_row + col + c),
                  *reinterpret_cast<const Piece*>(&unit.at[r][c]));
    }
}

__device__ __forceinline__ void dq_tile(const Params& p, const Work& work, Smem& smem) {
    const Entry& entry = work.entry;
    const Matrix dq = query_matrix(p.dq, entry, work.head, p.head_dim);
    const int32 first = work.tile * plan::kTileQ;
    const TileRange keys = Band::of(p, entry).key_tiles(first, plan::kTileQ, plan::kTileKv);
    const bool any = keys.first < keys.last;
    const int64 slot = any ? query_slot<plan::kTileQ>(p, entry, work.head, work.tile) : 0;
    const float scale = static_cast<float>(p.scale);
    const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
    for (int i = warp; i < plan::kTileQ / fragment::kSlab * kUnits; i += kWarps) {
        const int slab = i / kUnits, col = i % kUnits * kUnit;
        const int32 row = first + fragment::kSlab * slab;
        float x[1][kUnit / 8][4] = {};
        if (any) {
            using Four = hw::Vec<float, 4>;
            const auto* const sums = reinterpret_cast<const Four*>(dq_sums(p, slot, slab, col / 8));
#pragma unroll
            for (int n = 0; n < kUnit / 8; ++n) {
                const Four four = hw::load(sums + dq_distance(0, n) / 4);
#pragma unroll
                for (int e = 0; e < 4; ++e) x[0][n][e] = four.v[e] * scale;
            }
        }
        if (dq.aligned == 16) {
            __syncwarp();  // the last unit has been written
            fragment::store_rounded(smem.units[warp], x, 0, 0);
            __syncwarp();
            write_unit(dq, smem.units[warp], row, col);
        } else {
#pragma unroll
            for (int n = 0; n < kUnit / 8; ++n) fragment::write(dq, x[0][n], row, col + 8 * n);
        }
    }
}

extern "C" __global__ void __launch_bounds__(plan::kThreads)
    backward_dq_mma(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int64 parts = work_parts<Queries, plan::kTileQ>(p);
    for (int64 index = blockIdx.x; index < parts; index += gridDim.x) {
        Work work;
        if (work_at<Queries, plan::kTileQ>(p, index, work)) dq_tile(p, work, smem);
    }
}
