// SPDX-License-Identifier: Apache-2.0
// What the three kernels of the backward by mma.sync hand to one another in workspace, for each tile of
// plan::kTileQ queries of a head, which has a slot (query_slot() in work.cuh):
//
//     row_stats   RowStats[slot][kTileQ]                               backward_rows_mma.cu writes
//     dq_turns    int[slot][kSplits]: key tiles that have added theirs  backward_rows_mma.cu clears
//     dq_sums     float[slot][kTileQ / 16][kDim / 8][32 lanes][4]      backward_mma.cu sums up
//
// A fragment of sums (fragment.cuh) lies as lanes hold it, so that a warp moves 512 bytes in a row.
#pragma once
#include "parts/fragment.cuh"
#include "parts/softmax_lazy.cuh"
#include "parts/work.cuh"

// Of a row of scores, for P = exp2(score * log2(e) - lse) and dscore = P * (dP - delta).
struct RowStats {
    float lse;    // times log2(e)
    float delta;  // rowsum(dout * out) - dlse

    // A row past the end, and one that sees no key: all probabilities are 0.
    __device__ static __forceinline__ RowStats none() {
        return {softmax::infinity<float>(), 0.0f};
    }
};

__device__ __forceinline__ RowStats* row_stats(const Params& p, int64 slot) {
    return static_cast<RowStats*>(p.row_stats) + slot * plan::kTileQ;
}

__device__ __forceinline__ int* dq_turn(const Params& p, int64 slot, int split) {
    return static_cast<int*>(p.dq_turns) + slot * plan::kSplits + split;
}

// The calling lane's four numbers of the fragment of rows [16 slab, 16 slab + 16) and columns
// [8 n, 8 n + 8).
__device__ __forceinline__ float* dq_sums(const Params& p, int64 slot, int slab, int n) {
    constexpr int kFragments = plan::kTileQ / fragment::kSlab * (plan::kDim / 8);
    const int64 at = slot * kFragments + slab * (plan::kDim / 8) + n;
    return static_cast<float*>(p.dq_sums) + (at * 32 + fragment::lane()) * 4;
}
