// SPDX-License-Identifier: Apache-2.0
// What a block of backward_apart_sm90.cuh has: its warpgroups, its jobs, and all that lies in
// shared memory. The barriers, and kQueriesStay and kOfWeights, are explained there.
#pragma once
#include "hw/mbarrier.cuh"
#include "parts/mask.cuh"
#include "parts/pipeline.cuh"
#include "parts/row_stats.cuh"
#include "parts/swizzled.cuh"
#include "parts/work.cuh"

constexpr int kGroupThreads = 128, kGroupRows = 64;  // threads and own rows of a warpgroup
constexpr int kGroups = plan::kGroups;
constexpr int kOwnRows = kGroups * kGroupRows;
constexpr int kPassing = kQueriesStay ? plan::kTileKv : plan::kTileQ;  // rows of a tile
constexpr int kComputingWarps = 4 * kGroups;
constexpr int kPassing8 = kPassing / 8;                       // columns of scores
constexpr int kCols = kOfWeights ? plan::kDimV : plan::kDim;  // of the gradient
constexpr int kSteps = kPassing / 16;                         // of the sums
constexpr int kJobs = 2;                                      // that are known at most
constexpr int kSummedStages = kOfWeights ? plan::kStagesY : plan::kStages;
static_assert((kQueriesStay ? plan::kTileQ : plan::kTileKv) == kGroupRows, "64 rows a warpgroup");
static_assert(plan::kThreads == kGroupThreads * (kGroups + 1), "the plan and the roles disagree");
static_assert(kOfWeights || plan::kStages > 1, "a tile is summed while the next one is multiplied");

// Of a computing thread, and of the others: together no more than the block starts with.
constexpr int kRegisters = kGroups == 2 ? 240 : 160;
constexpr int kFewRegisters = kGroups == 2 ? 24 : 32;

using OwnX = swizzled::Tile<kGroupRows, plan::kDim>;
using OwnY = swizzled::Tile<kGroupRows, plan::kDimV>;
using X = swizzled::Tile<kPassing, plan::kDim>;
using Y = swizzled::Tile<kPassing, plan::kDimV>;

// What a block does: some rows.
struct Job {
    SeenTiles tiles, tiles_of_group[kGroups];
    Work work;
    int32 head, heads;          // that are walked: the first, and how many; 0: there are no tiles
    int32 own_row, row, batch;  // where boxes begin
    int32 exists;               // 0: there is no more work
};

template <bool kHasY>
struct OwnSecond {
    OwnY own_y[kGroups];
};
template <>
struct OwnSecond<false> {};

struct Smem : OwnSecond<!kOfWeights> {
    OwnX own_x[kGroups];
    X x[plan::kStages];
    Y y[plan::kStagesY];
    alignas(16) RowStats rows[kQueriesStay ? 1 : plan::kStages][kQueriesStay ? 2 : kPassing];
    Job jobs[kJobs];
    int32 special[kSummedStages];  // as in forward_sm90.cu, of tiles that are summed
    hw::MBarrier job_full[kJobs], job_empty[kJobs];
    hw::MBarrier own_x_full, own_y_full, own_empty;
    hw::MBarrier x_full[plan::kStages], x_empty[plan::kStages];
    hw::MBarrier y_full[plan::kStagesY], y_empty[plan::kStagesY];
    hw::MBarrier seen[kSummedStages];
    hw::MBarrier special_added, cleared;
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

using Slots = Ring<kJobs>;
using Stages = Ring<plan::kStages>;
using StagesY = Ring<plan::kStagesY>;
using SummedStages = Ring<kSummedStages>;

// The own rows of y, if there are any.
template <class Smem>
__device__ __forceinline__ OwnY* own_y(Smem& smem) {
    if constexpr (kOfWeights) {
        return nullptr;
    } else {
        return smem.own_y;
    }
}

// The tiles that are summed, and their barriers.
__device__ __forceinline__ auto& summed(Smem& smem) {
    if constexpr (kOfWeights) {
        return smem.y;
    } else {
        return smem.x;
    }
}
__device__ __forceinline__ hw::MBarrier& summed_full(Smem& smem, SummedStages stage) {
    return kOfWeights ? smem.y_full[stage.at()] : smem.x_full[stage.at()];
}
__device__ __forceinline__ hw::MBarrier& summed_empty(Smem& smem, SummedStages stage) {
    return kOfWeights ? smem.y_empty[stage.at()] : smem.x_empty[stage.at()];
}
