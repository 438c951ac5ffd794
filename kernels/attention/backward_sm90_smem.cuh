// SPDX-License-Identifier: Apache-2.0
// What a block of backward_sm90.cu has: its warpgroups and their shares, its jobs, and all that
// lies in shared memory. The barriers are explained there.
#pragma once
#include "hw/mbarrier.cuh"
#include "hw/sync.cuh"
#include "parts/mask.cuh"
#include "parts/pipeline.cuh"
#include "parts/row_stats.cuh"
#include "parts/swizzled.cuh"
#include "parts/work.cuh"

constexpr int kGroupThreads = 128, kGroupRows = 64;  // threads and keys of a warpgroup
constexpr int kRowGroups = plan::kTileKv / kGroupRows;
constexpr int kGroups = kRowGroups * plan::kColumnGroups;
constexpr int kComputingWarps = 4 * kGroups, kComputingThreads = kGroups * kGroupThreads;
constexpr int kQueries8 = plan::kTileQ / 8;                // columns of a fragment of scores
constexpr int kSteps = plan::kTileQ / 16;                  // of the sums over queries
constexpr int kCols = plan::kDim / plan::kColumnGroups;    // of a warpgroup's dk
constexpr int kColsV = plan::kDimV / plan::kColumnGroups;  // and dv
constexpr bool kByColumns = plan::kTileQ == kGroupRows;    // dq is shared out by columns, or rows
constexpr int kDqShare = kByColumns ? plan::kDim / kGroups : plan::kDim;  // of a warpgroup
constexpr int kDqCols = kDqShare / plan::kSplits;                         // at a time
constexpr int kDqNumbers = 16 * kDqCols;  // of a warp, close together also in workspace
static_assert(kByColumns || (plan::kTileQ == kGroups * kGroupRows && plan::kSplits == 1),
              "64 queries a warpgroup");
static_assert(plan::kSplits * plan::kDqPlaces <= 2, "each has a barrier of its own");
static_assert(plan::kThreads == kGroupThreads * (kGroups + 1), "the plan and the roles disagree");
static_assert(plan::kTurn == 1, "a turn with dq is a visit");

// Of a computing thread, and of the others: together no more than the block starts with.
constexpr int kRegisters = 240, kFewRegisters = 24;

using KeyTile = swizzled::Tile<plan::kTileKv, plan::kDim>;
using ValueTile = swizzled::Tile<plan::kTileKv, plan::kDimV>;
using QueryTile = swizzled::Tile<plan::kTileQ, plan::kDim>;
using DoutTile = swizzled::Tile<plan::kTileQ, plan::kDimV>;
using ScoreTile = swizzled::Tile<plan::kTileQ, plan::kTileKv>;
static_assert(kDqCols % QueryTile::kChunk == 0 && kColsV % DoutTile::kChunk == 0,
              "whole chunks of columns");

constexpr int kJobs = 2;        // that are known at most
constexpr int kJobReaders = 3;  // warps: see job_empty

// Infinities or NaN, where something is hidden: in K, in Q or dout.
constexpr int32 kOfKeys = 1, kOfQueries = 2;

// What a block does: some keys.
struct Job {
    SeenTiles tiles;  // of queries that see any of the keys, and all
    Work work;
    int32 head, heads;        // of queries: the first, and how many; 0: nobody sees the keys
    int32 key, row_q, batch;  // where boxes begin
    Ring<1> part;             // jobs before it that load keys
    int32 exists;             // 0: there is no more work
    int32 special;            // what of kOfKeys and kOfQueries was found
};

// A visit, for those who compute.
struct Step {
    int32 query, head;
};

struct Smem {
    KeyTile k;
    ValueTile v;
    QueryTile q[plan::kStages];
    DoutTile dout[plan::kDoutStages];
    ScoreTile ds[2];
    alignas(128) float dq[plan::kDqPlaces][kComputingWarps][kDqNumbers];
    alignas(16) RowStats rows[plan::kStages][plan::kTileQ];
    Job jobs[kJobs];
    Job job;  // of those who compute: a copy, since registers have no room for a changing address
    uint32 passed;  // how many they have begun
    Step steps[plan::kStages];
    uint32 suspects[2][kComputingWarps];  // visits that a warp suspects: see suspect()
    int32 again;                          // parity of again_full
    hw::MBarrier job_full[kJobs], job_empty[kJobs];
    hw::MBarrier k_full, k_empty, v_full, v_empty;
    hw::MBarrier q_full[plan::kStages], q_empty[plan::kStages];
    hw::MBarrier dout_full[plan::kDoutStages], dout_empty[plan::kDoutStages];
    hw::MBarrier dq_full[2], dq_empty[2];
    hw::MBarrier again_full;
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

using Slots = Ring<kJobs>;
using Stages = Ring<plan::kStages>;
using DoutStages = Ring<plan::kDoutStages>;
using DqParts = Ring<2>;  // of all visits: two have a barrier each to wait at

__device__ __forceinline__ uint32 thread_of_group() {
    return hw::forget(static_cast<uint32>(threadIdx.x)) % kGroupThreads;
}

// A barrier of all who compute.
__device__ __forceinline__ void sync_computing() { hw::named_barrier_sync(1, kComputingThreads); }

// Which keys and which columns a warpgroup has.
__device__ __forceinline__ int row_group(int group) {
    return plan::kColumnGroups > 1 ? group % kRowGroups : group;
}
__device__ __forceinline__ int column_group(int group) {
    return plan::kColumnGroups > 1 ? group / kRowGroups : 0;
}

// The first of the calling warp's keys in tiles.
__device__ __forceinline__ int row_of_warp(int group) {
    return row_group(group) * kGroupRows + static_cast<int>(thread_of_group() / 32 * 16);
}
