// SPDX-License-Identifier: Apache-2.0
// What a block of forward_sm90.cu has: its warpgroups, its tiles and jobs, and all that lies in
// shared memory. The barriers are explained there.
#pragma once
#include "hw/mbarrier.cuh"
#include "hw/sync.cuh"
#include "parts/fragment.cuh"
#include "parts/mask.cuh"
#include "parts/pipeline.cuh"
#include "parts/swizzled.cuh"
#include "parts/work.cuh"

constexpr int kGroupThreads = 128, kGroupRows = 64;  // threads and queries of a warpgroup
constexpr int kGroups = plan::kTileQ / kGroupRows;
constexpr int kComputingWarps = 4 * kGroups;
constexpr int kKeys8 = plan::kTileKv / 8;   // columns of a fragment of scores
constexpr int kCols8 = plan::kDimV / 8;     // and of results
constexpr int kSteps = plan::kTileKv / 16;  // of the sum over keys
constexpr int kJobs = 4;                    // that are known at most: kSlots + 2
constexpr bool kFlat = plan::kSlots > 1;    // a job's end overlaps with the next one's begin
constexpr bool kReadsPairs = (plan::kBias || plan::kMask) && kGroups > 1;  // has registers for it
constexpr bool kInTurns = kGroups > 2;  // else they find their order by themselves
static_assert(plan::kThreads == kGroupThreads * (kGroups + 1), "the plan and the roles disagree");

// Of a computing thread, and of the others: together no more than the block starts with. One group
// has enough from the start.
constexpr int kRegisters = kGroups == 2 ? 232 : kGroups == 3 ? 160 : 112;
constexpr int kFewRegisters = kGroups == 2 ? 40 : 32;

using QueryTile = swizzled::Tile<plan::kTileQ, plan::kDim>;
using KeyTile = swizzled::Tile<plan::kTileKv, plan::kDim>;
using ValueTile = swizzled::Tile<plan::kTileKv, plan::kDimV>;
using OutTile = swizzled::Tile<kGroupRows, plan::kDimV>;
using OutChunk = swizzled::Tile<kGroupRows, OutTile::kChunk>;

// There is no more work; a job; one whose results were spoilt; nothing, but more may come.
constexpr int32 kEnd = 0, kOnce = 1, kAgain = 2, kPause = 3;

// What a block does: some queries.
struct Job {
    SeenTiles keys, keys_of_group[kGroups];
    Work work;
    int32 kind;
    int32 head_kv, row, batch;  // where boxes begin, of keys
};

// What results of a warpgroup go through on their way out: a tile, or, where that has no room, two
// chunks in turn.
template <bool kRoom>
struct Way {
    OutTile tile;
};
template <>
struct Way<false> {
    OutChunk chunks[2];
};

struct Smem {
    QueryTile q[plan::kSlots];
    Way<kFlat> ways[kGroups];
    KeyTile k[plan::kStages];
    ValueTile v[plan::kStages];
    Job jobs[kJobs];
    int32 special[plan::kStages];  // found in V: 1 and the parity of v_cleared to wait for, else 0
    int32 spoilt[kJobs][kComputingWarps];  // results of a warp
    hw::MBarrier job_full[kJobs], job_empty[kJobs];
    hw::MBarrier q_full[plan::kSlots], q_empty[plan::kSlots];
    hw::MBarrier k_full[plan::kStages], k_empty[plan::kStages];
    hw::MBarrier v_full[plan::kStages], v_seen[plan::kStages], v_empty[plan::kStages];
    hw::MBarrier special_added, v_cleared;
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

using Slots = Ring<kJobs>;
using Places = Ring<plan::kSlots>;  // of the queries of a job, which has the same number in both
using Stages = Ring<plan::kStages>;

// Makes the barriers, and notes that no results are spoilt. A warp.
__device__ __forceinline__ void prepare(Smem& smem) {
    static_assert(kJobs <= 32 && plan::kSlots <= 32 && plan::kStages <= 32, "a lane each");
    const int lane = fragment::lane();
    if (lane < kJobs) {
        hw::mbarrier_init(smem.job_full[lane], 1);
        hw::mbarrier_init(smem.job_empty[lane], kComputingWarps + 3);
        for (int32& results : smem.spoilt[lane]) results = 0;
    }
    if (lane < plan::kSlots) {
        hw::mbarrier_init(smem.q_full[lane], 1);
        hw::mbarrier_init(smem.q_empty[lane], kComputingWarps);
    }
    if (lane < plan::kStages) {
        hw::mbarrier_init(smem.k_full[lane], 1);
        hw::mbarrier_init(smem.k_empty[lane], kComputingWarps);
        hw::mbarrier_init(smem.v_full[lane], 1);
        hw::mbarrier_init(smem.v_seen[lane], 1);
        hw::mbarrier_init(smem.v_empty[lane], kComputingWarps + 1);
    }
    if (lane == 0) {
        hw::mbarrier_init(smem.special_added, kComputingWarps);
        hw::mbarrier_init(smem.v_cleared, 1);
    }
    hw::fence_mbarrier_init();
}

// Waits until there are barriers. All warps.
__device__ __forceinline__ void await_prepared() {
    hw::named_barrier_sync(2 * kGroups + 1, plan::kThreads);
}

__device__ __forceinline__ SeenTiles uniform(const SeenTiles& tiles) {
    return {{uniform(tiles.any.first), uniform(tiles.any.last)},
            {uniform(tiles.all.first), uniform(tiles.all.last)}};
}

__device__ __forceinline__ bool hides_any(const SeenTiles& tiles) {
    return tiles.all.last - tiles.all.first < tiles.any.last - tiles.any.first;
}
