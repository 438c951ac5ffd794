// SPDX-License-Identifier: Apache-2.0
// What the three kernels of the backward by mma.sync hand to one another in workspace, for each
// tile of plan::kTileQ queries of a head, which has a slot (query_slot() in work.cuh), and for each
// of kTurnRows queries, whose sums key tiles add to in one turn:
//
//     row_stats   RowStats[slot][kTileQ]: row_stats.cuh                backward_rows_mma.cu writes
//     dq_turns    int[slot of kTurnRows][kSplits]                      backward_rows_mma.cu clears
//     dq_sums     float[slot][kTileQ / 16][kDqDim / 8][32 lanes][4]     backward_mma.cu sums up
//
// A fragment of sums (fragment.cuh) lies as lanes hold it, so that a warp moves 512 bytes in a row.
#pragma once
#include "parts/fragment.cuh"
#include "parts/row_stats.cuh"

constexpr int kTurnRows = plan::kTileQ * plan::kTurn;

// How many key tiles have had their turn with the queries of a tile and its neighbours.
__device__ __forceinline__ int* dq_turn(
    const Params& p, const Entry& entry, int32 head, int32 tile, int split) {
    const int64 slot = query_slot<kTurnRows>(p, entry, head, tile / plan::kTurn);
    return static_cast<int*>(p.dq_turns) + slot * plan::kSplits + split;
}

// No key tile has had its turn with a query tile. One thread for each split.
__device__ __forceinline__ void clear_turns(const Params& p, const Work& work) {
    const int split = static_cast<int>(threadIdx.x);
    if (work.tile % plan::kTurn == 0 && split < plan::kSplits) {
        hw::store(dq_turn(p, work.entry, work.head, work.tile, split), 0);
    }
}

// How many numbers the fragment of rows [16 slab, 16 slab + 16) and columns [8 n, 8 n + 8) lies
// behind the first.
__host__ __device__ constexpr int dq_distance(int slab, int n) {
    return (slab * (plan::kDqDim / 8) + n) * 32 * 4;
}

// The sums of a query tile.
__device__ __forceinline__ float* dq_of(const Params& p, int64 slot) {
    return static_cast<float*>(p.dq_sums) + slot * (plan::kTileQ * plan::kDqDim);
}

// The calling lane's four numbers of a fragment.
__device__ __forceinline__ float* dq_sums(const Params& p, int64 slot, int slab, int n) {
    return dq_of(p, slot) + dq_distance(slab, n) + fragment::lane() * 4;
}
