// SPDX-License-Identifier: Apache-2.0
// The tiles of forward_sm90.cu: who brings Q, K and V, and who looks through V for what is infinite
// or NaN.
#pragma once
#include "attention/forward_sm90_smem.cuh"
#include "attention/params_tma.cuh"
#include "hw/mbarrier.cuh"
#include "hw/tma.cuh"
#include "parts/fragment.cuh"
#include "parts/pipeline.cuh"
#include "parts/swizzled.cuh"

// Starts to bring the queries of the job in a slot to their place, which is free. One thread.
__device__ __forceinline__ void bring_queries(const TmaParams& maps, Smem& smem, Slots slot) {
    const Places place = {slot.count};
    hw::MBarrier& full = smem.q_full[place.at()];
    const Job& job = smem.jobs[slot.at()];
    if (job.keys.any.first >= job.keys.any.last) {
        hw::mbarrier_arrive(full);
        return;
    }
    hw::mbarrier_arrive_expect_tx(full, QueryTile::kBytes);
    swizzled::load(smem.q[place.at()], maps.q, full,
                   job.work.entry.first_q + job.work.tile * plan::kTileQ, job.work.head, job.batch);
}

// Brings the keys or the values of all jobs. All blocks begin at the same time, and memory is slow
// then: only kUrgent tiles of the first job are asked for before its queries are there. Others may
// replace these queries only once they have had this tile, if another one follows it; else this
// thread might come after that, and wait for a phase that is long over. One thread.
template <uint32 kUrgent, class Tile>
__device__ __forceinline__ void load_all(Smem& smem,
                                         Tile (&tiles)[plan::kStages],
                                         const hw::TensorMap& map,
                                         hw::MBarrier (&full)[plan::kStages],
                                         hw::MBarrier (&empty)[plan::kStages]) {
    Slots slot;
    Stages stage;
    for (;; slot.next()) {
        hw::mbarrier_wait(smem.job_full[slot.at()], slot.parity());
        const Job& job = smem.jobs[slot.at()];
        if (job.kind == kEnd) return;
        const int32 first = job.keys.any.first;
#pragma unroll 1
        for (int32 tile = job.keys.any.last - 1; tile >= first; --tile, stage.next()) {
            const bool waits = slot.count == 0 && stage.count == kUrgent && tile > first;
            if (waits) hw::mbarrier_wait(smem.q_full[0], 0);
            hw::mbarrier_wait(empty[stage.at()], stage.parity() ^ 1);
            hw::mbarrier_arrive_expect_tx(full[stage.at()], Tile::kBytes);
            swizzled::load(tiles[stage.at()], map, full[stage.at()], job.row + tile * plan::kTileKv,
                           job.head_kv, job.batch);
        }
        hw::mbarrier_arrive(smem.job_empty[slot.at()]);
    }
}

// Says of each tile of values that something is hidden from, of a job that is done again, whether
// it has infinities or NaN. Those it makes 0, once all who compute have added them to their results
// by themselves. A warp.
__device__ __forceinline__ void look_through_values(Smem& smem) {
    Slots slot;
    Stages stage;
    Ring<1> added;  // of special_added
    for (;; slot.next()) {
        hw::mbarrier_wait(smem.job_full[slot.at()], slot.parity());
        const Job& job = smem.jobs[slot.at()];
        if (job.kind == kEnd) return;
        const bool again = job.kind == kAgain;
        const int32 first = job.keys.any.first;
#pragma unroll 1
        for (int32 tile = job.keys.any.last - 1; tile >= first; --tile, stage.next()) {
            hw::mbarrier_wait(smem.v_full[stage.at()], stage.parity());
            ValueTile& values = smem.v[stage.at()];
            const bool found = again && job.keys.hides(tile) && swizzled::has_special(values);
            if (fragment::lane() == 0) smem.special[stage.at()] = found ? 1 + added.parity() : 0;
            arrive(smem.v_seen[stage.at()]);
            if (found) {
                hw::mbarrier_wait(smem.special_added, added.parity());
                added.next();
                swizzled::remove_special<32>(values, fragment::lane());
                arrive(smem.v_cleared);
            }
            arrive(smem.v_empty[stage.at()]);
        }
        arrive(smem.job_empty[slot.at()]);
    }
}
