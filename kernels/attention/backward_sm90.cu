// SPDX-License-Identifier: Apache-2.0
// The gradients on Hopper, by TMA and wgmma, for float16 and bfloat16. What it computes, and in
// which order dq is summed up, is in backward_mma.cu.
//
// A block stays on its multiprocessor and takes one job after the other: kTileKv keys of one key
// head. It walks the query heads of the group and their query tiles. Scores are transposed: rows
// are keys. A warpgroup that computes has 64 keys; where heads are wide, kColumnGroups of them have
// the same keys and compute the same scores, but have a share of the columns of dk and dv each.
// The warps of a further warpgroup have a role each: one takes jobs and loads, one looks through K,
// Q and dout, and two bring dq to its sums, each every other part of it, when it is the job's turn.
//
//     load      q0 k dout0 v   q1 dout1           ..  | q0 k dout0 v ..      as places are free
//     look         k q0 dout0     q1 dout1        ..  | k q0 ..              infinite or NaN?
//     compute      s = k q^T, dp = v dout^T | p, ds | dv += p dout, dq = ds^T k, dk += ds q | ..
//     (dq)                                     wait for the turn, add dq, end the turn
//
// p and ds are left operands in registers; ds also goes through shared memory, where all
// warpgroups find it for dq. Of dq a warpgroup has 64 queries, or, where a tile has no more, a
// share of the columns, in kSplits parts one after the other. dk and dv are written from registers,
// while the tiles of the next job come.
//
// Turns. The part of dq that a job has for a query tile waits for those of all earlier key tiles of
// the head. These jobs have lower indices, and an index is a ticket, from a block's first job on:
// whoever has one runs already, and takes his jobs in the order of their indices. So of all jobs
// that are not finished, the one with the lowest index waits for nobody, whatever order blocks
// start in and however few of them run. That a block draws its next ticket early changes nothing:
// it finishes the job it has without waiting for later ones. Without kOrdered only the first key
// tile of a query tile, which stores its part, has a turn; all others wait for that one.
//
// Barriers, and who arrives (lanes are one of a warp):
//   job_full[slot]    the one who takes jobs
//   job_empty[slot]   lanes of the one who looks, of the two who bring dq, once its turns are over,
//                     and of the first computing warp, once it has copied the job: see begin()
//   k_full, v_full    the loader, and the bytes
//   k_empty, v_empty  lanes of the computing warps; of K also the one who looks
//   q_full, dout_full the loader, and the bytes, with those of the row statistics for q
//   seen              the one who looks: at this visit's tiles, and before them at the job's keys
//   q_empty, dout_empty   lanes of the computing warps, and the one who looks
//   dq_full[i]        lanes of the computing warps: every other part of dq is in shared memory
//   dq_empty[i]       the one who brings it to the sums, once he has read it; a second part goes
//                     through the place of Q, and of that he tells q_empty too
//   again_full        bytes that are loaded a second time: see clear() and add_special()
//   and a named barrier of all who compute: ds is written
//
// Budget: a computing thread holds (kDim + kDimV) / 2 / kColumnGroups sums, kTileQ scores and their
// gradients, and kTileQ / 2 of them rounded.
#include "attention/params_tma.cuh"
#include "hw/mbarrier.cuh"
#include "hw/memory.cuh"
#include "hw/reduce.cuh"
#include "hw/semaphore.cuh"
#include "hw/sync.cuh"
#include "parts/gradient_mma.cuh"
#include "parts/pair_blocks.cuh"
#include "parts/pipeline.cuh"
#include "parts/special.cuh"
#include "parts/swizzled.cuh"
#include "parts/transposed.cuh"
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
constexpr int kJobReaders = 4;  // warps: see job_empty

// Infinities or NaN, where something is hidden: in K, in Q or dout.
constexpr int32 kOfKeys = 1, kOfQueries = 2;

// What a block does: some keys.
struct Job {
    SeenTiles queries;  // that see any of the keys, and all
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
    int32 special[plan::kStages];  // what was found, where something is hidden
    int32 again;                   // parity of again_full
    hw::MBarrier job_full[kJobs], job_empty[kJobs];
    hw::MBarrier k_full, k_empty, v_full, v_empty;
    hw::MBarrier q_full[plan::kStages], q_empty[plan::kStages];
    hw::MBarrier dout_full[plan::kDoutStages], dout_empty[plan::kDoutStages];
    hw::MBarrier seen[plan::kStages];
    hw::MBarrier dq_full[2], dq_empty[2];
    hw::MBarrier again_full;
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

using Slots = Ring<kJobs>;
using Stages = Ring<plan::kStages>;
using DoutStages = Ring<plan::kDoutStages>;
using DqParts = Ring<2>;  // of all visits: two have a barrier each to wait at

// One turn of the main loop: a query tile of one query head of the group. Heads come in order, and
// the queries of each from the last to the first.
struct Visit {
    int32 head, tile;

    __device__ static __forceinline__ Visit first(const Job& job) {
        return {job.head, job.queries.any.last - 1};
    }
    __device__ __forceinline__ bool exists(const Job& job) const {
        return head < job.head + job.heads;
    }
    __device__ __forceinline__ void next(const Job& job) {
        if (--tile >= job.queries.any.first) return;
        tile = job.queries.any.last - 1;
        ++head;
    }
    __device__ __forceinline__ bool hides(const Job& job) const { return job.queries.hides(tile); }
};

__device__ __forceinline__ bool hides_any(const Job& job) {
    const TileRange any = job.queries.any, all = job.queries.all;
    return all.last - all.first < any.last - any.first;
}

__device__ __forceinline__ uint32 thread_of_group() {
    return hw::forget(static_cast<uint32>(threadIdx.x)) % kGroupThreads;
}

// A barrier of all who compute.
__device__ __forceinline__ void sync_computing() { hw::named_barrier_sync(1, kComputingThreads); }

// --- Roles ---------------------------------------------------------------------------------------

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

// Says whether K, and tiles of Q and dout that something is hidden from, have infinities or NaN.
__device__ __forceinline__ void look_through(Smem& smem, const Job& job, Stages& stage) {
    int32 keys = 0;
    if (job.heads > 0) {
        hw::mbarrier_wait(smem.k_full, job.part.parity());
        if (hides_any(job) && swizzled::has_special(smem.k)) keys = kOfKeys;
        arrive(smem.k_empty);
    }
#pragma unroll 1
    for (Visit visit = Visit::first(job); visit.exists(job); stage.next(), visit.next(job)) {
        const int at = stage.at();
        const DoutStages dout = {stage.count};
        hw::mbarrier_wait(smem.q_full[at], stage.parity());
        hw::mbarrier_wait(smem.dout_full[dout.at()], dout.parity());
        if (visit.hides(job)) {
            const bool found =
                swizzled::has_special(smem.q[at]) | swizzled::has_special(smem.dout[dout.at()]);
            if (fragment::lane() == 0) smem.special[at] = keys | (found ? kOfQueries : 0);
        }
        arrive(smem.seen[at]);
        arrive(smem.q_empty[at]);
        arrive(smem.dout_empty[dout.at()]);
    }
}

// Where a part of dq of a visit lies in shared memory, each warp's numbers close together: the
// second where Q was.
__device__ __forceinline__ float* dq_place(Smem& smem, DqParts at, int split) {
    static_assert(plan::kSplits == 1 || sizeof(QueryTile) == sizeof(smem.dq), "room for a part");
    if (split == 0) return smem.dq[plan::kDqPlaces > 1 ? at.at() : 0][0];
    return reinterpret_cast<float*>(&smem.q[Stages{at.count / plan::kSplits}.at()]);
}

// Starts to add a part of dq of a visit to the sums of its query tile; the first key tile writes
// it.
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

// --- Computing -----------------------------------------------------------------------------------

struct Sums {
    float dk[1][kCols / 8][4];
    float dv[1][kColsV / 8][4];
};

// What a computing thread has passed.
struct Passed {
    int group;
    Stages stage;
};

// A part of dq of the visit at a stage.
__device__ __forceinline__ DqParts dq_part(Stages stage, int split) {
    return {stage.count * plan::kSplits + split};
}

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
    return plan::kSplits == 1 && !job.special && job.queries.hides(job.queries.any.first);
}

// Where a warp holds what bias and mask have for a visit: where it will put ds itself. Of warps
// with the same keys each puts its share of the blocks; the same of the visit before has been read,
// so that there is room for as many blocks again.
struct PlaceOfPairs {
    Smem& smem;
    uint32 visit;
    int group;

    __device__ __forceinline__ Element* at(uint32 block, uint32 row, uint32 piece) const {
        constexpr uint32 kSharers = plan::kColumnGroups;
        ScoreTile& tile = smem.ds[(visit + block % kSharers) % 2];
        return tile.piece(16 * (block / kSharers * kSharers + column_group(group)) + row,
                          row_of_warp(group) + 8 * piece);
    }
};
using HeldPairs = pair_blocks::Blocks<plan::kTileQ, PlaceOfPairs>;

// Is it looked up who is seen before dP is begun? Behind it is better, if there are registers.
constexpr bool kLooksEarly = plan::kTileQ > kGroupRows;

static_assert(plan::kColumnGroups == 1 || plan::kSplits > 1,
              "all have read ds of the visit before at the end of a visit: see turn()");

// A warp's scores at a visit, and its first query and key.
struct VisitedPairs {
    Scores score;
    int32 query, key;
};
__device__ __forceinline__ VisitedPairs pairs_at(const Params& p,
                                                 const Smem& smem,
                                                 Stages stage,
                                                 int row) {
    const Step& step = smem.steps[stage.at()];
    const int32 query = step.query, key = smem.job.work.tile * plan::kTileKv + row;
    return {Scores::of(p, smem.job.work.entry, step.head), query, key};
}

template <bool kPlain>
__device__ __forceinline__ void turn(
    const TmaParams& maps, Smem& smem, Sums& sums, Passed& at, bool last = false) {
    const Params& p = maps.call;
    Job& job = smem.job;
    const Stages stage = at.stage;
    at.stage.next();
    const int group = hw::forget(at.group);  // or operands' descriptors take registers
    QueryTile& q = smem.q[stage.at()];
    const DoutStages dout_stage = {stage.count};
    DoutTile& dout = smem.dout[dout_stage.at()];
    ScoreTile& tile = smem.ds[stage.count % 2];

    float s[1][kQueries8][4], dp[1][kQueries8][4];
    hw::mbarrier_wait(smem.q_full[stage.at()], stage.parity());
    swizzled::start_a_bt(s, smem.k, row_group(group) * kGroupRows, q);
    HeldPairs held = {{smem, stage.count, group}};
    if constexpr (plan::kMask) {
        if (!kPlain) {
            const VisitedPairs x = pairs_at(p, smem, stage, row_of_warp(group));
            held.bring_mask(x.score, x.query, x.key);
        }
    }
    const auto look = [&] {
        if constexpr (!kPlain && HeldPairs::kPairs) {
            const VisitedPairs x = pairs_at(p, smem, stage, row_of_warp(group));
            held.look(x.score, x.query, x.key);
            held.bring_bias(x.score, x.query, x.key);
        }
    };
    hw::mbarrier_wait(smem.dout_full[dout_stage.at()], dout_stage.parity());
    if (kLooksEarly) look();
    swizzled::start_a_bt(dp, smem.v, row_group(group) * kGroupRows, dout);
    if (!kLooksEarly) look();
    hw::wgmma_wait<0>();
    hw::pin(swizzled::listed(s));
    hw::pin(swizzled::listed(dp));

    const int row = row_of_warp(group);
    const VisitedPairs x = pairs_at(p, smem, stage, row);
    transposed::soften<kPlain>(s, x.score);
    if (!kPlain) transposed::hide(s, held, x.score, x.query, x.key);
    transposed::gradients<kPlain>(s, dp, smem.rows[stage.at()], held, x.score, x.query, x.key);
    uint32 weights[kSteps][4], ds[kSteps][4];
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
        fragment::left(weights[j], s[0], j);
        fragment::left(ds[j], dp[0], j);
        if (plan::kColumnGroups > 1 && j % plan::kColumnGroups != column_group(group)) continue;
        swizzled::put_transposed(tile, ds[j], 16 * j, row);
    }
    if (kPlain) swizzled::start_x_b(sums.dv, weights, dout, true, column_group(group) * kColsV);
    hw::fence_proxy_async();
    sync_computing();
    if (!kPlain) {
        hw::mbarrier_wait(smem.seen[stage.at()], stage.parity());
        const int32 found = uniform(smem.special[stage.at()]);
        if (found & kOfQueries) {
            clear(q);
            clear(dout);
        }
        if (found & kOfKeys) clear(smem.k);
        if (found) {
            if (threadIdx.x == kGroupThreads) job.special |= found;
            hw::fence_proxy_async();
            sync_computing();
        }
        swizzled::start_x_b(sums.dv, weights, dout, true, column_group(group) * kColsV);
    }
    float dq[1][kDqCols / 8][4];
    const auto start_dq = [&](int split) {
        swizzled::start_a_b(dq, tile, kByColumns ? 0 : group * kGroupRows, smem.k,
                            kByColumns ? group * kDqShare + split * kDqCols : 0);
    };
    start_dq(0);
    hw::wgmma_wait<1>();
    hw::pin(swizzled::listed(sums.dv));
    arrive(smem.dout_empty[dout_stage.at()]);
    swizzled::start_x_b(sums.dk, ds, q, true, column_group(group) * kCols);
    hw::wgmma_wait<1>();
    hw::pin(swizzled::listed(dq));
    if (!kPlain && last && uniform(releases_early(job))) release_keys(smem);
    if (p.dq.data) put_dq(smem, dq, group, dq_part(stage, 0), 0);
    if constexpr (plan::kSplits > 1) {
        if (p.dq.data) tell_dq(smem, dq_part(stage, 0));
        start_dq(1);
    }
    hw::wgmma_wait<0>();
    hw::pin(swizzled::listed(sums.dk));
    if constexpr (plan::kSplits > 1) {
        hw::pin(swizzled::listed(dq));
        if (p.dq.data) {
            sync_computing();  // nobody needs these queries any more
            put_dq(smem, dq, group, dq_part(stage, 1), 1);
        } else if (plan::kBias) {
            sync_computing();  // nor this ds: see PlaceOfPairs
        }
    }
    if (p.dq.data) tell_dq(smem, dq_part(stage, plan::kSplits - 1));
    if (plan::kSplits == 1 || !p.dq.data) arrive(smem.q_empty[stage.at()]);
    if (!kPlain && job.special & kOfKeys) load_keys_again(maps, smem);
}

// Rounds a warp's sums and writes them.
template <int kCols8>
__device__ __forceinline__ void write(
    Matrix to, const float (&sums)[1][kCols8][4], float factor, int32 key, int group) {
    const int32 col = column_group(group) * 8 * kCols8;
    to.data += col * to.stride_col;
    to.cols -= col;
    fragment::write_rows(to, sums, factor, key + row_of_warp(group));
}

__device__ __forceinline__ void write_results(const Params& p,
                                              const Job& job,
                                              const Sums& sums,
                                              int group) {
    if (!p.dk.data) return;
    const Entry& entry = job.work.entry;
    const int32 head = job.work.head, key = job.work.tile * plan::kTileKv;
    const Scores score = Scores::of(p, entry, 0);
    write(key_matrix(p.dk, entry, head, p.head_dim), sums.dk, score.scale, key, group);
    write(key_matrix(p.dv, entry, head, p.head_dim_v), sums.dv, score.kept_factor(), key, group);
}

// Adds what is special in Q, dout and K, in query tiles from which something is hidden, to the
// results: see special.cuh. Q and dout come through the place of V, which no product needs any
// more; theirs have tiles of the next job.
__device__ __forceinline__ void add_special(const TmaParams& maps, Smem& smem, int group) {
    static_assert(sizeof(QueryTile) <= sizeof(ValueTile) && sizeof(DoutTile) <= sizeof(ValueTile),
                  "room for a tile");
    const Params& p = maps.call;
    const Job& job = smem.job;
    const Entry& entry = job.work.entry;
    const Matrix dk = key_matrix(p.dk, entry, job.work.head, p.head_dim);
    const Matrix dv = key_matrix(p.dv, entry, job.work.head, p.head_dim_v);
    const int32 first_key = job.work.tile * plan::kTileKv;
    const int32 key = first_key + row_of_warp(group);
    const int warp = static_cast<int>(threadIdx.x) / 32 - 4;
    QueryTile& q = reinterpret_cast<QueryTile&>(smem.v);
    DoutTile& dout = reinterpret_cast<DoutTile&>(smem.v);
    load_keys_again(maps, smem);
#pragma unroll 1
    for (Visit visit = Visit::first(job); visit.exists(job); visit.next(job)) {
        if (!visit.hides(job)) continue;
        const int32 query = visit.tile * plan::kTileQ;
        const Scores score = Scores::of(p, entry, visit.head);
        const auto sees = [&](int i, int k) {
            return score.visible(query + k, key + fragment::row_of(i));
        };
        load_again(smem, q, [&](QueryTile& to, hw::MBarrier& full) {
            load_queries(maps.q, to, full, job, visit);
        });
#pragma unroll 1
        for (int i = 0; p.dk.data && i < kCols; i += 16) {
            const int col = column_group(group) * kCols + i;
            special::add<false>(dk, key, col, q, col, sees);
        }
        load_again(smem, dout, [&](DoutTile& to, hw::MBarrier& full) {
            load_queries(maps.o, to, full, job, visit);
        });
#pragma unroll 1
        for (int i = 0; p.dk.data && i < kColsV; i += 16) {
            const int col = column_group(group) * kColsV + i;
            special::add<true>(dv, key, col, dout, col, sees);
        }
        if (!p.dq.data) continue;
        const int64 slot = query_slot<plan::kTileQ>(p, entry, visit.head, visit.tile);
        const int32 first = score.band.key_tiles(query, plan::kTileQ, plan::kTileKv).first;
        // Behind the job's own turn, or the first one's, which writes.
        for (int split = 0; split < plan::kSplits; ++split) {
            hw::semaphore_wait(dq_turn(p, entry, visit.head, visit.tile, split),
                               plan::kOrdered ? job.work.tile - first + 1 : 1);
        }
#pragma unroll 1
        for (int slab = 0; slab < plan::kTileQ / 16; ++slab) {
#pragma unroll 1
            for (int col = 16 * warp; col < plan::kDqDim; col += 16 * kComputingWarps) {
                float x[2][4];
                special::sums<false>(x, smem.k, col, [&](int i, int k) {
                    return score.visible(query + 16 * slab + fragment::row_of(i), first_key + k);
                });
                hw::reduce_add(dq_sums(p, slot, slab, col / 8), x[0]);
                hw::reduce_add(dq_sums(p, slot, slab, col / 8 + 1), x[1]);
            }
        }
    }
}

// One job.
__device__ __forceinline__ void compute(const TmaParams& p, Smem& smem, Passed& at) {
    const Job& job = smem.job;
    Sums sums;
    fragment::clear(sums.dk);
    fragment::clear(sums.dv);
    const int32 heads = uniform(job.heads);
    if (heads > 0) {
        const int parity = job.part.parity();
        hw::mbarrier_wait(smem.k_full, parity);
        hw::mbarrier_wait(smem.v_full, parity);
    }
    for (int32 head = 0; head < heads; ++head) {
        const int32 first = uniform(job.queries.any.first);
        for (int32 tile = uniform(job.queries.any.last); tile > first;) {
            if (HeldPairs::kPairs || uniform(job.queries.hides(tile - 1))) {
                --tile;
                turn<false>(p, smem, sums, at, head == heads - 1 && tile == first);
            } else {
                const int32 stop = uniform(max(first, job.queries.all.first));
#pragma unroll 1
                for (; tile > stop; --tile) turn<true>(p, smem, sums, at);
            }
        }
    }
    const int32 special = uniform(job.special);
    if (heads > 0 && !special && !uniform(releases_early(job))) release_keys(smem);
    write_results(p.call, job, sums, at.group);
    if (special) {
        add_special(p, smem, at.group);
        hw::fence_proxy_async();
        release_keys(smem);
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
        if (fragment::lane() == 0) {
            smem.job = smem.jobs[slot.at()];
            smem.passed = slot.count + 1;
        }
        arrive(smem.job_empty[slot.at()]);
    }
    sync_computing();
    return uniform(smem.job.exists);
}

// --- Parts ---------------------------------------------------------------------------------------

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
    job.queries = {score.band.query_tiles(key, plan::kTileKv, plan::kTileQ),
                   score.plain_query_tiles(key, plan::kTileKv, plan::kTileQ)};
    if (HeldPairs::kPairs) job.queries.all = {0, 0};  // there is no code for plain tiles
    job.head = work.head * group;
    job.heads = job.queries.any.first < job.queries.any.last ? group : 0;
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

// What the other warps do in each job.
template <class Role>
__device__ __forceinline__ void follow(Smem& smem, Role role) {
    for (Slots slot;; slot.next()) {
        hw::mbarrier_wait(smem.job_full[slot.at()], slot.parity());
        const Job& job = smem.jobs[slot.at()];
        if (!uniform(job.exists)) return;
        role(job);
        arrive(smem.job_empty[slot.at()]);
    }
}

extern "C" __global__ void __launch_bounds__(plan::kThreads, 1)
    backward_sm90(const __grid_constant__ TmaParams p) {
    Smem& smem = hw::shared_memory<Smem>();
    if (threadIdx.x == 0) {
        hw::prefetch(p.q);
        hw::prefetch(p.k);
        hw::prefetch(p.v);
        hw::prefetch(p.o);
        smem.again = smem.passed = 0;
        for (int i = 0; i < kJobs; ++i) {
            hw::mbarrier_init(smem.job_full[i], 1);
            hw::mbarrier_init(smem.job_empty[i], kJobReaders);
        }
        hw::mbarrier_init(smem.k_full, 1);
        hw::mbarrier_init(smem.k_empty, kComputingWarps + 1);
        hw::mbarrier_init(smem.v_full, 1);
        hw::mbarrier_init(smem.v_empty, kComputingWarps);
        for (int i = 0; i < plan::kStages; ++i) {
            hw::mbarrier_init(smem.q_full[i], 1);
            hw::mbarrier_init(smem.q_empty[i], kComputingWarps + 1);
            hw::mbarrier_init(smem.seen[i], 1);
        }
        for (int i = 0; i < plan::kDoutStages; ++i) {
            hw::mbarrier_init(smem.dout_full[i], 1);
            hw::mbarrier_init(smem.dout_empty[i], kComputingWarps + 1);
        }
        for (int i = 0; i < 2; ++i) {
            hw::mbarrier_init(smem.dq_full[i], kComputingWarps);
            hw::mbarrier_init(smem.dq_empty[i], 1);
        }
        hw::mbarrier_init(smem.again_full, 1);
        hw::fence_mbarrier_init();
    }
    __syncthreads();
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (warp >= 4) {
        if constexpr (kGroups > 1) hw::registers_increase<kRegisters>();
        Passed at = {warp / 4 - 1};
        while (begin(smem)) compute(p, smem, at);
        return;
    }
    if constexpr (kGroups > 1) hw::registers_decrease<kFewRegisters>();
    if (warp == 0) {
        lead(p, smem);
    } else if (warp == 1) {
        Stages stage;
        follow(smem, [&](const Job& job) { look_through(smem, job, stage); });
    } else {
        DqParts at;
        follow(smem, [&](const Job& job) {
            if (hw::elect_one()) bring_dq(p.call, smem, job, at, static_cast<uint32>(warp - 2));
        });
    }
}
