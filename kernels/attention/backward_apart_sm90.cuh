// SPDX-License-Identifier: Apache-2.0
// One gradient on Hopper, by TMA and wgmma, for float16 and bfloat16: the body of
// backward_dq_sm90.cu, backward_dk_sm90.cu and backward_dv_sm90.cu. Where heads are wide, no block
// has registers for more than one gradient of all columns. So each has a kernel of its own, which
// computes scores anew, eight products in all, but sums over no other block.
//
// A block stays on its multiprocessor and takes one job after the other. It owns kOwnRows rows of
// the gradient, 64 of them for each of kGroups warpgroups that compute, and walks the tiles of the
// other side. The operands:
//
//           own_x   own_y   x    y       S           dP           the gradient
//     dq    q       dout    k    v       own_x x^T   own_y y^T    dS x
//     dk    k       v       q    dout    own_x x^T   own_y y^T    dS x
//     dv    k               q    dout    own_x x^T                P y
//
// The warps of a further warpgroup have a role each:
//
//     load      own_x x0       x1        x2     ..
//     load      own_y y0       y1        y2     ..
//     look            x0       x1        x2     ..  infinite or NaN, where not all see? (dv: y)
//     compute   s0 dp0 | sums0 s1 dp1 | sums1 s2 dp2 | ..   dq and dk
//     compute   s0 | s1 sums0 | s2 sums1 | ..               dv
//
// Products between two bars are started together, and end in that order. The exponentials of s1 are
// computed while dp1 (dv: sums0) runs; only dS is computed while no product of the warpgroup does.
// Own rows of the next job come while the last sums of this one are finished and written.
//
// Barriers, and who arrives (lanes are one of a warp):
//   job_full[slot]    the one who leads
//   job_empty[slot]   lanes of all other warps
//   own_x_full, own_y_full   the loader, and the bytes
//   own_empty         lanes of the computing warps
//   x_full, y_full    the loader, and the bytes of a tile, with those of the row statistics for q
//   x_empty, y_empty  lanes of the computing warps; of the tiles that are summed also the one who
//                     looks
//   seen              the one who looks
//   special_added     lanes of the computing warps, and then
//   cleared           the one who looks: see add_special()
//
// Budget: a computing thread holds kDim / 2 (dv: kDimV / 2) sums, kPassing / 2 scores, as many
// gradients of weights, and kPassing / 4 rounded, of 240 registers.
#pragma once
#include "attention/params_tma.cuh"
#include "hw/mbarrier.cuh"
#include "hw/memory.cuh"
#include "hw/sync.cuh"
#include "parts/pipeline.cuh"
#include "parts/special.cuh"
#include "parts/swizzled.cuh"
#include "parts/weights.cuh"
#include "parts/work.cuh"

// The file that includes this one has said
//   kQueriesStay   a block owns queries, else keys
//   kOfWeights     the gradient is a sum of weights times y, else of gradients of scores times x
//   Own, Walked    the side that a block owns rows of, and the other one

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

// A tile that is walked. Heads come in order, and the tiles of each from the last to the first.
struct Visit {
    int32 head, tile;

    __device__ static __forceinline__ Visit first(const Job& job) {
        return {job.head, job.tiles.any.last - 1};
    }
    __device__ __forceinline__ bool exists(const Job& job) const {
        return head < job.head + job.heads;
    }
    __device__ __forceinline__ void next(const Job& job) {
        if (--tile >= job.tiles.any.first) return;
        tile = job.tiles.any.last - 1;
        ++head;
    }
};

__device__ __forceinline__ uint32 thread_of_group() {
    return hw::forget(static_cast<uint32>(threadIdx.x)) % kGroupThreads;
}

// --- Bringing tiles ------------------------------------------------------------------------------

// Starts to bring one kind of the block's own rows, once their place is free. One thread.
template <class Tile>
__device__ __forceinline__ void load_own(Tile* own,
                                         const hw::TensorMap& map,
                                         hw::MBarrier& full,
                                         hw::MBarrier& empty,
                                         const Job& job,
                                         Ring<1>& part) {
    hw::mbarrier_wait(empty, part.parity() ^ 1);
    part.next();
    hw::mbarrier_arrive_expect_tx(full, kGroups * Tile::kBytes);
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
        swizzled::load(own[group], map, full, job.own_row + group * kGroupRows, job.work.head,
                       job.batch);
    }
}

// Starts to bring a tile, and says how many bytes will come beside it. One thread.
template <class Tile>
__device__ __forceinline__ void load_tile(Tile& tile,
                                          const hw::TensorMap& map,
                                          hw::MBarrier& full,
                                          const Job& job,
                                          Visit visit,
                                          int more_bytes = 0) {
    hw::mbarrier_arrive_expect_tx(full, Tile::kBytes + more_bytes);
    swizzled::load(tile, map, full, job.row + visit.tile * kPassing, visit.head, job.batch);
}

// Brings all of x of a job; own rows second, since their place is free the last. One thread.
__device__ __forceinline__ void load_all_x(
    const TmaParams& p, Smem& smem, const Job& job, Stages& stage, Ring<1>& part) {
    constexpr int kRowBytes = kQueriesStay ? 0 : kPassing * static_cast<int>(sizeof(RowStats));
    bool begins = true;
#pragma unroll 1
    for (Visit visit = Visit::first(job); visit.exists(job); stage.next(), visit.next(job)) {
        const int at = stage.at();
        hw::mbarrier_wait(smem.x_empty[at], stage.parity() ^ 1);
        load_tile(smem.x[at], kQueriesStay ? p.k : p.q, smem.x_full[at], job, visit, kRowBytes);
        if (!kQueriesStay) {
            const int64 slot =
                query_slot<plan::kTileQ>(p.call, job.work.entry, visit.head, visit.tile);
            hw::bulk_load(smem.rows[at], row_stats(p.call, slot), kRowBytes, smem.x_full[at]);
        }
        if (begins) {
            load_own(smem.own_x, kQueriesStay ? p.q : p.k, smem.own_x_full, smem.own_empty, job,
                     part);
        }
        begins = false;
    }
}

// Brings all of y of a job. One thread.
__device__ __forceinline__ void load_all_y(
    const TmaParams& p, Smem& smem, const Job& job, StagesY& stage, Ring<1>& part) {
    bool begins = !kOfWeights;
#pragma unroll 1
    for (Visit visit = Visit::first(job); visit.exists(job); stage.next(), visit.next(job)) {
        const int at = stage.at();
        hw::mbarrier_wait(smem.y_empty[at], stage.parity() ^ 1);
        load_tile(smem.y[at], kQueriesStay ? p.v : p.o, smem.y_full[at], job, visit);
        if (begins) {
            load_own(own_y(smem), kQueriesStay ? p.o : p.v, smem.own_y_full, smem.own_empty, job,
                     part);
        }
        begins = false;
    }
}

// Says of each tile that is summed, and that something is hidden from, whether it has infinities or
// NaN. Those it makes 0, once all who compute have added them to their sums by themselves. A warp.
__device__ __forceinline__ void look_through(Smem& smem,
                                             const Job& job,
                                             SummedStages& stage,
                                             Ring<1>& added) {
    Visit visit = Visit::first(job);
#pragma unroll 1
    for (; visit.exists(job); stage.next(), visit.next(job)) {
        hw::mbarrier_wait(summed_full(smem, stage), stage.parity());
        auto& tile = summed(smem)[stage.at()];
        const bool found = job.tiles.hides(visit.tile) && swizzled::has_special(tile);
        if (fragment::lane() == 0) smem.special[stage.at()] = found ? 1 + added.parity() : 0;
        arrive(smem.seen[stage.at()]);
        if (found) {
            hw::mbarrier_wait(smem.special_added, added.parity());
            added.next();
            swizzled::remove_special<32>(tile, fragment::lane());
            arrive(smem.cleared);
        }
        arrive(summed_empty(smem, stage));
    }
}

// --- Computing -----------------------------------------------------------------------------------

// What a thread knows while it walks.
struct State {
    float sums[1][kCols / 8][4];
    uint32 factors[kSteps][4];  // of the last tile, a left operand
    RowStats own[2];            // of its rows, if they are queries
    float factor;               // of scores
    bool pending;               // factors have not met their tile yet
};

// What a computing thread has passed.
struct Passed {
    int group;
    uint32 tiles;
    Ring<1> part;

    __device__ __forceinline__ Stages x() const { return {tiles}; }
    __device__ __forceinline__ StagesY y() const { return {tiles}; }
    // Of the product that is pending, the last tile's.
    __device__ __forceinline__ SummedStages summed() const { return {tiles - 1}; }
};

// The first of the calling warp's rows.
__device__ __forceinline__ int32 row_of_warp(const Job& job) {
    const auto warp = static_cast<int>(hw::forget(static_cast<uint32>(threadIdx.x)) / 32) - 4;
    return job.work.tile * kOwnRows + warp * 16;
}

// Rows before their first tile.
__device__ __forceinline__ void start(const Params& p, State& state, const Job& job) {
    const Entry& entry = job.work.entry;
    state.factor = weights::factor_of(Scores::of(p, entry, 0));
    state.pending = false;
    fragment::clear(state.sums);
    if constexpr (kQueriesStay) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32 query = row_of_warp(job) + fragment::row_of(2 * r);
            state.own[r] = RowStats::none();
            if (query >= entry.seqlen_q || entry.slack) continue;
            const int64 slot =
                query_slot<plan::kTileQ>(p, entry, job.work.head, query / plan::kTileQ);
            state.own[r] = hw::load(row_stats(p, slot) + query % plan::kTileQ);
        }
    }
}

// Starts the product that is pending.
__device__ __forceinline__ void start_product(Smem& smem, State& state, SummedStages stage) {
    if (kOfWeights) hw::mbarrier_wait(summed_full(smem, stage), stage.parity());
    swizzled::start_x_b(state.sums, state.factors, summed(smem)[stage.at()], true);
}

// It is complete, once all groups of products are but so many.
template <int kUnfinished>
__device__ __forceinline__ void end_product(Smem& smem, State& state, SummedStages stage) {
    hw::wgmma_wait<kUnfinished>();
    hw::pin(swizzled::listed(state.sums));
    arrive(summed_empty(smem, stage));
    state.pending = false;
}

// Completes it.
__device__ __forceinline__ void finish(Smem& smem, State& state, const Passed& at) {
    if (!state.pending) return;
    start_product(smem, state, at.summed());
    end_product<0>(smem, state, at.summed());
}

// Waits for a phase that is known to be complete: the compiler moves no arithmetic across the
// branch, and so the exponentials in front of it do not end up behind the wait for a product.
__device__ __forceinline__ void hold(hw::MBarrier& complete, int parity) {
    hw::mbarrier_wait(complete, parity);
}

// One turn of the main loop: a tile. kAdds: the product with the tile before is pending.
template <bool kHides, bool kAdds>
__device__ __forceinline__ void turn(
    const Params& p, Smem& smem, const Job& job, State& state, Passed& at, int32 tile) {
    const Stages x = at.x();
    const StagesY y = at.y();
    const SummedStages before = at.summed();
    ++at.tiles;
    const int group = hw::forget(at.group);  // or descriptors of all own columns take registers
    const RowStats* const columns = kQueriesStay ? nullptr : smem.rows[x.at()];
    float s[1][kPassing8][4];
    const auto hide = [&](float hidden) {
        if (!kHides) return;
        const Scores score = Scores::of(p, job.work.entry, 0);
        weights::hide<kQueriesStay>(s, score, row_of_warp(job), tile * kPassing, hidden);
    };
    if constexpr (kOfWeights) {
        hw::mbarrier_wait(smem.x_full[x.at()], x.parity());
        swizzled::start_a_bt(s, smem.own_x[group], 0, smem.x[x.at()]);
        if (kAdds) start_product(smem, state, before);
        hw::wgmma_wait<kAdds ? 1 : 0>();
        hw::pin(swizzled::listed(s));
        weights::of_products<kQueriesStay>(s, state.factor, state.own, columns);
        hide(0.0f);
        hw::pin(swizzled::listed(s));
        hold(smem.x_full[x.at()], x.parity());
        arrive(smem.x_empty[x.at()]);
        if (kAdds) end_product<0>(smem, state, before);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) fragment::left(state.factors[j], s[0], j);
    } else {
        float dp[1][kPassing8][4];
        if (kAdds) start_product(smem, state, before);
        hw::mbarrier_wait(smem.x_full[x.at()], x.parity());
        swizzled::start_a_bt(s, smem.own_x[group], 0, smem.x[x.at()]);
        hw::mbarrier_wait(smem.y_full[y.at()], y.parity());
        swizzled::start_a_bt(dp, own_y(smem)[group], 0, smem.y[y.at()]);
        if (kAdds) end_product<2>(smem, state, before);
        hw::wgmma_wait<1>();
        hw::pin(swizzled::listed(s));
        weights::of_products<kQueriesStay>(s, state.factor, state.own, columns);
        hide(weights::kHidden);
        hw::pin(swizzled::listed(s));
        hold(smem.y_full[y.at()], y.parity());
        hw::wgmma_wait<0>();
        hw::pin(swizzled::listed(dp));
        arrive(smem.y_empty[y.at()]);
        weights::gradients<kQueriesStay, kHides>(dp, s, state.own, columns);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) fragment::left(state.factors[j], dp[0], j);
    }
    state.pending = true;
}

// What was found in a tile is added to sums, or nothing sees it; waits until it is 0.
__device__ __forceinline__ void await_cleared(Smem& smem, int found) {
    arrive(smem.special_added);
    hw::mbarrier_wait(smem.cleared, found - 1);
}

// If the tile that is pending has infinities or NaN, which not all see: adds them to the sums of
// those who do, and waits until they are 0.
__device__ __forceinline__ void add_special(
    const Params& p, Smem& smem, const Job& job, State& state, const Passed& at, int32 tile) {
    const SummedStages stage = at.summed();
    // The one who looks may be a tile of this stage behind, until this one is there.
    hw::mbarrier_wait(summed_full(smem, stage), stage.parity());
    hw::mbarrier_wait(smem.seen[stage.at()], stage.parity());
    const int found = uniform(smem.special[stage.at()]);
    if (!found) return;
    const Scores score = Scores::of(p, job.work.entry, 0);
    const int32 row = row_of_warp(job);
    special::add<kOfWeights>(state.sums, summed(smem)[stage.at()], [&](int, int i, int k) {
        const int32 own = row + fragment::row_of(i), other = tile * kPassing + k;
        return kQueriesStay ? score.visible(own, other) : score.visible(other, own);
    });
    await_cleared(smem, found);
}

// A tile that the warpgroup sees nothing of, though others do.
__device__ __forceinline__ void pass(
    Smem& smem, const Job& job, State& state, Passed& at, int32 tile) {
    finish(smem, state, at);
    const Stages x = at.x();
    const StagesY y = at.y();
    ++at.tiles;
    hw::mbarrier_wait(smem.x_full[x.at()], x.parity());
    hw::mbarrier_wait(smem.y_full[y.at()], y.parity());
    if (uniform(job.tiles.hides(tile))) {
        const SummedStages stage = at.summed();
        hw::mbarrier_wait(smem.seen[stage.at()], stage.parity());
        const int found = uniform(smem.special[stage.at()]);
        if (found) await_cleared(smem, found);
    }
    arrive(smem.x_empty[x.at()]);
    arrive(smem.y_empty[y.at()]);
}

// Rounds a warp's sums and writes them.
__device__ __forceinline__ void write_results(const Params& p, const State& state, const Job& job) {
    const Entry& entry = job.work.entry;
    const float factor = kOfWeights ? 1.0f : static_cast<float>(p.scale);
    const int32 head = job.work.head;
    const Matrix to = kQueriesStay ? query_matrix(p.dq, entry, head, p.head_dim)
                      : kOfWeights ? key_matrix(p.dv, entry, head, p.head_dim_v)
                                   : key_matrix(p.dk, entry, head, p.head_dim);
    fragment::write_rows(to, state.sums, factor, row_of_warp(job));
}

__device__ __forceinline__ void compute(const Params& p, Smem& smem, const Job& job, Passed& at) {
    State state;
    start(p, state, job);
    const SeenTiles own = job.tiles_of_group[at.group];
    const int32 heads = uniform(job.heads);
    // The tiles of the block, and those of the group among them: it sees nothing of the others.
    const int32 first = uniform(job.tiles.any.first), last = uniform(job.tiles.any.last);
    const int32 own_first = uniform(max(own.any.first, first));
    const int32 own_last = uniform(max(own.any.last, first));
    // Of these nothing is hidden from the group, nor from others of the block.
    const TileRange plain = {uniform(max(job.tiles.all.first, own.all.first)),
                             uniform(min(job.tiles.all.last, own.all.last))};
    if (heads > 0) {
        hw::mbarrier_wait(smem.own_x_full, at.part.parity());
        if (!kOfWeights) hw::mbarrier_wait(smem.own_y_full, at.part.parity());
        at.part.next();
    }
#pragma unroll 1
    for (int32 head = 0; head < heads; ++head) {
        int32 tile = last;
#pragma unroll 1
        for (; tile > own_last; --tile) pass(smem, job, state, at, tile - 1);
        while (tile > own_first) {
            --tile;
            if (!state.pending) {
                turn<true, false>(p, smem, job, state, at, tile);
            } else if (!plain.holds(tile)) {
                turn<true, true>(p, smem, job, state, at, tile);
            } else {
#pragma unroll 1
                for (;; --tile) {
                    turn<false, true>(p, smem, job, state, at, tile);
                    if (tile <= plain.first) break;
                }
            }
            if (uniform(job.tiles.hides(tile))) add_special(p, smem, job, state, at, tile);
        }
#pragma unroll 1
        for (; tile > first; --tile) pass(smem, job, state, at, tile - 1);
    }
    if (heads > 0) arrive(smem.own_empty);
    finish(smem, state, at);
    write_results(p, state, job);
}

// --- Parts ---------------------------------------------------------------------------------------

// Of rows [row, row + rows) that a block owns.
__device__ __forceinline__ SeenTiles seen_tiles(const Scores& score, int32 row, int32 rows) {
    if constexpr (kQueriesStay) {
        return {score.band.key_tiles(row, rows, kPassing),
                score.plain_key_tiles(row, rows, kPassing)};
    } else {
        return {score.band.query_tiles(row, rows, kPassing),
                score.plain_query_tiles(row, rows, kPassing)};
    }
}

// Which part is done as the one of this index: as in forward_sm90.cu.
__device__ __forceinline__ int64 part_at(const Params& p, int64 index) {
    constexpr int kRowBytes = (plan::kDim + plan::kDimV) * static_cast<int>(sizeof(Element));
    const bool even = p.window_left == kOpen && p.window_right == kOpen;
    const int32 walked = kQueriesStay ? 1 : p.heads_q / p.heads_kv;  // heads of a part
    const int64 heads = max(heads_in<Walked>(p, plan::kCacheBytes, walked * kRowBytes),
                            int64{plan::kHeadsTogether});
    return interleaved<Own, kOwnRows>(p, index, even ? 1 : heads);
}

// Notes what a job has. One thread.
__device__ __forceinline__ void note(const Params& p, const Work& work, bool exists, Job& job) {
    const Scores score = Scores::of(p, work.entry, 0);
    const int32 row = work.tile * kOwnRows, group = p.heads_q / p.heads_kv;
    job.work = work;
    job.exists = exists;
    job.tiles = seen_tiles(score, row, kOwnRows);
#pragma unroll 1
    for (int i = 0; i < kGroups; ++i) {
        job.tiles_of_group[i] = seen_tiles(score, row + i * kGroupRows, kGroupRows);
    }
    job.head = kQueriesStay ? work.head / group : work.head * group;
    job.heads = kQueriesStay ? 1 : group;
    if (job.tiles.any.first >= job.tiles.any.last) job.heads = 0;
    job.own_row = (kQueriesStay ? work.entry.first_q : work.entry.first_kv) + row;
    job.row = kQueriesStay ? work.entry.first_kv : work.entry.first_q;
    job.batch = p.cu_seqlens_q.at ? 0 : static_cast<int32>(work.entry.batch);
}

// Puts one job after the other into the slots, and loads x. A warp.
__device__ __forceinline__ void lead(const TmaParams& maps, Smem& smem) {
    const Params& p = maps.call;
    const int64 parts = work_parts<Own, kOwnRows>(p);
    Slots slot;
    Stages stage;
    Ring<1> part;
    int64 index = blockIdx.x;
    for (;; slot.next()) {
        // Before a ticket is drawn, where lanes meet: one that came to look later might find a slot
        // that has been filled and emptied again.
        hw::mbarrier_wait(smem.job_empty[slot.at()], slot.parity() ^ 1);
        Work work = {slack(Own(), 0, 0), 0, 0};
        bool exists = false;
        while (!exists && index < parts) {
            exists = work_at<Own, kOwnRows>(p, part_at(p, index), work);
            index = draw(p, parts);
        }
        Job& job = smem.jobs[slot.at()];
        if (threadIdx.x == 0) {
            note(p, work, exists, job);
            hw::mbarrier_arrive(smem.job_full[slot.at()]);
            if (exists) load_all_x(maps, smem, job, stage, part);
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

__device__ __forceinline__ void run(const TmaParams& p) {
    Smem& smem = hw::shared_memory<Smem>();
    if (threadIdx.x == 0) {
        hw::prefetch(p.q);
        hw::prefetch(p.k);
        hw::prefetch(p.v);
        hw::prefetch(p.o);
        for (int i = 0; i < kJobs; ++i) {
            hw::mbarrier_init(smem.job_full[i], 1);
            hw::mbarrier_init(smem.job_empty[i], kComputingWarps + 2);
        }
        hw::mbarrier_init(smem.own_empty, kComputingWarps);
        hw::mbarrier_init(smem.own_x_full, 1);
        hw::mbarrier_init(smem.own_y_full, 1);
        for (int i = 0; i < plan::kStages; ++i) {
            hw::mbarrier_init(smem.x_full[i], 1);
            hw::mbarrier_init(smem.x_empty[i], kComputingWarps + (kOfWeights ? 0 : 1));
        }
        for (int i = 0; i < plan::kStagesY; ++i) {
            hw::mbarrier_init(smem.y_full[i], 1);
            hw::mbarrier_init(smem.y_empty[i], kComputingWarps + (kOfWeights ? 1 : 0));
        }
        for (int i = 0; i < kSummedStages; ++i) hw::mbarrier_init(smem.seen[i], 1);
        hw::mbarrier_init(smem.special_added, kComputingWarps);
        hw::mbarrier_init(smem.cleared, 1);
        hw::fence_mbarrier_init();
    }
    __syncthreads();
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (warp >= 4) {
        if constexpr (kGroups > 1) hw::registers_increase<kRegisters>();
        Passed at = {warp / 4 - 1, 0, {}};
        follow(smem, [&](const Job& job) { compute(p.call, smem, job, at); });
        return;
    }
    if constexpr (kGroups > 1) hw::registers_decrease<kFewRegisters>();
    if (warp == 0) {
        lead(p, smem);
    } else if (warp == 1) {
        StagesY stage;
        Ring<1> part;
        follow(smem, [&](const Job& job) {
            if (hw::elect_one()) load_all_y(p, smem, job, stage, part);
        });
    } else if (warp == 2) {
        SummedStages stage;
        Ring<1> added;
        follow(smem, [&](const Job& job) { look_through(smem, job, stage, added); });
    }
}
