// SPDX-License-Identifier: Apache-2.0
// The sums of backward_apart_sm90.cuh: what a thread keeps of its rows, the product that is
// pending, what is special in a tile, and the results.
#pragma once
#include "attention/backward_apart_sm90_smem.cuh"
#include "hw/mbarrier.cuh"
#include "hw/memory.cuh"
#include "hw/sync.cuh"
#include "hw/wgmma.cuh"
#include "parts/fragment.cuh"
#include "parts/operand.cuh"
#include "parts/pipeline.cuh"
#include "parts/row_stats.cuh"
#include "parts/score.cuh"
#include "parts/special.cuh"
#include "parts/swizzled.cuh"
#include "parts/weights.cuh"
#include "parts/work.cuh"

// What a thread knows while it walks.
struct State {
    float sums[1][kCols / 8][4];
    uint32 factors[kSteps][4];  // of the last tile, a left operand
    RowStats own[2];            // of its rows, if they are queries
    float factor;               // of scores
    bool pending;               // factors have not met their tile yet
};

// What a computing thread has passed.
struct Passed {
    int group;
    uint32 tiles;
    Ring<1> part;

    __device__ __forceinline__ Stages x() const { return {tiles}; }
    __device__ __forceinline__ StagesY y() const { return {tiles}; }
    // Of the product that is pending, the last tile's.
    __device__ __forceinline__ SummedStages summed() const { return {tiles - 1}; }
};

// The first of the calling warp's rows.
__device__ __forceinline__ int32 row_of_warp(const Job& job) {
    const auto warp = static_cast<int>(hw::forget(static_cast<uint32>(threadIdx.x)) / 32) - 4;
    return job.work.tile * kOwnRows + warp * 16;
}

// Rows before their first tile.
__device__ __forceinline__ void start(const Params& p, State& state, const Job& job) {
    const Entry& entry = job.work.entry;
    state.factor = weights::factor_of(Scores::of(p, entry, 0));
    state.pending = false;
    fragment::clear(state.sums);
    if constexpr (kQueriesStay) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32 query = row_of_warp(job) + fragment::row_of(2 * r);
            state.own[r] = RowStats::none();
            if (query >= entry.seqlen_q || entry.slack) continue;
            const int64 slot =
                query_slot<plan::kTileQ>(p, entry, job.work.head, query / plan::kTileQ);
            state.own[r] = hw::load(row_stats(p, slot) + query % plan::kTileQ);
        }
    }
}

// Starts the product that is pending.
__device__ __forceinline__ void start_product(Smem& smem, State& state, SummedStages stage) {
    if (kOfWeights) hw::mbarrier_wait(summed_full(smem, stage), stage.parity());
    swizzled::start_x_b(state.sums, state.factors, summed(smem)[stage.at()], true);
}

// It is complete, once all groups of products are but so many.
template <int kUnfinished>
__device__ __forceinline__ void end_product(Smem& smem, State& state, SummedStages stage) {
    hw::wgmma_wait<kUnfinished>();
    hw::pin(swizzled::listed(state.sums));
    arrive(summed_empty(smem, stage));
    state.pending = false;
}

// Completes it.
__device__ __forceinline__ void finish(Smem& smem, State& state, const Passed& at) {
    if (!state.pending) return;
    start_product(smem, state, at.summed());
    end_product<0>(smem, state, at.summed());
}

// What was found in a tile is added to sums, or nothing sees it; waits until it is 0.
__device__ __forceinline__ void await_cleared(Smem& smem, int found) {
    arrive(smem.special_added);
    hw::mbarrier_wait(smem.cleared, found - 1);
}

// If the tile that is pending has infinities or NaN, which not all see: adds them to the sums of
// those who do, and waits until they are 0.
__device__ __forceinline__ void add_special(
    const Params& p, Smem& smem, const Job& job, State& state, const Passed& at, int32 tile) {
    const SummedStages stage = at.summed();
    // The one who looks may be a tile of this stage behind, until this one is there.
    hw::mbarrier_wait(summed_full(smem, stage), stage.parity());
    hw::mbarrier_wait(smem.seen[stage.at()], stage.parity());
    const int found = uniform(smem.special[stage.at()]);
    if (!found) return;
    const Scores score = Scores::of(p, job.work.entry, 0);
    const int32 row = row_of_warp(job);
    special::add<kOfWeights>(state.sums, summed(smem)[stage.at()], [&](int, int i, int k) {
        const int32 own = row + fragment::row_of(i), other = tile * kPassing + k;
        return kQueriesStay ? score.visible(own, other) : score.visible(other, own);
    });
    await_cleared(smem, found);
}

// Rounds a warp's sums and writes them.
__device__ __forceinline__ void write_results(const Params& p, const State& state, const Job& job) {
    const Entry& entry = job.work.entry;
    const float factor = kOfWeights ? 1.0f : static_cast<float>(p.scale);
    const int32 head = job.work.head;
    const Matrix to = kQueriesStay ? query_matrix(p.dq, entry, head, p.head_dim)
                      : kOfWeights ? key_matrix(p.dv, entry, head, p.head_dim_v)
                                   : key_matrix(p.dk, entry, head, p.head_dim);
    fragment::write_rows(to, state.sums, factor, row_of_warp(job));
}
