// SPDX-License-Identifier: Apache-2.0
// The tiles of backward_apart_sm90.cuh: own rows and those that pass are loaded, and what is summed
// is looked through for what is infinite or NaN.
#pragma once
#include "attention/backward_apart_sm90_smem.cuh"
#include "attention/params_tma.cuh"
#include "hw/mbarrier.cuh"
#include "hw/tma.cuh"
#include "parts/fragment.cuh"
#include "parts/jobs.cuh"
#include "parts/pipeline.cuh"
#include "parts/row_stats.cuh"
#include "parts/swizzled.cuh"
#include "parts/work.cuh"

// Starts to bring one kind of the block's own rows, once their place is free. One thread.
template <class Tile>
__device__ __forceinline__ void load_own(Tile* own,
                                         const hw::TensorMap& map,
                                         hw::MBarrier& full,
                                         hw::MBarrier& empty,
                                         const Job& job,
                                         Ring<1>& part) {
    hw::mbarrier_wait(empty, part.parity() ^ 1);
    part.next();
    hw::mbarrier_arrive_expect_tx(full, kGroups * Tile::kBytes);
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
        swizzled::load(own[group], map, full, job.own_row + group * kGroupRows, job.work.head,
                       job.batch);
    }
}

// Starts to bring a tile, and says how many bytes will come beside it. One thread.
template <class Tile>
__device__ __forceinline__ void load_tile(Tile& tile,
                                          const hw::TensorMap& map,
                                          hw::MBarrier& full,
                                          const Job& job,
                                          Visit visit,
                                          int more_bytes = 0) {
    hw::mbarrier_arrive_expect_tx(full, Tile::kBytes + more_bytes);
    swizzled::load(tile, map, full, job.row + visit.tile * kPassing, visit.head, job.batch);
}

// Brings all of x of a job; own rows second, since their place is free the last. One thread.
__device__ __forceinline__ void load_all_x(
    const TmaParams& p, Smem& smem, const Job& job, Stages& stage, Ring<1>& part) {
    constexpr int kRowBytes = kQueriesStay ? 0 : kPassing * static_cast<int>(sizeof(RowStats));
    bool begins = true;
#pragma unroll 1
    for (Visit visit = Visit::first(job); visit.exists(job); stage.next(), visit.next(job)) {
        const int at = stage.at();
        hw::mbarrier_wait(smem.x_empty[at], stage.parity() ^ 1);
        load_tile(smem.x[at], kQueriesStay ? p.k : p.q, smem.x_full[at], job, visit, kRowBytes);
        if (!kQueriesStay) {
            const int64 slot =
                query_slot<plan::kTileQ>(p.call, job.work.entry, visit.head, visit.tile);
            hw::bulk_load(smem.rows[at], row_stats(p.call, slot), kRowBytes, smem.x_full[at]);
        }
        if (begins) {
            load_own(smem.own_x, kQueriesStay ? p.q : p.k, smem.own_x_full, smem.own_empty, job,
                     part);
        }
        begins = false;
    }
}

// Brings all of y of a job. One thread.
__device__ __forceinline__ void load_all_y(
    const TmaParams& p, Smem& smem, const Job& job, StagesY& stage, Ring<1>& part) {
    bool begins = !kOfWeights;
#pragma unroll 1
    for (Visit visit = Visit::first(job); visit.exists(job); stage.next(), visit.next(job)) {
        const int at = stage.at();
        hw::mbarrier_wait(smem.y_empty[at], stage.parity() ^ 1);
        load_tile(smem.y[at], kQueriesStay ? p.v : p.o, smem.y_full[at], job, visit);
        if (begins) {
            load_own(own_y(smem), kQueriesStay ? p.o : p.v, smem.own_y_full, smem.own_empty, job,
                     part);
        }
        begins = false;
    }
}

// Says of each tile that is summed, and that something is hidden from, whether it has infinities or
// NaN. Those it makes 0, once all who compute have added them to their sums by themselves. A warp.
__device__ __forceinline__ void look_through(Smem& smem,
                                             const Job& job,
                                             SummedStages& stage,
                                             Ring<1>& added) {
    Visit visit = Visit::first(job);
#pragma unroll 1
    for (; visit.exists(job); stage.next(), visit.next(job)) {
        hw::mbarrier_wait(summed_full(smem, stage), stage.parity());
        auto& tile = summed(smem)[stage.at()];
        const bool found = visit.hides(job) && swizzled::has_special(tile);
        if (fragment::lane() == 0) smem.special[stage.at()] = found ? 1 + added.parity() : 0;
        arrive(smem.seen[stage.at()]);
        if (found) {
            hw::mbarrier_wait(smem.special_added, added.parity());
            added.next();
            swizzled::remove_special<32>(tile, fragment::lane());
            arrive(smem.cleared);
        }
        arrive(summed_empty(smem, stage));
    }
}
