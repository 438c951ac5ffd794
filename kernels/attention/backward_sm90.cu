// SPDX-License-Identifier: Apache-2.0
// The gradients on Hopper, by TMA and wgmma, for float16 and bfloat16. What it computes, and in
// which order dq is summed up, is in backward_mma.cu.
//
// A block owns kTileKv keys of one key head, and walks the query heads of the group and their query
// tiles. Scores are transposed: rows are keys. A warpgroup that computes has 64 keys; where heads
// are wide, kColumnGroups of them have the same keys and compute the same scores, but have a share
// of the columns of dk and dv each.
// The warps of a further warpgroup have a role each: one loads, one looks through Q and dout, and
// two bring dq to its sums, each every other part of it, when it is the block's turn.
//
//     load      k q0 v dout0   q1 dout1                       ..
//     look         q0 dout0       q1 dout1                     infinite or NaN, where not all see?
//     compute      s = k q^T, dp = v dout^T | p, ds | dv += p dout, dq = ds^T k, dk += ds q | ..
//     (dq)                                     wait for the turn, add dq, end the turn
//
// p and ds are left operands in registers; ds also goes through shared memory, where all
// warpgroups find it for dq. Of dq a warpgroup has 64 queries, or, where a tile has no more, a
// share of the columns, in kSplits parts one after the other.
//
// Barriers, and who arrives (lanes are one of a warp):
//   k_full, v_full    the loader, and the bytes; for each part
//   k_seen            the one who looks
//   q_full, dout_full the loader, and the bytes, with those of the row statistics for q
//   seen              the one who looks
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

// What a block does. Thread 0 writes it.
struct Notes {
    Work work;
    TileRange queries, plain;          // tiles that see any of the keys, and all
    int32 group, visits;               // query heads, and how often a query tile of one is visited
    int32 head_kv, row, row_q, batch;  // where boxes begin
    int32 any;                         // 0: nothing to do; -1: no more parts
    int32 special_k;                   // K has infinities or NaN, and some pairs are hidden
    int32 special;                     // so have K, Q or dout

    // Is anything hidden from a query tile?
    __device__ __forceinline__ bool hides(int32 tile) const { return !plain.holds(tile); }
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
    Notes notes;
    Step steps[plan::kStages];
    int32 special[plan::kStages];  // found in Q or dout
    int32 again;                   // parity of again_full
    hw::MBarrier k_full, v_full, k_seen;
    hw::MBarrier q_full[plan::kStages], q_empty[plan::kStages];
    hw::MBarrier dout_full[plan::kDoutStages], dout_empty[plan::kDoutStages];
    hw::MBarrier seen[plan::kStages];
    hw::MBarrier dq_full[2], dq_empty[2];
    hw::MBarrier again_full;
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

using Stages = Ring<plan::kStages>;
using DoutStages = Ring<plan::kDoutStages>;
using DqParts = Ring<2>;  // of all visits: two have a barrier each to wait at

// One turn of the main loop: a query tile of one query head of the group. Heads come in order, and
// the queries of each from the last to the first.
struct Visit {
    int32 head, tile;

    __device__ static __forceinline__ Visit first(const Notes& notes) {
        const int32 head = notes.work.head + (notes.visits > 0 ? 0 : 1);
        return {head * notes.group, notes.queries.last - 1};
    }
    __device__ __forceinline__ bool exists(const Notes& notes) const {
        return head < (notes.work.head + 1) * notes.group;
    }
    __device__ __forceinline__ void next(const Notes& notes) {
        if (--tile >= notes.queries.first) return;
        tile = notes.queries.last - 1;
        ++head;
    }
    __device__ __forceinline__ bool hides(const Notes& notes) const { return notes.hides(tile); }
};

__device__ __forceinline__ bool hides_any(const Notes& notes) {
    return notes.plain.last - notes.plain.first < notes.queries.last - notes.queries.first;
}

__device__ __forceinline__ uint32 thread_of_group() {
    return hw::forget(static_cast<uint32>(threadIdx.x)) % kGroupThreads;
}

// A barrier of all roles, between parts.
__device__ __forceinline__ void sync_block() { hw::named_barrier_sync(2, plan::kThreads); }

// A barrier of all who compute.
__device__ __forceinline__ void sync_computing() { hw::named_barrier_sync(1, kComputingThreads); }

// --- Roles ---------------------------------------------------------------------------------------

__device__ __forceinline__ void load_query_tile(
    const TmaParams& p, QueryTile& to, hw::MBarrier& full, const Notes& notes, Visit visit) {
    swizzled::load(to, p.q, full, notes.row_q + visit.tile * plan::kTileQ, visit.head, notes.batch);
}
__device__ __forceinline__ void load_dout_tile(
    const TmaParams& p, DoutTile& to, hw::MBarrier& full, const Notes& notes, Visit visit) {
    swizzled::load(to, p.o, full, notes.row_q + visit.tile * plan::kTileQ, visit.head, notes.batch);
}

// Brings all tiles of a part. One thread.
__device__ __forceinline__ void load_all(const TmaParams& p, Smem& smem, Stages& stage) {
    const Notes& notes = smem.notes;
    const int32 key = notes.row + notes.work.tile * plan::kTileKv;
    Visit visit = Visit::first(notes);
    if (notes.visits > 0) {
        hw::mbarrier_arrive_expect_tx(smem.k_full, KeyTile::kBytes);
        swizzled::load(smem.k, p.k, smem.k_full, key, notes.head_kv, notes.batch);
    }
    bool begins = true;
#pragma unroll 1
    for (; visit.exists(notes); stage.next(), visit.next(notes)) {
        const int at = stage.at();
        constexpr int kRowBytes = plan::kTileQ * static_cast<int>(sizeof(RowStats));
        const int64 slot =
            query_slot<plan::kTileQ>(p.call, notes.work.entry, visit.head, visit.tile);
        hw::mbarrier_wait(smem.q_empty[at], stage.parity() ^ 1);
        smem.steps[at] = {visit.tile * plan::kTileQ, visit.head};
        hw::mbarrier_arrive_expect_tx(smem.q_full[at], QueryTile::kBytes + kRowBytes);
        load_query_tile(p, smem.q[at], smem.q_full[at], notes, visit);
        hw::bulk_load(smem.rows[at], row_stats(p.call, slot), kRowBytes, smem.q_full[at]);
        if (begins) {
            hw::mbarrier_arrive_expect_tx(smem.v_full, ValueTile::kBytes);
            swizzled::load(smem.v, p.v, smem.v_full, key, notes.head_kv, notes.batch);
            begins = false;
        }
        const DoutStages dout = {stage.count};
        hw::MBarrier& full = smem.dout_full[dout.at()];
        hw::mbarrier_wait(smem.dout_empty[dout.at()], dout.parity() ^ 1);
        hw::mbarrier_arrive_expect_tx(full, DoutTile::kBytes);
        load_dout_tile(p, smem.dout[dout.at()], full, notes, visit);
    }
}

// Says whether K, and tiles of Q and dout that something is hidden from, have infinities or NaN.
__device__ __forceinline__ void look_through(Smem& smem, Stages& stage, Ring<1>& part) {
    Notes& notes = smem.notes;
    if (notes.visits > 0) {
        hw::mbarrier_wait(smem.k_full, part.parity());
        part.next();
        const bool found = hides_any(notes) && swizzled::has_special(smem.k);
        if (fragment::lane() == 0) notes.special_k = notes.special = found;
        arrive(smem.k_seen);
    }
    Visit visit = Visit::first(notes);
#pragma unroll 1
    for (; visit.exists(notes); stage.next(), visit.next(notes)) {
        const int at = stage.at();
        const DoutStages dout = {stage.count};
        hw::mbarrier_wait(smem.q_full[at], stage.parity());
        hw::mbarrier_wait(smem.dout_full[dout.at()], dout.parity());
        if (visit.hides(notes)) {
            const bool found =
                swizzled::has_special(smem.q[at]) | swizzled::has_special(smem.dout[dout.at()]);
            if (fragment::lane() == 0) smem.special[at] = found;
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

// Brings every other part of dq of all visits to the sums, in the order of key tiles. One thread.
__device__ __forceinline__ void bring_dq(const Params& p, Smem& smem, DqParts& at, uint32 mine) {
    const Notes& notes = smem.notes;
    if (!p.dq.data) return;
    const Entry& entry = notes.work.entry;
    Visit visit = Visit::first(notes);
#pragma unroll 1
    for (; visit.exists(notes); visit.next(notes)) {
#pragma unroll 1
        for (int split = 0; split < plan::kSplits; ++split, at.next()) {
            if (at.count % 2 != mine) continue;
            const Band band = Band::of(p, entry);
            const int32 before =
                notes.work.tile -
                band.key_tiles(visit.tile * plan::kTileQ, plan::kTileQ, plan::kTileKv).first;
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
    Ring<1> part;
    DqParts dq;
};

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
__device__ __forceinline__ void put_dq(Smem& smem,
                                       const float (&dq)[1][kDqCols / 8][4],
                                       const Passed& at,
                                       int split) {
    constexpr uint32 kAgo = plan::kSplits * plan::kDqPlaces;
    using Four = hw::Vec<float, 4>;
    const int warp = 4 * at.group + static_cast<int>(thread_of_group() / 32);
    float* const place = dq_place(smem, at.dq, split) + warp * kDqNumbers;
    Four* const mine = reinterpret_cast<Four*>(place) + fragment::lane();
    const DqParts last = {at.dq.count - kAgo};
    if (at.dq.count >= kAgo) {
        hw::mbarrier_wait(smem.dq_empty[last.at()], last.parity());
    }
#pragma unroll
    for (int n = 0; n < kDqCols / 8; ++n) {
        const float (&x)[4] = dq[0][n];
        mine[32 * n] = Four{{x[0], x[1], x[2], x[3]}};
    }
}

// Says that it is there.
__device__ __forceinline__ void tell_dq(Smem& smem, Passed& at) {
    hw::fence_proxy_async();
    arrive(smem.dq_full[at.dq.at()]);
    at.dq.next();
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
    const Notes& notes = smem.notes;
    load_again(smem, smem.k, [&](KeyTile& to, hw::MBarrier& full) {
        swizzled::load(to, p.k, full, notes.row + notes.work.tile * plan::kTileKv, notes.head_kv,
                       notes.batch);
    });
}

template <bool kPlain>
__device__ __forceinline__ void turn(const TmaParams& maps, Smem& smem, Sums& sums, Passed& at) {
    const Params& p = maps.call;
    const Notes& notes = smem.notes;
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
    hw::mbarrier_wait(smem.dout_full[dout_stage.at()], dout_stage.parity());
    swizzled::start_a_bt(dp, smem.v, row_group(group) * kGroupRows, dout);
    hw::wgmma_wait<0>();
    hw::pin(swizzled::listed(s));
    hw::pin(swizzled::listed(dp));

    const int row = row_of_warp(group);
    const Step& step = smem.steps[stage.at()];
    const int32 query = step.query, key = notes.work.tile * plan::kTileKv + row;
    const Scores score = Scores::of(p, notes.work.entry, step.head);
    if (!kPlain) transposed::hide(s, score, query, key);
    transposed::gradients<kPlain>(s, dp, smem.rows[stage.at()], score, query, key);
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
        const bool special = uniform(smem.special[stage.at()]);
        if (special) {
            clear(q);
            clear(dout);
            if (threadIdx.x == kGroupThreads) smem.notes.special = 1;
        }
        if (notes.special_k) clear(smem.k);
        if (special || notes.special_k) {
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
    if (p.dq.data) put_dq(smem, dq, at, 0);
    if constexpr (plan::kSplits > 1) {
        if (p.dq.data) tell_dq(smem, at);
        start_dq(1);
    }
    hw::wgmma_wait<0>();
    hw::pin(swizzled::listed(sums.dk));
    if constexpr (plan::kSplits > 1) {
        hw::pin(swizzled::listed(dq));
        if (p.dq.data) {
            sync_computing();  // nobody needs these queries any more
            put_dq(smem, dq, at, 1);
        }
    }
    if (p.dq.data) tell_dq(smem, at);
    if (plan::kSplits == 1 || !p.dq.data) arrive(smem.q_empty[stage.at()]);
    if (!kPlain && notes.special_k) load_keys_again(maps, smem);
}

// Rounds a warpgroup's sums and writes them, through the place of its keys or values.
template <int kCols8, class Place>
__device__ __forceinline__ void write(Matrix to,
                                      const float (&sums)[1][kCols8][4],
                                      float factor,
                                      Place& place,
                                      int32 first_key,
                                      int group) {
    using OutTile = swizzled::Tile<kGroupRows, 8 * kCols8>;
    static_assert(sizeof(Place) == kGroups * sizeof(OutTile), "a place for each warpgroup");
    OutTile& tile = reinterpret_cast<OutTile*>(&place)[group];
    const int row = static_cast<int>(thread_of_group() / 32 * 16);
    const int32 col = column_group(group) * 8 * kCols8;
    to.data += col * to.stride_col;
    to.cols -= col;
    swizzled::put<0, kCols8>(tile, sums, {factor, factor}, row);
    __syncwarp();
    swizzled::write(to, first_key + row_group(group) * kGroupRows + row, tile, row);
}

__device__ __forceinline__ void write_results(const Params& p,
                                              Smem& smem,
                                              const Sums& sums,
                                              int group) {
    if (!p.dk.data) return;
    const Notes& notes = smem.notes;
    const Entry& entry = notes.work.entry;
    const int32 head = notes.work.head, key = notes.work.tile * plan::kTileKv;
    const Scores score = Scores::of(p, entry, 0);
    write(key_matrix(p.dk, entry, head, p.head_dim), sums.dk, score.scale, smem.k, key, group);
    write(key_matrix(p.dv, entry, head, p.head_dim_v), sums.dv, score.kept_factor(), smem.v, key,
          group);
}

// Adds what is special in Q, dout and K, in query tiles from which something is hidden, to the
// results: see special.cuh.
__device__ __forceinline__ void add_special(const TmaParams& maps, Smem& smem, const Passed& at) {
    const Params& p = maps.call;
    const int group = at.group;
    const Notes& notes = smem.notes;
    const Entry& entry = notes.work.entry;
    const Matrix dk = key_matrix(p.dk, entry, notes.work.head, p.head_dim);
    const Matrix dv = key_matrix(p.dv, entry, notes.work.head, p.head_dim_v);
    const int32 first_key = notes.work.tile * plan::kTileKv;
    const int32 key = first_key + row_of_warp(group);
    const int warp = static_cast<int>(threadIdx.x) / 32 - 4;
    // dq of the last visit may still leave the place that queries are loaded to.
    const Stages last = {(at.stage.count - 1) / plan::kStages * plan::kStages};
    hw::mbarrier_wait(smem.q_empty[0], last.parity());
    load_keys_again(maps, smem);
    Visit visit = Visit::first(notes);
#pragma unroll 1
    for (; visit.exists(notes); visit.next(notes)) {
        if (!visit.hides(notes)) continue;
        const int32 query = visit.tile * plan::kTileQ;
        const Scores score = Scores::of(p, entry, visit.head);
        load_again(smem, smem.q[0], [&](QueryTile& to, hw::MBarrier& full) {
            load_query_tile(maps, to, full, notes, visit);
        });
        load_again(smem, smem.dout[0], [&](DoutTile& to, hw::MBarrier& full) {
            load_dout_tile(maps, to, full, notes, visit);
        });
        const auto sees = [&](int i, int k) {
            return score.visible(query + k, key + fragment::row_of(i));
        };
#pragma unroll 1
        for (int i = 0; p.dk.data && i < kCols; i += 16) {
            const int col = column_group(group) * kCols + i;
            special::add<false>(dk, key, col, smem.q[0], col, sees);
        }
#pragma unroll 1
        for (int i = 0; p.dk.data && i < kColsV; i += 16) {
            const int col = column_group(group) * kColsV + i;
            special::add<true>(dv, key, col, smem.dout[0], col, sees);
        }
        if (!p.dq.data) continue;
        const int64 slot = query_slot<plan::kTileQ>(p, entry, visit.head, visit.tile);
        const int32 first = score.band.key_tiles(query, plan::kTileQ, plan::kTileKv).first;
        // Behind the block's own turn: the first one writes.
        for (int split = 0; split < plan::kSplits; ++split) {
            hw::semaphore_wait(dq_turn(p, entry, visit.head, visit.tile, split),
                               notes.work.tile - first + 1);
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

__device__ __forceinline__ void compute(const TmaParams& p, Smem& smem, Passed& at) {
    const Notes& notes = smem.notes;
    Sums sums;
    fragment::clear(sums.dk);
    fragment::clear(sums.dv);
    if (notes.visits > 0) {
        hw::mbarrier_wait(smem.k_full, at.part.parity());
        hw::mbarrier_wait(smem.v_full, at.part.parity());
        hw::mbarrier_wait(smem.k_seen, at.part.parity());
        at.part.next();
    }
    const int32 heads = uniform(notes.visits > 0 ? notes.group : 0);
    for (int32 head = 0; head < heads; ++head) {
        const int32 first = uniform(notes.queries.first);
        for (int32 tile = uniform(notes.queries.last); tile > first;) {
            if (uniform(notes.hides(tile - 1))) {
                turn<false>(p, smem, sums, at);
                --tile;
            } else {
                const int32 stop = uniform(max(first, notes.plain.first));
#pragma unroll 1
                for (; tile > stop; --tile) turn<true>(p, smem, sums, at);
            }
        }
    }
    sync_computing();  // no product reads keys or values any more
    write_results(p.call, smem, sums, at.group);
    if (uniform(notes.special)) add_special(p, smem, at);
    hw::fence_proxy_async();
}

// --- Parts ---------------------------------------------------------------------------------------

// Of so many heads blocks are launched tile by tile. Blocks of one head wait for one another, but
// q, dout and the sums of dq, which go around the longest, are to stay in an L2 cache. Without a
// band blocks of a head soon do not wait any more.
__device__ __forceinline__ int64 heads_together(const Params& p) {
    constexpr int kRowBytes = (plan::kDim + plan::kDimV) * static_cast<int>(sizeof(Element)) +
                              plan::kDqDim * static_cast<int>(sizeof(float));
    const bool even = p.window_left == kOpen && p.window_right == kOpen;
    return max(heads_in<Queries>(p, plan::kCacheBytes, kRowBytes),
               int64{even ? 2 : plan::kHeadsTogether});
}

// Thread 0 says what there is to do. All lanes of its warp.
__device__ __forceinline__ void take_notes(const Params& p, int64 index, Notes& notes) {
    const int64 part = interleaved<Keys, plan::kTileKv>(p, index, heads_together(p));
    Work work = {slack(Keys(), 0, 0), 0, 0};
    const bool any = work_at<Keys, plan::kTileKv>(p, part, work);
    if (threadIdx.x != 0) return;
    const Scores score = Scores::of(p, work.entry, 0);
    const int32 key = work.tile * plan::kTileKv;
    notes.work = work;
    notes.queries = score.band.query_tiles(key, plan::kTileKv, plan::kTileQ);
    notes.plain = score.plain_query_tiles(key, plan::kTileKv, plan::kTileQ);
    notes.group = p.heads_q / p.heads_kv;
    notes.visits = any ? notes.group * (notes.queries.last - notes.queries.first) : 0;
    notes.head_kv = work.head;
    notes.row = work.entry.first_kv;
    notes.row_q = work.entry.first_q;
    notes.batch = p.cu_seqlens_q.at ? 0 : static_cast<int32>(work.entry.batch);
    notes.any = any;
    notes.special_k = notes.special = 0;
}

// Warp 0 takes notes of all parts of the block, and loads what they need.
__device__ __forceinline__ void lead(const TmaParams& p, Smem& smem) {
    const int64 parts = work_parts<Keys, plan::kTileKv>(p.call);
    Stages stage;
    for (int64 index = blockIdx.x; index < parts; index += gridDim.x) {
        take_notes(p.call, index, smem.notes);
        sync_block();
        if (threadIdx.x == 0) load_all(p, smem, stage);
        __syncwarp();
        sync_block();
    }
    if (threadIdx.x == 0) smem.notes.any = -1;
    sync_block();
}

// What the other warps do in each part.
template <class Role>
__device__ __forceinline__ void follow(const Smem& smem, Role role) {
    for (;;) {
        sync_block();
        const int32 any = uniform(smem.notes.any);
        if (any < 0) return;
        if (any) role();
        __syncwarp();
        sync_block();
    }
}

extern "C" __global__ void __launch_bounds__(plan::kThreads, 1)
    backward_sm90(const __grid_constant__ TmaParams p) {
    Smem& smem = hw::shared_memory<Smem>();
    if (threadIdx.x == 0) {
        smem.again = 0;
        hw::mbarrier_init(smem.k_full, 1);
        hw::mbarrier_init(smem.v_full, 1);
        hw::mbarrier_init(smem.k_seen, 1);
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
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (warp >= 4) {
        if constexpr (kGroups > 1) hw::registers_increase<kRegisters>();
        Passed at = {warp / 4 - 1};
        follow(smem, [&] { compute(p, smem, at); });
        return;
    }
    if constexpr (kGroups > 1) hw::registers_decrease<kFewRegisters>();
    if (warp == 0) {
        lead(p, smem);
    } else if (warp == 1) {
        Stages stage;
        Ring<1> part;
        follow(smem, [&] { look_through(smem, stage, part); });
    } else {
        DqParts at;
        follow(smem, [&] {
            if (hw::elect_one()) bring_dq(p.call, smem, at, static_cast<uint32>(warp - 2));
        });
    }
}
