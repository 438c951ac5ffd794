// SPDX-License-Identifier: Apache-2.0
// The tiles of backward_sm90.cu: loaded, searched for what is infinite or NaN, cleared of it,
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
#include "parts/softmax.cuh"
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

// Notes whether tiles of a visit may have infinities or NaN: one of K or Q makes one of each of its
// scores, one of dout of each of its gradients of weights, whatever it is multiplied by. They may
// also come from V, or be too large. A warp, before a barrier of all who compute.
template <int kCols8>
__device__ __forceinline__ void suspect(Smem& smem,
                                        Stages stage,
                                        int group,
                                        const float (&s)[1][kCols8][4],
                                        const float (&dp)[1][kCols8][4]) {
    float sums[2] = {};
#pragma unroll
    for (int n = 0; n < kCols8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i % 2] = fmaf(s[0][n][i], dp[0][n][i], sums[i % 2]);
    }
    const float sum = sums[0] + sums[1];
    const bool any = __any_sync(0xffffffffu, !(fabsf(sum) < softmax::infinity<float>()));
    if (any && fragment::lane() == 0) {
        const uint32 warp = 4 * group + thread_of_group() / 32;
        smem.suspects[stage.count % 2][warp] = stage.count + 1;
    }
}

// Has a warp noted that? Behind the barrier; a warp.
__device__ __forceinline__ bool is_suspect(const Smem& smem, Stages stage) {
    static_assert(kComputingWarps <= 32, "a lane each");
    const int lane = fragment::lane();
    return __any_sync(0xffffffffu, lane < kComputingWarps &&
                                       smem.suspects[stage.count % 2][lane] == stage.count + 1);
}

// Which of the tiles have infinities or NaN. All who compute; nobody changes a tile before the end.
__device__ __forceinline__ int32 search(const Smem& smem,
                                        const QueryTile& q,
                                        const DoutTile& dout) {
    int32 found = swizzled::has_special<1>(q) || swizzled::has_special<1>(dout) ? kOfQueries : 0;
    if (swizzled::has_special<1>(smem.k)) found |= kOfKeys;
    sync_computing();
    return found;
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
