// SPDX-License-Identifier: Apache-2.0
// What the backward on tensor cores knows of each row of scores. One kernel writes it to workspace,
// by query_slot() of tiles of plan::kTileQ queries, and the others read it there.
#pragma once
#include "parts/operand.cuh"
#include "parts/softmax.cuh"
#include "parts/work.cuh"

// Of a row of scores, for P = exp(score - lse) and dscore = P * (dP - delta).
struct RowStats {
    float lse;
    float delta;  // rowsum(dout * out) - dlse

    // A row past the end, and one that sees no key: all probabilities are 0.
    __device__ static __forceinline__ RowStats none() { return {softmax::infinity<float>(), 0.0f}; }

    // Row `at` of an entry, of which `sum` is rowsum(dout * out).
    __device__ static __forceinline__ RowStats
    of(const Params& p, const Entry& entry, int32 head, int32 at, float sum) {
        if (at >= entry.seqlen_q) return none();
        const float lse = hw::load(vector(p.lse, entry, head).at(at));
        if (lse == -softmax::infinity<float>()) return none();
        if (p.dlse.data) sum -= hw::load(vector(p.dlse, entry, head).at(at));
        return {lse, sum};
    }
};

__device__ __forceinline__ RowStats* row_stats(const Params& p, int64 slot) {
    return static_cast<RowStats*>(p.row_stats) + slot * plan::kTileQ;
}
