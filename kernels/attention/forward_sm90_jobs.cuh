// SPDX-License-Identifier: Apache-2.0
// The jobs of forward_sm90.cu: which one is done when, which keys it has, and the warp that takes
// them.
#pragma once
#include "attention/forward_sm90_smem.cuh"
#include "attention/forward_sm90_tiles.cuh"
#include "attention/params_tma.cuh"
#include "hw/mbarrier.cuh"
#include "hw/sync.cuh"
#include "parts/fragment.cuh"
#include "parts/mask.cuh"
#include "parts/pipeline.cuh"
#include "parts/score.cuh"
#include "parts/work.cuh"

// Of queries [query, query + queries).
__device__ __forceinline__ SeenTiles seen_tiles(const Scores& score, int32 query, int32 queries) {
    return {score.band.key_tiles(query, queries, plan::kTileKv),
            score.plain_key_tiles(query, queries, plan::kTileKv)};
}

// Which part is done as the one of this index. Without a band tiles of one head take the same time,
// and neighbours share keys and values. Otherwise those that take longest go first, of so many
// heads that their keys and values find room in an L2 cache, or of kHeadsTogether if that is more:
// while several blocks are at tiles of the same head, they share what is not in the cache, too.
__device__ __forceinline__ int64 part_at(const Params& p, int64 index) {
    constexpr int kRowBytes = (plan::kDim + plan::kDimV) * static_cast<int>(sizeof(Element));
    const bool even = p.window_left == kOpen && p.window_right == kOpen;
    const int64 heads =
        max(heads_in<Keys>(p, plan::kCacheBytes, kRowBytes), int64{plan::kHeadsTogether});
    return interleaved<Queries, plan::kTileQ>(p, index, even ? 1 : heads);
}

// Notes which keys a job has: all of the block's by a lane, each warpgroup's by another. A warp.
__device__ __forceinline__ void note_keys(const Params& p, Job& job) {
    static_assert(kGroups < 32, "a lane each");
    const int lane = fragment::lane();
    if (lane > kGroups) return;
    const bool all = lane == kGroups;
    const Scores score = Scores::of(p, job.work.entry, job.work.head);
    const int32 query = job.work.tile * plan::kTileQ + (all ? 0 : lane * kGroupRows);
    (all ? job.keys : job.keys_of_group[lane]) =
        seen_tiles(score, query, all ? plan::kTileQ : kGroupRows);
    if (!all) return;
    job.head_kv = job.work.head / (p.heads_q / p.heads_kv);
    job.row = job.work.entry.first_kv;
    job.batch = p.cu_seqlens_q.at ? 0 : static_cast<int32>(job.work.entry.batch);
}

// Notes a job that has no keys. A warp.
__device__ __forceinline__ void note_nothing(Job& job) {
    const int lane = fragment::lane();
    if (lane <= kGroups) {
        (lane == kGroups ? job.keys : job.keys_of_group[lane]) = {{0, 0}, {0, 0}};
    }
}

// Is the job that was in a slot to be done again? A warp.
__device__ __forceinline__ bool was_spoilt(Smem& smem, Slots slot) {
    static_assert(kComputingWarps <= 32, "a lane each");
    const int lane = fragment::lane();
    bool spoilt = false;
    if (lane < kComputingWarps) {
        int32& mine = smem.spoilt[slot.at()][lane];
        spoilt = mine != 0;
        mine = 0;
    }
    return __any_sync(0xffffffffu, spoilt);
}

// Are results of jobs spoilt that are in the slots behind this one? Waits until those jobs are
// done; not for that before this slot, whose results may be pending. A warp.
__device__ __forceinline__ bool any_spoilt(Smem& smem, Slots slot) {
    bool spoilt = false;
#pragma unroll 1
    for (int i = 2; i < kJobs; ++i) {
        slot.next();
        hw::mbarrier_wait(smem.job_empty[slot.at()], slot.parity() ^ 1);
        const int lane = fragment::lane();
        spoilt = spoilt || (lane < kComputingWarps && smem.spoilt[slot.at()][lane] != 0);
    }
    return __any_sync(0xffffffffu, spoilt);
}

// Puts one job after the other into the slots, and starts to bring their queries. A warp.
__device__ __forceinline__ void take_all(const TmaParams& maps, Smem& smem) {
    const Params& p = maps.call;
    const int64 parts = work_parts<Queries, plan::kTileQ>(p);
    Slots slot;
    int64 index = blockIdx.x;
    bool exists = false;  // there is a job for the next slot
    bool hides = false;   // a job that hides something was taken
    int left = kJobs;     // slots to be gone around in the end
    Work work = {slack(Queries(), 0, 0), 0, 0};
    for (bool begun = false;; slot.next(), begun = true) {
        // What is first looked up needs no barrier, and the first job no ticket.
        for (bool drawn = !begun; !exists && index < parts; drawn = false) {
            if (!drawn) index = draw(p, parts);
            exists = index < parts && work_at<Queries, plan::kTileQ>(p, part_at(p, index), work);
        }
        if (!begun) await_prepared();
        hw::mbarrier_wait(smem.job_empty[slot.at()], slot.parity() ^ 1);
        Job& job = smem.jobs[slot.at()];
        int32 kind = kEnd;
        if (was_spoilt(smem, slot)) {
            kind = kAgain;
        } else if (exists) {
            kind = kOnce;
        } else if (hides && left > 0 && (left == kJobs || any_spoilt(smem, slot))) {
            kind = kPause;
        }
        if (!exists) --left;
        if (kind == kOnce) {
            if (fragment::lane() == 0) job.work = work;
            __syncwarp();
            note_keys(p, job);
        } else if (kind != kAgain) {
            note_nothing(job);
        }
        if (fragment::lane() == 0) job.kind = kind;
        arrive(smem.job_full[slot.at()]);
        if (kind == kOnce) {
            exists = false;
            hides = hides || hides_any(job.keys);
        }
        const Places place = {slot.count};  // all lanes wait for it, in fewer registers than one
        hw::mbarrier_wait(smem.q_empty[place.at()], place.parity() ^ 1);
        if (hw::elect_one()) bring_queries(maps, smem, slot);
        if (kind == kEnd) return;
    }
}
