// SPDX-License-Identifier: Apache-2.0
// The rows of a computing thread of forward_sm90.cu: which they are, what it knows of them, and how
// they start and end.
#pragma once
#include "attention/forward_sm90_smem.cuh"
#include "attention/params.cuh"
#include "hw/sync.cuh"
#include "parts/exponent.cuh"
#include "parts/online.cuh"
#include "parts/score.cuh"
#include "parts/softmax_lazy.cuh"

using online::LazyRow;

__device__ __forceinline__ int thread_of_group() {
    return static_cast<int>(hw::forget(static_cast<uint32>(threadIdx.x)) % kGroupThreads);
}

// The first query of the calling warp.
__device__ __forceinline__ int32 query_of(const Job& job) {
    const auto warp = static_cast<int>(hw::forget(static_cast<uint32>(threadIdx.x)) / 32) - 4;
    return job.work.tile * plan::kTileQ + warp * 16;
}

// What is asked before a warp stores its results: nothing; whether they are spoilt; that what it
// may have stored the first time has arrived.
enum class Caution { kNone, kLooks, kWaits };

// What a thread knows of its rows while it walks the keys.
struct State {
    LazyRow rows[2];
    Scores::Row randoms[2];
    float factor;
    online::Exponent exponent;
    float out[1][kCols8][4];
    uint32 weights[kSteps][4];  // of the last tile
    bool pending;               // they have not met their values yet,
    bool adds;                  // whose product is to be added to earlier ones
    bool large;                 // a row of the warp has a large shift
    Caution caution;            // of the job whose results these are
};

// Rows before their first tile.
__device__ __forceinline__ void start(const Params& p, State& state, const Job& job) {
    const Scores score = Scores::of(p, job.work.entry, job.work.head);
    state.factor = online::factor_of(score);
    if constexpr (online::kFuses) state.exponent = online::Exponent::of(score);
    const int32 query = query_of(job);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        state.rows[r] = LazyRow::empty();
        state.randoms[r] = score.row(online::row_at(query, r));
    }
    state.large = false;
}

// What results are multiplied by; writes log-sum-exps.
__device__ __forceinline__ void conclude(const Params& p,
                                         float (&inverse)[2],
                                         const State& state,
                                         const Job& job) {
    const Scores score = Scores::of(p, job.work.entry, job.work.head);
    online::conclude(inverse, p, job.work.entry, job.work.head, score, state.rows, query_of(job));
}
