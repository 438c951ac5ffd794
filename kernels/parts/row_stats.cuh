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
    of(const Params& p, const Entry& entry, int32 head, int32 at, float sum);
};

// What is loaded of a row.
struct RowInputs {
    float lse = -softmax::infinity<float>();
    float dlse = 0.0f;

    __device__ static __forceinline__ RowInputs load(const Params& p,
                                                     const Entry& entry,
                                                     int32 head,
                                                     int32 at) {
        RowInputs row;
        if (at < entry.seqlen_q) {
            row.lse = hw::load(vector(p.lse, entry, head).at(at));
            if (p.dlse.data) row.dlse = hw::load(vector(p.dlse, entry, head).at(at));
        }
        return row;
    }

    __device__ __forceinline__ RowStats with(float sum) const {
        if (lse == -softmax::infinity<float>()) return RowStats::none();
        return {lse, sum - dlse};
    }
};

__device__ __forceinline__ RowStats
RowStats::of(const Params& p, const Entry& entry, int32 head, int32 at, float sum) {
    return RowInputs::load(p, entry, head, at).with(sum);
}

__device__ __forceinline__ RowStats* row_stats(const Params& p, int64 slot) {
    return static_cast<RowStats*>(p.row_stats) + slot * plan::kTileQ;
}
