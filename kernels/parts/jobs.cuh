// SPDX-License-Identifier: Apache-2.0
// How warps of a block that takes job after job go through them: a job comes through one of a few
// slots of shared memory, and its tiles come as visits. A Job says in `exists` whether there is
// one, in `head` and `heads` whose tiles it walks, and in `tiles` (SeenTiles) which of them.
#pragma once
#include "hw/mbarrier.cuh"
#include "parts/mask.cuh"
#include "parts/pipeline.cuh"

// One turn of the main loop: a tile of one of the heads. Heads come in order, and the tiles of each
// from the last to the first.
struct Visit {
    int32 head, tile;

    template <class Job>
    __device__ static __forceinline__ Visit first(const Job& job) {
        return {job.head, job.tiles.any.last - 1};
    }
    template <class Job>
    __device__ __forceinline__ bool exists(const Job& job) const {
        return head < job.head + job.heads;
    }
    template <class Job>
    __device__ __forceinline__ void next(const Job& job) {
        if (--tile >= job.tiles.any.first) return;
        tile = job.tiles.any.last - 1;
        ++head;
    }
    template <class Job>
    __device__ __forceinline__ bool hides(const Job& job) const {
        return job.tiles.hides(tile);
    }
};

// What the other warps do in each job that one warp has put into the slots.
template <class Slots, class Smem, class Role>
__device__ __forceinline__ void follow(Smem& smem, Role role) {
    for (Slots slot;; slot.next()) {
        hw::mbarrier_wait(smem.job_full[slot.at()], slot.parity());
        const auto& job = smem.jobs[slot.at()];
        if (!uniform(job.exists)) return;
        role(job);
        arrive(smem.job_empty[slot.at()]);
    }
}
