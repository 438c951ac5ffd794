// SPDX-License-Identifier: Apache-2.0
// The tiles of backward_sm90.cu: loaded, looked through for what is infinite or NaN, cleared of it,
// loaded again, and released.
#pragma once
#include "attention/backward_sm90_smem.cuh"
#include "attention/params_tma.cuh"
#include "hw/mbarrier.cuh"
#include "hw/sync.cuh"
#include "hw/tma.cuh"
#include "parts/fragment.cuh"
#include "parts/jobs.cuh"
#include "parts/pipeline.cuh"
#include "parts/row_stats.cuh"
#include "parts/swizzled.cuh"
#include "parts/work.cuh"

template <class Tile>
__device__ __forceinline__ void load_keys(const hw::TensorMap& map,
                                          Tile& to,
                                          hw::MBarrier& full,
                                          const Job& job) {
    swizzled::load(to, map, full, job.key, job.work.head, job.batch);
}
template <class Tile>
__device__ __forceinline__ void load_queries(
    const hw::TensorMap& map, Tile& to, hw::MBarrier& full, const Job& job, Visit visit) {
    swizzled::load(to, map, full, job.row_q + visit.tile * plan::kTileQ, visit.head, job.batch);
}

// Brings the keys or the values of a job, once the job before has left their place. One thread.
template <class Tile>
__device__ __forceinline__ void bring_keys(
    const hw::TensorMap& map, Tile& to, hw::MBarrier& full, hw::MBarrier& empty, const Job& job) {
    hw::mbarrier_wait(empty, job.part.parity() ^ 1);
    hw::mbarrier_arrive_expect_tx(full, Tile::kBytes);
    load_keys(map, to, full, job);
}

// Brings all tiles of a job; K and V second, since their places are free the last. One thread.
__device__ __forceinline__ void load_all(const TmaParams& p,
                                         Smem& smem,
                                         const Job& job,
                                         Stages& stage) {
    bool begins = true;
#pragma unroll 1
    for (Visit visit = Visit::first(job); visit.exists(job); stage.next(), visit.next(job)) {
        const int at = stage.at();
        constexpr int kRowBytes = plan::kTileQ * static_cast<int>(sizeof(RowStats));
        const int64 slot = query_slot<plan::kTileQ>(p.call, job.work.entry, visit.head, visit.tile);
        hw::mbarrier_wait(smem.q_empty[at], stage.parity() ^ 1);
        smem.steps[at] = {visit.tile * plan::kTileQ, visit.head};
        hw::mbarrier_arrive_expect_tx(smem.q_full[at], QueryTile::kBytes + kRowBytes);
        load_queries(p.q, smem.q[at], smem.q_full[at], job, visit);
        hw::bulk_load(smem.rows[at], row_stats(p.call, slot), kRowBytes, smem.q_full[at]);
        if (begins) bring_keys(p.k, smem.k, smem.k_full, smem.k_empty, job);
        const DoutStages dout = {stage.count};
        hw::MBarrier& full = smem.dout_full[dout.at()];
        hw::mbarrier_wait(smem.dout_empty[dout.at()], dout.parity() ^ 1);
        hw::mbarrier_arrive_expect_tx(full, DoutTile::kBytes);
        load_queries(p.o, smem.dout[dout.at()], full, job, visit);
        if (begins) bring_keys(p.v, smem.v, smem.v_full, smem.v_empty, job);
        begins = false;
    }
}

// Says whether K, and tiles of Q and dout that something is hidden from, have infinities or NaN.
__device__ __forceinline__ void look_through(Smem& smem, const Job& job, Stages& stage) {
    int32 keys = 0;
    if (job.heads > 0) {
        hw::mbarrier_wait(smem.k_full, job.part.parity());
        if (hides_any(job) && swizzled::has_special(smem.k)) keys = kOfKeys;
        arrive(smem.k_empty);
    }
#pragma unroll 1
    for (Visit visit = Visit::first(job); visit.exists(job); stage.next(), visit.next(job)) {
        const int at = stage.at();
        const DoutStages dout = {stage.count};
        hw::mbarrier_wait(smem.q_full[at], stage.parity());
        hw::mbarrier_wait(smem.dout_full[dout.at()], dout.parity());
        if (visit.hides(job)) {
            const bool found =
                swizzled::has_special(smem.q[at]) | swizzled::has_special(smem.dout[dout.at()]);
            if (fragment::lane() == 0) smem.special[at] = keys | (found ? kOfQueries : 0);
        }
        arrive(smem.seen[at]);
        arrive(smem.q_empty[at]);
        arrive(smem.dout_empty[dout.at()]);
    }
}

// Makes 0 of what is infinite or NaN, between barriers of all who compute. add_special() sees to
// them.
template <class Tile>
__device__ __forceinline__ void clear(Tile& tile) {
    swizzled::remove_special<kComputingThreads>(tile,
                                                static_cast<int>(threadIdx.x) - kGroupThreads);
}

// Loads a tile anew; for all who compute. What was done to it before is over.
template <class Tile, class Load>
__device__ __forceinline__ void load_again(Smem& smem, Tile& tile, Load load_tile) {
    const int32 parity = smem.again;
    hw::fence_proxy_async();
    sync_computing();
    if (threadIdx.x == kGroupThreads) {
        smem.again = parity ^ 1;
        hw::mbarrier_arrive_expect_tx(smem.again_full, Tile::kBytes);
        load_tile(tile, smem.again_full);
    }
    hw::mbarrier_wait(smem.again_full, parity);
}

__device__ __forceinline__ void load_keys_again(const TmaParams& p, Smem& smem) {
    load_again(smem, smem.k,
               [&](KeyTile& to, hw::MBarrier& full) { load_keys(p.k, to, full, smem.job); });
}

// No product reads the job's keys and values any more.
__device__ __forceinline__ void release_keys(Smem& smem) {
    arrive(smem.k_empty);
    arrive(smem.v_empty);
}

// Does the job's last visit release them by itself, as soon as dq is there? Only where it hides
// something, as the last one in causal order does, so that plain turns need not know.
__device__ __forceinline__ bool releases_early(const Job& job) {
    return plan::kSplits == 1 && !job.special && job.tiles.hides(job.tiles.any.first);
}
