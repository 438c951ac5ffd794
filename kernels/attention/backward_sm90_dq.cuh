// SPDX-License-Identifier: Apache-2.0
// dq of backward_sm90.cu: those who compute put a part of it into shared memory, and two warps
// bring it to its sums, when it is the job's turn.
#pragma once
#include "attention/backward_sm90_smem.cuh"
#include "hw/mbarrier.cuh"
#include "hw/memory.cuh"
#include "hw/semaphore.cuh"
#include "hw/sync.cuh"
#include "hw/tma.cuh"
#include "parts/fragment.cuh"
#include "parts/gradient_mma.cuh"
#include "parts/jobs.cuh"
#include "parts/mask.cuh"
#include "parts/pipeline.cuh"
#include "parts/work.cuh"

// Where a part of dq of a visit lies in shared memory, each warp's numbers close together: the
// second where Q was.
__device__ __forceinline__ float* dq_place(Smem& smem, DqParts at, int split) {
    static_assert(plan::kSplits == 1 || sizeof(QueryTile) == sizeof(smem.dq), "room for a part");
    if (split == 0) return smem.dq[plan::kDqPlaces > 1 ? at.at() : 0][0];
    return reinterpret_cast<float*>(&smem.q[Stages{at.count / plan::kSplits}.at()]);
}

// A part of dq of the visit at a stage.
__device__ __forceinline__ DqParts dq_part(Stages stage, int split) {
    return {stage.count * plan::kSplits + split};
}

// Puts the warp's part of dq of a visit into shared memory, once the one before has left its place.
__device__ __forceinline__ void put_dq(
    Smem& smem, const float (&dq)[1][kDqCols / 8][4], int group, DqParts at, int split) {
    constexpr uint32 kAgo = plan::kSplits * plan::kDqPlaces;
    using Four = hw::Vec<float, 4>;
    const int warp = 4 * group + static_cast<int>(thread_of_group() / 32);
    float* const place = dq_place(smem, at, split) + warp * kDqNumbers;
    Four* const mine = reinterpret_cast<Four*>(place) + fragment::lane();
    const DqParts last = {at.count - kAgo};
    if (at.count >= kAgo) hw::mbarrier_wait(smem.dq_empty[last.at()], last.parity());
#pragma unroll
    for (int n = 0; n < kDqCols / 8; ++n) {
        const float (&x)[4] = dq[0][n];
        mine[32 * n] = Four{{x[0], x[1], x[2], x[3]}};
    }
}

// Says that it is there.
__device__ __forceinline__ void tell_dq(Smem& smem, DqParts at) {
    hw::fence_proxy_async();
    arrive(smem.dq_full[at.at()]);
}

// Starts to add a part of dq to its sums, or to store it, if it is the first. One thread.
__device__ __forceinline__ void add_dq(const float* from, float* sums, int split, bool first) {
#pragma unroll 1
    for (int warp = 0; warp < kComputingWarps; ++warp) {
        const int col = warp / 4 * kDqShare + split * kDqCols;
        const int at_col = kByColumns ? col : 0, slab = kByColumns ? warp % 4 : warp;
        const int columns = min(kDqCols, plan::kDqDim - at_col);  // the others are padding
        if (columns <= 0) continue;
        const int bytes = 16 * columns * static_cast<int>(sizeof(float));
        float* const to = sums + dq_distance(slab, at_col / 8);
        if (first) {
            hw::bulk_store(to, from + warp * kDqNumbers, bytes);
        } else {
            hw::bulk_reduce_add(to, from + warp * kDqNumbers, bytes);
        }
    }
    hw::bulk_commit();
}

// Brings every other part of dq of a job to the sums, with kOrdered in the order of key tiles. One
// thread.
__device__ __forceinline__ void bring_dq(
    const Params& p, Smem& smem, const Job& job, DqParts& at, uint32 mine) {
    if (!p.dq.data) return;
    const Entry& entry = job.work.entry;
#pragma unroll 1
    for (Visit visit = Visit::first(job); visit.exists(job); visit.next(job)) {
#pragma unroll 1
        for (int split = 0; split < plan::kSplits; ++split, at.next()) {
            if (at.count % 2 != mine) continue;
            const Band band = Band::of(p, entry);
            const int32 earlier =
                job.work.tile -
                band.key_tiles(visit.tile * plan::kTileQ, plan::kTileQ, plan::kTileKv).first;
            const int32 before = plan::kOrdered ? earlier : min(earlier, 1);
            hw::semaphore_wait(dq_turn(p, entry, visit.head, visit.tile, split), before);
            hw::mbarrier_wait(smem.dq_full[at.at()], at.parity());
            const int stage = Stages{at.count / plan::kSplits}.at();
            const int64 slot = query_slot<plan::kTileQ>(p, entry, visit.head, visit.tile);
            add_dq(dq_place(smem, at, split), dq_of(p, slot), split, before == 0);
            hw::bulk_wait_read<0>();
            if (split > 0) {
#pragma unroll 1
                for (int i = 0; i < kComputingWarps; ++i) {  // for those who compute
                    hw::mbarrier_arrive(smem.q_empty[stage]);
                }
            }
            hw::mbarrier_arrive(smem.dq_empty[at.at()]);
            if (!plan::kOrdered && before > 0) continue;  // nobody waits for it
            hw::bulk_wait<0>();
            // The same, worked out anew: registers are few.
            hw::semaphore_add(dq_turn(p, entry, visit.head, hw::forget(visit.tile), split), 1);
        }
    }
}
