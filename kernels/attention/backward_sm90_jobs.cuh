// SPDX-License-Identifier: Apache-2.0
// The jobs of backward_sm90.cu: in which order blocks take them, who takes them, and how the other
// warps learn of them.
#pragma once
#include "attention/backward_sm90_pairs.cuh"
#include "attention/backward_sm90_smem.cuh"
#include "attention/backward_sm90_tiles.cuh"
#include "attention/params_tma.cuh"
#include "hw/mbarrier.cuh"
#include "parts/fragment.cuh"
#include "parts/pipeline.cuh"
#include "parts/score.cuh"
#include "parts/work.cuh"

// Of so many heads jobs are drawn tile by tile. Jobs of one head wait for one another, but q, dout
// and the sums of dq, which go around the longest, are to stay in an L2 cache. Without a band jobs
// of a head soon do not wait any more; without kOrdered they hardly do, and the cache decides.
__device__ __forceinline__ int64 heads_together(const Params& p) {
    constexpr int kRowBytes = (plan::kDim + plan::kDimV) * static_cast<int>(sizeof(Element)) +
                              plan::kDqDim * static_cast<int>(sizeof(float));
    const int64 by_cache = heads_in<Queries>(p, plan::kCacheBytes, kRowBytes);
    if (!plan::kOrdered) return by_cache;
    const bool even = p.window_left == kOpen && p.window_right == kOpen;
    return max(by_cache, int64{even ? 2 : plan::kHeadsTogether});
}

// Notes what a job has. One thread.
__device__ __forceinline__ void note(
    const Params& p, const Work& work, bool exists, Ring<1> part, Job& job) {
    const Scores score = Scores::of(p, work.entry, 0);
    const int32 key = work.tile * plan::kTileKv, group = p.heads_q / p.heads_kv;
    job.work = work;
    job.part = part;
    job.exists = exists;
    job.tiles = {score.band.query_tiles(key, plan::kTileKv, plan::kTileQ),
                 score.plain_query_tiles(key, plan::kTileKv, plan::kTileQ)};
    if (HeldPairs::kPairs) job.tiles.all = {0, 0};  // there is no code for plain tiles
    job.head = work.head * group;
    job.heads = job.tiles.any.first < job.tiles.any.last ? group : 0;
    job.key = work.entry.first_kv + key;
    job.row_q = work.entry.first_q;
    job.batch = p.cu_seqlens_q.at ? 0 : static_cast<int32>(work.entry.batch);
    job.special = 0;
}

// Puts one job after the other into the slots, and loads what they need. A ticket is drawn when the
// last tiles of the job before are on their way. A warp.
__device__ __forceinline__ void lead(const TmaParams& maps, Smem& smem) {
    const Params& p = maps.call;
    const int64 parts = work_parts<Keys, plan::kTileKv>(p);
    Stages stage;
    Ring<1> part;
    for (Slots slot;; slot.next()) {
        // Before a ticket is drawn, where lanes meet: one that came to look later might find a slot
        // that has been filled and emptied again.
        hw::mbarrier_wait(smem.job_empty[slot.at()], slot.parity() ^ 1);
        Work work = {slack(Keys(), 0, 0), 0, 0};
        bool exists = false, more = true;
        while (!exists && more) {
            const int64 index = take_ticket(p, parts + gridDim.x);
            more = index < parts;
            exists =
                more && work_at<Keys, plan::kTileKv>(
                            p, interleaved<Keys, plan::kTileKv>(p, index, heads_together(p)), work);
        }
        if (threadIdx.x == 0) {
            Job& job = smem.jobs[slot.at()];
            note(p, work, exists, part, job);
            hw::mbarrier_arrive(smem.job_full[slot.at()]);
            if (exists) load_all(maps, smem, job, stage);
            if (job.heads > 0) part.next();
        }
        __syncwarp();
        if (!exists) return;
    }
}

// By words, of which each lane has one: ptxas would copy one byte after the other. A warp.
__device__ __forceinline__ void copy(Job& to, const Job& from) {
    constexpr int kWords = sizeof(Job) / 4;
    static_assert(kWords <= 32, "a lane each");
    const int lane = fragment::lane();
    if (lane < kWords) {
        reinterpret_cast<uint32*>(&to)[lane] = reinterpret_cast<const uint32*>(&from)[lane];
    }
}

// Those who compute learn of their next job, once all have finished the last; false if there is
// none.
__device__ __forceinline__ bool begin(Smem& smem) {
    sync_computing();
    if (threadIdx.x / 32 == kGroupThreads / 32) {
        const Slots slot = {smem.passed};
        hw::mbarrier_wait(smem.job_full[slot.at()], slot.parity());
        __syncwarp();
        copy(smem.job, smem.jobs[slot.at()]);
        if (fragment::lane() == 0) smem.passed = slot.count + 1;
        arrive(smem.job_empty[slot.at()]);
    }
    sync_computing();
    return uniform(smem.job.exists);
}
