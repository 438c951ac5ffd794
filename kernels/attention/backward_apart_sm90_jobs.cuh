// SPDX-License-Identifier: Apache-2.0
// The jobs of backward_apart_sm90.cuh: in which order blocks take them, who takes them, and how the
// other warps learn of them.
#pragma once
#include "attention/backward_apart_sm90_smem.cuh"
#include "attention/backward_apart_sm90_tiles.cuh"
#include "attention/params_tma.cuh"
#include "hw/mbarrier.cuh"
#include "parts/pipeline.cuh"
#include "parts/score.cuh"
#include "parts/work.cuh"

// Of rows [row, row + rows) that a block owns.
__device__ __forceinline__ SeenTiles seen_tiles(const Scores& score, int32 row, int32 rows) {
    if constexpr (kQueriesStay) {
        return {score.band.key_tiles(row, rows, kPassing),
                score.plain_key_tiles(row, rows, kPassing)};
    } else {
        return {score.band.query_tiles(row, rows, kPassing),
                score.plain_query_tiles(row, rows, kPassing)};
    }
}

// Which part is done as the one of this index: as in forward_sm90.cu.
__device__ __forceinline__ int64 part_at(const Params& p, int64 index) {
    constexpr int kRowBytes = (plan::kDim + plan::kDimV) * static_cast<int>(sizeof(Element));
    const bool even = p.window_left == kOpen && p.window_right == kOpen;
    const int32 walked = kQueriesStay ? 1 : p.heads_q / p.heads_kv;  // heads of a part
    const int64 heads = max(heads_in<Walked>(p, plan::kCacheBytes, walked * kRowBytes),
                            int64{plan::kHeadsTogether});
    return interleaved<Own, kOwnRows>(p, index, even ? 1 : heads);
}

// Notes what a job has. One thread.
__device__ __forceinline__ void note(const Params& p, const Work& work, bool exists, Job& job) {
    const Scores score = Scores::of(p, work.entry, 0);
    const int32 row = work.tile * kOwnRows, group = p.heads_q / p.heads_kv;
    job.work = work;
    job.exists = exists;
    job.tiles = seen_tiles(score, row, kOwnRows);
#pragma unroll 1
    for (int i = 0; i < kGroups; ++i) {
        job.tiles_of_group[i] = seen_tiles(score, row + i * kGroupRows, kGroupRows);
    }
    job.head = kQueriesStay ? work.head / group : work.head * group;
    job.heads = kQueriesStay ? 1 : group;
    if (job.tiles.any.first >= job.tiles.any.last) job.heads = 0;
    job.own_row = (kQueriesStay ? work.entry.first_q : work.entry.first_kv) + row;
    job.row = kQueriesStay ? work.entry.first_kv : work.entry.first_q;
    job.batch = p.cu_seqlens_q.at ? 0 : static_cast<int32>(work.entry.batch);
}

// Puts one job after the other into the slots, and loads x. A warp.
__device__ __forceinline__ void lead(const TmaParams& maps, Smem& smem) {
    const Params& p = maps.call;
    const int64 parts = work_parts<Own, kOwnRows>(p);
    Slots slot;
    Stages stage;
    Ring<1> part;
    int64 index = blockIdx.x;
    for (bool begun = false;; slot.next(), begun = true) {
        // Before a ticket is drawn, where lanes meet: one that came to look later might find a slot
        // that has been filled and emptied again.
        hw::mbarrier_wait(smem.job_empty[slot.at()], slot.parity() ^ 1);
        Work work = {slack(Own(), 0, 0), 0, 0};
        bool exists = false;
        for (bool drawn = !begun; !exists && index < parts; drawn = false) {
            if (!drawn) index = draw(p, parts);
            exists = index < parts && work_at<Own, kOwnRows>(p, part_at(p, index), work);
        }
        Job& job = smem.jobs[slot.at()];
        if (threadIdx.x == 0) {
            note(p, work, exists, job);
            hw::mbarrier_arrive(smem.job_full[slot.at()]);
            if (exists) load_all_x(maps, smem, job, stage, part);
        }
        __syncwarp();
        if (!exists) return;
    }
}
