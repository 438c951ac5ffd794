// SPDX-License-Identifier: Apache-2.0
// The product of forward_sm90.cu with V, pending from one tile of keys to the next, and what is
// infinite or NaN in V and not seen by all.
#pragma once
#include "attention/forward_sm90_rows.cuh"
#include "attention/forward_sm90_smem.cuh"
#include "attention/params.cuh"
#include "hw/mbarrier.cuh"
#include "hw/sync.cuh"
#include "hw/wgmma.cuh"
#include "parts/fragment.cuh"
#include "parts/online.cuh"
#include "parts/pipeline.cuh"
#include "parts/score.cuh"
#include "parts/special.cuh"
#include "parts/swizzled.cuh"

struct Passed {
    int group;
    Stages k;  // of the next tile

    // Of the values that are pending, those of the last tile.
    __device__ __forceinline__ Stages v() const { return {k.count - 1}; }
};

// Starts the product that is pending.
__device__ __forceinline__ void start_product(Smem& smem, State& state, Stages v) {
    hw::mbarrier_wait(smem.v_full[v.at()], v.parity());
    swizzled::start_x_b(state.out, state.weights, smem.v[v.at()], state.adds);
}

// It is complete.
__device__ __forceinline__ void end_product(Smem& smem, State& state, Stages v) {
    hw::wgmma_wait<0>();
    hw::pin(swizzled::listed(state.out));
    arrive(smem.v_empty[v.at()]);
    state.pending = false;
}

// What was found in values is added to results, or nothing sees it; waits until it is 0.
__device__ __forceinline__ void await_cleared(Smem& smem, int found) {
    arrive(smem.special_added);
    hw::mbarrier_wait(smem.v_cleared, found - 1);
}

// If values that are pending have infinities or NaN, which not all see: adds them to the results of
// those who do, and waits until they are 0.
__device__ __forceinline__ void add_special(
    const Params& p, Smem& smem, State& state, Passed& at, const Job& job, int32 tile) {
    const Stages v = at.v();
    // The one who looks may be a tile of this stage behind, until this one is there.
    hw::mbarrier_wait(smem.v_full[v.at()], v.parity());
    hw::mbarrier_wait(smem.v_seen[v.at()], v.parity());
    const int found = uniform(smem.special[v.at()]);
    if (!found) return;
    const Scores score = Scores::of(p, job.work.entry, job.work.head);
    uint64 seen[1];
    online::look<kKeys8>(seen, score, query_of(job), tile * plan::kTileKv);
    if (!state.adds) fragment::clear(state.out);
    state.adds = true;
    special::add(state.out, smem.v[v.at()],
                 [&](int, int i, int k) { return seen[0] >> (4 * (k / 8) + i + k % 2) & 1; });
    await_cleared(smem, found);
}
