// SPDX-License-Identifier: Apache-2.0
// One gradient on Hopper, by TMA and wgmma, for float16 and bfloat16: the body of
// backward_dq_sm90.cu, backward_dk_sm90.cu and backward_dv_sm90.cu. Where heads are wide, no block
// has registers for more than one gradient of all columns. So each has a kernel of its own, which
// computes scores anew, eight products in all, but sums over no other block.
//
// A block stays on its multiprocessor and takes one job after the other. It owns kOwnRows rows of
// the gradient, 64 of them for each of kGroups warpgroups that compute, and walks the tiles of the
// other side. The operands:
//
//           own_x   own_y   x    y       S           dP           the gradient
//     dq    q       dout    k    v       own_x x^T   own_y y^T    dS x
//     dk    k       v       q    dout    own_x x^T   own_y y^T    dS x
//     dv    k               q    dout    own_x x^T                P y
//
// The warps of a further warpgroup have a role each:
//
//     load      own_x x0       x1        x2     ..
//     load      own_y y0       y1        y2     ..
//     look            x0       x1        x2     ..  infinite or NaN, where not all see? (dv: y)
//     compute   s0 dp0 | sums0 s1 dp1 | sums1 s2 dp2 | ..   dq and dk
//     compute   s0 | s1 sums0 | s2 sums1 | ..               dv
//
// Products between two bars are started together, and end in that order. The exponentials of s1 are
// computed while dp1 (dv: sums0) runs; only dS is computed while no product of the warpgroup does.
// Own rows of the next job come while the last sums of this one are finished and written.
//
// Barriers, and who arrives (lanes are one of a warp):
//   job_full[slot]    the one who leads
//   job_empty[slot]   lanes of all other warps
//   own_x_full, own_y_full   the loader, and the bytes
//   own_empty         lanes of the computing warps
//   x_full, y_full    the loader, and the bytes of a tile, with those of the row statistics for q
//   x_empty, y_empty  lanes of the computing warps; of the tiles that are summed also the one who
//                     looks
//   seen              the one who looks
//   special_added     lanes of the computing warps, and then
//   cleared           the one who looks: see add_special()
//
// Budget: a computing thread holds kDim / 2 (dv: kDimV / 2) sums, kPassing / 2 scores, as many
// gradients of weights, and kPassing / 4 rounded, of 240 registers.
//
// This file has the main loop. Beside it, and each behind those it needs:
// backward_apart_sm90_smem.cuh (jobs and shared memory), _tiles (loading), _sums (the gradient),
// and _jobs (who takes which).
//
// The file that includes this one has said
//   kQueriesStay   a block owns queries, else keys
//   kOfWeights     the gradient is a sum of weights times y, else of gradients of scores times x
//   Own, Walked    the side that a block owns rows of, and the other one
#pragma once
#include "attention/backward_apart_sm90_jobs.cuh"
#include "attention/backward_apart_sm90_smem.cuh"
#include "attention/backward_apart_sm90_sums.cuh"
#include "attention/backward_apart_sm90_tiles.cuh"
#include "attention/params_tma.cuh"
#include "hw/mbarrier.cuh"
#include "hw/memory.cuh"
#include "hw/sync.cuh"
#include "hw/tma.cuh"
#include "hw/wgmma.cuh"
#include "parts/fragment.cuh"
#include "parts/jobs.cuh"
#include "parts/pipeline.cuh"
#include "parts/score.cuh"
#include "parts/swizzled.cuh"
#include "parts/weights.cuh"

// Waits for a phase that is known to be complete: the compiler moves no arithmetic across the
// branch, and so the exponentials in front of it do not end up behind the wait for a product.
__device__ __forceinline__ void hold(hw::MBarrier& complete, int parity) {
    hw::mbarrier_wait(complete, parity);
}

// One turn of the main loop: a tile. kAdds: the product with the tile before is pending.
template <bool kHides, bool kAdds>
__device__ __forceinline__ void turn(
    const Params& p, Smem& smem, const Job& job, State& state, Passed& at, int32 tile) {
    const Stages x = at.x();
    const StagesY y = at.y();
    const SummedStages before = at.summed();
    ++at.tiles;
    const int group = hw::forget(at.group);  // or descriptors of all own columns take registers
    const RowStats* const columns = kQueriesStay ? nullptr : smem.rows[x.at()];
    float s[1][kPassing8][4];
    const auto hide = [&](float hidden) {
        if (!kHides) return;
        const Scores score = Scores::of(p, job.work.entry, 0);
        weights::hide<kQueriesStay>(s, score, row_of_warp(job), tile * kPassing, hidden);
    };
    if constexpr (kOfWeights) {
        hw::mbarrier_wait(smem.x_full[x.at()], x.parity());
        swizzled::start_a_bt(s, smem.own_x[group], 0, smem.x[x.at()]);
        if (kAdds) start_product(smem, state, before);
        hw::wgmma_wait<kAdds ? 1 : 0>();
        hw::pin(swizzled::listed(s));
        weights::of_products<kQueriesStay>(s, state.factor, state.own, columns);
        hide(0.0f);
        hw::pin(swizzled::listed(s));
        hold(smem.x_full[x.at()], x.parity());
        arrive(smem.x_empty[x.at()]);
        if (kAdds) end_product<0>(smem, state, before);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) fragment::left(state.factors[j], s[0], j);
    } else {
        float dp[1][kPassing8][4];
        if (kAdds) start_product(smem, state, before);
        hw::mbarrier_wait(smem.x_full[x.at()], x.parity());
        swizzled::start_a_bt(s, smem.own_x[group], 0, smem.x[x.at()]);
        hw::mbarrier_wait(smem.y_full[y.at()], y.parity());
        swizzled::start_a_bt(dp, own_y(smem)[group], 0, smem.y[y.at()]);
        if (kAdds) end_product<2>(smem, state, before);
        hw::wgmma_wait<1>();
        hw::pin(swizzled::listed(s));
        weights::of_products<kQueriesStay>(s, state.factor, state.own, columns);
        hide(weights::kHidden);
        hw::pin(swizzled::listed(s));
        hold(smem.y_full[y.at()], y.parity());
        hw::wgmma_wait<0>();
        hw::pin(swizzled::listed(dp));
        arrive(smem.y_empty[y.at()]);
        weights::gradients<kQueriesStay, kHides>(dp, s, state.own, columns);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) fragment::left(state.factors[j], dp[0], j);
    }
    state.pending = true;
}

// A tile that the warpgroup sees nothing of, though others do.
__device__ __forceinline__ void pass(
    Smem& smem, const Job& job, State& state, Passed& at, int32 tile) {
    finish(smem, state, at);
    const Stages x = at.x();
    const StagesY y = at.y();
    ++at.tiles;
    hw::mbarrier_wait(smem.x_full[x.at()], x.parity());
    hw::mbarrier_wait(smem.y_full[y.at()], y.parity());
    if (uniform(job.tiles.hides(tile))) {
        const SummedStages stage = at.summed();
        hw::mbarrier_wait(smem.seen[stage.at()], stage.parity());
        const int found = uniform(smem.special[stage.at()]);
        if (found) await_cleared(smem, found);
    }
    arrive(smem.x_empty[x.at()]);
    arrive(smem.y_empty[y.at()]);
}

__device__ __forceinline__ void compute(const Params& p, Smem& smem, const Job& job, Passed& at) {
    State state;
    start(p, state, job);
    const SeenTiles own = job.tiles_of_group[at.group];
    const int32 heads = uniform(job.heads);
    // The tiles of the block, and those of the group among them: it sees nothing of the others.
    const int32 first = uniform(job.tiles.any.first), last = uniform(job.tiles.any.last);
    const int32 own_first = uniform(max(own.any.first, first));
    const int32 own_last = uniform(max(own.any.last, first));
    // Of these nothing is hidden from the group, nor from others of the block.
    const TileRange plain = {uniform(max(job.tiles.all.first, own.all.first)),
                             uniform(min(job.tiles.all.last, own.all.last))};
    if (heads > 0) {
        hw::mbarrier_wait(smem.own_x_full, at.part.parity());
        if (!kOfWeights) hw::mbarrier_wait(smem.own_y_full, at.part.parity());
        at.part.next();
    }
#pragma unroll 1
    for (int32 head = 0; head < heads; ++head) {
        int32 tile = last;
#pragma unroll 1
        for (; tile > own_last; --tile) pass(smem, job, state, at, tile - 1);
        while (tile > own_first) {
            --tile;
            if (!state.pending) {
                turn<true, false>(p, smem, job, state, at, tile);
            } else if (!plain.holds(tile)) {
                turn<true, true>(p, smem, job, state, at, tile);
            } else {
#pragma unroll 1
                for (;; --tile) {
                    turn<false, true>(p, smem, job, state, at, tile);
                    if (tile <= plain.first) break;
                }
            }
            if (uniform(job.tiles.hides(tile))) add_special(p, smem, job, state, at, tile);
        }
#pragma unroll 1
        for (; tile > first; --tile) pass(smem, job, state, at, tile - 1);
    }
    if (heads > 0) arrive(smem.own_empty);
    finish(smem, state, at);
    write_results(p, state, job);
}

__device__ __forceinline__ void run(const TmaParams& p) {
    Smem& smem = hw::shared_memory<Smem>();
    if (threadIdx.x == 0) {
        hw::prefetch(p.q);
        hw::prefetch(p.k);
        hw::prefetch(p.v);
        hw::prefetch(p.o);
        for (int i = 0; i < kJobs; ++i) {
            hw::mbarrier_init(smem.job_full[i], 1);
            hw::mbarrier_init(smem.job_empty[i], kComputingWarps + 2);
        }
        hw::mbarrier_init(smem.own_empty, kComputingWarps);
        hw::mbarrier_init(smem.own_x_full, 1);
        hw::mbarrier_init(smem.own_y_full, 1);
        for (int i = 0; i < plan::kStages; ++i) {
            hw::mbarrier_init(smem.x_full[i], 1);
            hw::mbarrier_init(smem.x_empty[i], kComputingWarps + (kOfWeights ? 0 : 1));
        }
        for (int i = 0; i < plan::kStagesY; ++i) {
            hw::mbarrier_init(smem.y_full[i], 1);
            hw::mbarrier_init(smem.y_empty[i], kComputingWarps + (kOfWeights ? 1 : 0));
        }
        for (int i = 0; i < kSummedStages; ++i) hw::mbarrier_init(smem.seen[i], 1);
        hw::mbarrier_init(smem.special_added, kComputingWarps);
        hw::mbarrier_init(smem.cleared, 1);
        hw::fence_mbarrier_init();
    }
    __syncthreads();
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (warp >= 4) {
        if constexpr (kGroups > 1) hw::registers_increase<kRegisters>();
        Passed at = {warp / 4 - 1, 0, {}};
        follow<Slots>(smem, [&](const Job& job) { compute(p.call, smem, job, at); });
        return;
    }
    if constexpr (kGroups > 1) hw::registers_decrease<kFewRegisters>();
    if (warp == 0) {
        lead(p, smem);
    } else if (warp == 1) {
        StagesY stage;
        Ring<1> part;
        follow<Slots>(smem, [&](const Job& job) {
            if (hw::elect_one()) load_all_y(p, smem, job, stage, part);
        });
    } else if (warp == 2) {
        SummedStages stage;
        Ring<1> added;
        follow<Slots>(smem, [&](const Job& job) { look_through(smem, job, stage, added); });
    }
}
