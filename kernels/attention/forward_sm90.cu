// SPDX-License-Identifier: Apache-2.0
// Attention forward on Hopper, by TMA and wgmma, for float16 and bfloat16. What it computes is in
// forward_simt.cu.
//
// A block stays on its multiprocessor and takes one job after the other: kTileQ queries of a head,
// 64 of them for each of kGroups warpgroups that compute. The warps of a further warpgroup have a
// role each: one takes jobs and loads Q, one loads K, one V, and one looks through V where a job is
// done again.
//
//     take     q0        q1                       as soon as a place is free
//     load         k0 k1     k2 | k0 k1 ..
//     load         v0 v1     v2 | v0 v1 ..
//     compute        s0  s1 o0   s2 o1 | s0 o2 store  s1 o0 ..
//
// The product with V of a tile is started together with the scores of the next tile, also where
// that one is the first of the next job, and runs while the exponentials of these scores are
// computed. With one place for Q a job ends before the next begins. Keys come from the last to the
// first, so that causal order meets its diagonal first. More than two warpgroups start their
// products in turns.
//
// Where V is infinite or NaN and a row does not see it, 0 * inf spoils its results. Warps find that
// in the end, keep the results to themselves, and the job is done again: then the one who looks
// searches all tiles that hide something, and the others wait for him. When there is no more work,
// the taker goes once around the slots, with jobs that are to be done again and pauses between
// them.
//
// Barriers, and who arrives (lanes are one of a warp):
//   job_full[slot]    the taker
//   job_empty[slot]   lanes of all other warps: who computes, once its results are on their way
//   q_full[place]     the taker, and the bytes of Q
//   q_empty[place]    lanes of the computing warps
//   k_full, v_full    the loader, and the bytes of a tile
//   k_empty, v_empty  lanes of the computing warps; of V also the one who looks
//   v_seen            the one who looks
//   special_added     lanes of the computing warps, and then
//   v_cleared         the one who looks: see add_special()
//
// Budget: a computing thread holds (kTileKv + kDimV) / 2 accumulators and kTileKv / 4 weights, of
// the 112 to 255 registers that it has.
#include "attention/params_tma.cuh"
#include "hw/mbarrier.cuh"
#include "hw/memory.cuh"
#include "hw/sync.cuh"
#include "parts/exponent.cuh"
#include "parts/pipeline.cuh"
#include "parts/special.cuh"
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

using online::kScored;
using online::LazyRow;

using QueryTile = swizzled::Tile<kGroupRows, plan::kDim>;
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
    QueryTile q[plan::kSlots][kGroups];
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

__device__ __forceinline__ int thread_of_group() {
    return static_cast<int>(hw::forget(static_cast<uint32>(threadIdx.x)) % kGroupThreads);
}

// Of queries [query, query + queries).
__device__ __forceinline__ SeenTiles seen_tiles(const Scores& score, int32 query, int32 queries) {
    return {score.band.key_tiles(query, queries, plan::kTileKv),
            score.plain_key_tiles(query, queries, plan::kTileKv)};
}

__device__ __forceinline__ bool hides_any(const SeenTiles& tiles) {
    return tiles.all.last - tiles.all.first < tiles.any.last - tiles.any.first;
}

// --- Bringing tiles ------------------------------------------------------------------------------

// Starts to bring the queries of the job in a slot to their place, which is free. One thread.
__device__ __forceinline__ void bring_queries(const TmaParams& maps, Smem& smem, Slots slot) {
    const Places place = {slot.count};
    hw::MBarrier& full = smem.q_full[place.at()];
    const Job& job = smem.jobs[slot.at()];
    if (job.keys.any.first >= job.keys.any.last) {
        hw::mbarrier_arrive(full);
        return;
    }
    hw::mbarrier_arrive_expect_tx(full, kGroups * QueryTile::kBytes);
    int32 row = job.work.entry.first_q + job.work.tile * plan::kTileQ;
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group, row += kGroupRows) {
        swizzled::load(smem.q[place.at()][group], maps.q, full, row, job.work.head, job.batch);
    }
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

// Notes what keys a job has. One thread.
__device__ __forceinline__ void note_keys(const Params& p, Job& job) {
    job.head_kv = job.work.head / (p.heads_q / p.heads_kv);
    job.row = job.work.entry.first_kv;
    job.batch = p.cu_seqlens_q.at ? 0 : static_cast<int32>(job.work.entry.batch);
    const Scores score = Scores::of(p, job.work.entry, job.work.head);
    const int32 query = job.work.tile * plan::kTileQ;
    job.keys = seen_tiles(score, query, plan::kTileQ);
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
        job.keys_of_group[group] = seen_tiles(score, query + group * kGroupRows, kGroupRows);
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
    for (;; slot.next()) {
        while (!exists && index < parts) {
            exists = work_at<Queries, plan::kTileQ>(p, part_at(p, index), work);
            index = draw(p, parts);
        }
        hw::mbarrier_wait(smem.job_empty[slot.at()], slot.parity() ^ 1);
        Job& job = smem.jobs[slot.at()];
        int32 kind = kEnd;
        if (was_spoilt(smem, slot)) {
            kind = kAgain;
        } else if (exists) {
            kind = kOnce;
        } else if (hides && left > 0) {
            kind = kPause;
        }
        if (!exists) --left;
        __syncwarp();  // what was_spoilt() has put back is seen by those who get the slot
        if (hw::elect_one()) {
            job.kind = kind;
            if (kind == kOnce) {
                job.work = work;
                note_keys(p, job);
            } else if (kind != kAgain) {
                job.keys = {{0, 0}, {0, 0}};
                for (SeenTiles& keys : job.keys_of_group) keys = job.keys;
            }
            hw::mbarrier_arrive(smem.job_full[slot.at()]);
        }
        __syncwarp();
        if (kind == kEnd) return;
        if (kind == kOnce) {
            exists = false;
            hides = hides || hides_any(job.keys);
        }
        const Places place = {slot.count};  // all lanes wait for it, in fewer registers than one
        hw::mbarrier_wait(smem.q_empty[place.at()], place.parity() ^ 1);
        if (hw::elect_one()) bring_queries(maps, smem, slot);
    }
}

// Brings the keys or the values of all jobs. One thread.
template <class Tile>
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

// --- Computing -----------------------------------------------------------------------------------

// What a thread knows of its rows while it walks the keys.
struct State {
    LazyRow rows[2];
    Scores::Row randoms[2];
    float factor;
    online::Exponent exponent;
    float out[1][kCols8][4];
    uint32 weights[kSteps][4];  // of the last tile
    bool pending;               // they have not met their values yet,
    bool adds;                  // whose product is to be added to earlier ones
    bool large;                 // a row of the warp has a large shift
};

struct Passed {
    int group;
    Stages k;  // of the next tile

    // Of the values that are pending, those of the last tile.
    __device__ __forceinline__ Stages v() const { return {k.count - 1}; }
};

// The first query of the calling warp.
__device__ __forceinline__ int32 query_of(const Job& job) {
    const auto warp = static_cast<int>(hw::forget(static_cast<uint32>(threadIdx.x)) / 32) - 4;
    return job.work.tile * plan::kTileQ + warp * 16;
}

// A barrier of the warpgroup.
__device__ __forceinline__ void sync_group() {
    const auto group = hw::forget(static_cast<uint32>(threadIdx.x)) / kGroupThreads;
    hw::named_barrier_sync(kGroups + static_cast<int>(group), kGroupThreads);
}

// The warpgroups start their products one after the other, if there are many.
template <class Start>
__device__ __forceinline__ void take_turn(int group, Start start) {
    if (kInTurns) hw::named_barrier_sync(1 + group, 2 * kGroupThreads);
    start();
    if (kInTurns) hw::named_barrier_arrive(1 + (group + 1) % kGroups, 2 * kGroupThreads);
}

// Rows before their first tile.
__device__ __forceinline__ void start(const Params& p, State& state, const Job& job) {
    const Scores score = Scores::of(p, job.work.entry, job.work.head);
    state.factor = online::factor_of(score);
    if constexpr (online::kFuses) state.exponent = online::Exponent::of(score);
    const int32 query = query_of(job);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        state.rows[r] = LazyRow::empty();
        state.randoms[r] = score.row(online::row_at(query, r));
    }
    state.large = false;
}

// What results are multiplied by; writes log-sum-exps.
__device__ __forceinline__ void conclude(const Params& p,
                                         float (&inverse)[2],
                                         const State& state,
                                         const Job& job) {
    const Scores score = Scores::of(p, job.work.entry, job.work.head);
    online::conclude(inverse, p, job.work.entry, job.work.head, score, state.rows, query_of(job));
}

// Writes as many rows of a tile, as it holds those of the warp from column `col` on. The array has
// rows that TMA could write.
template <class Tile>
__device__ __forceinline__ void write_some(const Tensor& to,
                                           const Job& job,
                                           int32 query,
                                           int32 columns,
                                           const Tile& tile,
                                           int row,
                                           int col) {
    using Piece = hw::Vec<uint32, 4>;
    const Entry& entry = job.work.entry;
    Element* const data = static_cast<Element*>(to.data) + job.batch * to.stride_batch +
                          job.work.head * to.stride_head + (entry.first_q + query) * to.stride_seq +
                          col;
    const int rows = entry.seqlen_q - query;
#pragma unroll 1
    for (int i = fragment::lane(); i < rows * (Tile::kCols / 8); i += 32) {
        const int r = i / (Tile::kCols / 8), c = i % (Tile::kCols / 8) * 8;
        if (col + c >= columns) continue;
        hw::store(reinterpret_cast<Piece*>(data + r * to.stride_seq + c),
                  *reinterpret_cast<const Piece*>(tile.piece(row + r, c)));
    }
}

// Writes rows of results, or starts to, through a tile that holds those of the warp from column
// `col` on.
template <class Tile>
__device__ __forceinline__ void write(
    const TmaParams& maps, const Job& job, int32 query, const Tile& tile, int row, int col) {
    const Entry& entry = job.work.entry;
    if (plan::kPacked && query + 16 > entry.seqlen_q) {  // the next entry's rows are not to change
        __syncwarp();
        write_some(maps.call.out, job, query, maps.call.head_dim_v, tile, row, col);
    } else if (query < entry.seqlen_q) {
        swizzled::store(maps.o, entry.first_q + query, job.work.head, job.batch, tile, row, col);
    }
}

// Starts to write rows of results from chunk kFirst on, once the tile or a chunk has been left by
// what went through it before.
template <int kFirst = 0>
__device__ __forceinline__ void send(const TmaParams& maps,
                                     Way<true>& way,
                                     const State& state,
                                     const float (&inverse)[2],
                                     const Job& job,
                                     int32 query,
                                     int row) {
    hw::bulk_wait_read<0>();
    __syncwarp();
    swizzled::put<0, kCols8>(way.tile, state.out, inverse, row);
    write(maps, job, query, way.tile, row, 0);
}
template <int kFirst = 0>
__device__ __forceinline__ void send(const TmaParams& maps,
                                     Way<false>& way,
                                     const State& state,
                                     const float (&inverse)[2],
                                     const Job& job,
                                     int32 query,
                                     int row) {
    if constexpr (kFirst < OutTile::kChunks) {
        constexpr int kColumns8 = OutChunk::kCols / 8;
        OutChunk& chunk = way.chunks[kFirst % 2];
        // The first chunk waits for all of the last job, another one for the one before the last:
        // all chunks of a job are groups of stores, or none is.
        if (kFirst != 1) hw::bulk_wait_read<kFirst == 0 ? 0 : 1>();
        __syncwarp();
        swizzled::put<kFirst * kColumns8, kColumns8>(chunk, state.out, inverse, row);
        write(maps, job, query, chunk, row, kFirst * OutChunk::kCols);
        send<kFirst + 1>(maps, way, state, inverse, job, query, row);
    }
}

// Has 0 * inf spoilt the results of a warp's rows? It does so in a column of all of them, so that
// one of a lane's rows tells. Rows may also see what is infinite. All lanes.
__device__ __forceinline__ bool spoilt(const State& state) {
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < kCols8; ++n) {
        sums[0] += fabsf(state.out[0][n][0]);
        sums[1] += fabsf(state.out[0][n][1]);
    }
    return __any_sync(0xffffffffu, !(sums[0] + sums[1] < softmax::infinity<float>()));
}

// Starts to write the results of the job in a slot, which is free then.
__device__ __forceinline__ void store(const TmaParams& maps,
                                      Smem& smem,
                                      const State& state,
                                      const float (&inverse)[2],
                                      Slots slot,
                                      int group) {
    const Job& job = smem.jobs[slot.at()];
    const int row = uniform(thread_of_group() / 32 * 16);
    const int32 query = uniform(query_of(job));
    const int32 kind = uniform(job.kind);
    if (kind == kAgain) hw::bulk_wait<0>();  // for what this warp may have written the first time
    if (kind == kOnce && uniform(hides_any(job.keys)) && spoilt(state)) {
        if (fragment::lane() == 0) smem.spoilt[slot.at()][4 * group + row / 16] = 1;
    } else {
        send(maps, smem.ways[group], state, inverse, job, query, row);
    }
    arrive(smem.job_empty[slot.at()]);
}

// Starts the product that is pending.
__device__ __forceinline__ void start_product(Smem& smem, State& state, Stages v) {
    hw::mbarrier_wait(smem.v_full[v.at()], v.parity());
    swizzled::start_x_b(state.out, state.weights, smem.v[v.at()], state.adds);
}

// It is complete.
__device__ __forceinline__ void end_product(Smem& smem, State& state, Stages v) {
    hw::wgmma_wait<0>();
    hw::pin(swizzled::listed(state.out));
    arrive(smem.v_empty[v.at()]);
    state.pending = false;
}

// What was found in values is added to results, or nothing sees it; waits until it is 0.
__device__ __forceinline__ void await_cleared(Smem& smem, int found) {
    arrive(smem.special_added);
    hw::mbarrier_wait(smem.v_cleared, found - 1);
}

// If values that are pending have infinities or NaN, which not all see: adds them to the results of
// those who do, and waits until they are 0.
__device__ __forceinline__ void add_special(
    const Params& p, Smem& smem, State& state, Passed& at, const Job& job, int32 tile) {
    const Stages v = at.v();
    // The one who looks may be a tile of this stage behind, until this one is there.
    hw::mbarrier_wait(smem.v_full[v.at()], v.parity());
    hw::mbarrier_wait(smem.v_seen[v.at()], v.parity());
    const int found = uniform(smem.special[v.at()]);
    if (!found) return;
    const Scores score = Scores::of(p, job.work.entry, job.work.head);
    uint64 seen[1];
    online::look<kKeys8>(seen, score, query_of(job), tile * plan::kTileKv);
    if (!state.adds) fragment::clear(state.out);
    state.adds = true;
    special::add(state.out, smem.v[v.at()],
                 [&](int, int i, int k) { return seen[0] >> (4 * (k / 8) + i + k % 2) & 1; });
    await_cleared(smem, found);
}

// A tile that the warpgroup sees nothing of, though others do.
__device__ __forceinline__ void pass(Smem& smem, State& state, Passed& at, bool looked_through) {
    if (state.pending) {
        start_product(smem, state, at.v());
        end_product(smem, state, at.v());
    }
    const Stages stage = at.k;
    at.k.next();
    hw::mbarrier_wait(smem.k_full[stage.at()], stage.parity());
    take_turn(at.group, [] {});
    arrive(smem.k_empty[stage.at()]);
    hw::mbarrier_wait(smem.v_full[stage.at()], stage.parity());
    if (looked_through) {
        hw::mbarrier_wait(smem.v_seen[stage.at()], stage.parity());
        const int found = uniform(smem.special[stage.at()]);
        if (found) await_cleared(smem, found);
    }
    arrive(smem.v_empty[stage.at()]);
}

// One turn of the main loop: a tile of keys. Most turns are plain: the tile hides nothing from the
// block, and it is not the first of a job. kAdds: the product with the values of the tile
// before is pending. Which of them it is must be the same for all warps of the group, who have to
// start products by the same instruction; what differs between warps (a large shift) is asked
// inside.
template <bool kPlain, bool kAdds>
__device__ __forceinline__ void turn(const TmaParams& maps,
                                     Smem& smem,
                                     State& state,
                                     Passed& at,
                                     Slots slot,
                                     int32 tile,
                                     bool starts,
                                     bool hides) {
    const Params& p = maps.call;
    const Job& job = smem.jobs[slot.at()];
    const Slots before = {slot.count - 1};
    float inverse[2];
    if (kPlain || (kAdds && !kFlat)) starts = false;
    float s[1][kKeys8][4];
    const Stages k = at.k, v = at.v();
    at.k.next();
    hw::mbarrier_wait(smem.k_full[k.at()], k.parity());
    take_turn(at.group, [&] {
        swizzled::start_a_bt(s, smem.q[Places{slot.count}.at()][at.group], 0, smem.k[k.at()]);
        if (kAdds) start_product(smem, state, v);
    });
    if (starts) {
        if (kAdds) conclude(p, inverse, state, smem.jobs[before.at()]);
        start(p, state, job);
    }
    const Scores score = Scores::of(p, job.work.entry, job.work.head);
    const int32 query = query_of(job), key = tile * plan::kTileKv;
    PairWords<1, kKeys8, kReadsPairs> words;
    if (kReadsPairs && !kPlain && (plan::kBias || hides)) words.read(score, query, key);
    hw::wgmma_wait<kAdds ? 1 : 0>();
    hw::pin(swizzled::listed(s));
    arrive(smem.k_empty[k.at()]);

    // Ends with weights; before what may be skipped, so that it is done between exponentials.
    float scales[2];
    const auto complete = [&](bool grows) {
        if (kAdds) {
            if (!kPlain) {
                // ptxas would add up the sums after the results of a job are on their way.
                float sums[2] = {state.rows[0].sum, state.rows[1].sum};
                hw::pin(sums);
                state.rows[0].sum = sums[0], state.rows[1].sum = sums[1];
            }
            end_product(smem, state, v);
            if (starts) store(maps, smem, state, inverse, before, at.group);
        }
#pragma unroll
        for (int j = 0; j < kSteps; ++j) fragment::left(state.weights[j], s[0], j);
        if (grows && !starts) online::rescale(state.out, scales);
        state.pending = true;
        state.adds = !starts;
    };
    if constexpr (kPlain && online::kFuses) {
        if (!state.large && online::fuses(state.rows, s, state.exponent, score, query, key)) {
            online::exponentials_of_products(s, state.rows, state.exponent, score, state.randoms,
                                             query, key);
            complete(false);
            return;
        }
    }
    // With a bias there is no tile that hides nothing; one form takes less time to compile than
    // two.
    if (!kPlain && (plan::kBias || hides)) {
        online::finish_scores<true, true>(s, words, score, query, key);
    } else if (kScored) {
        online::finish_scores<false, true>(s, words, score, query, key);
    }
    const bool grows = starts || online::outgrown(state.rows, s, state.factor);
    float shifts[2];
    if (grows) state.large = online::raise(state.rows, scales, s, state.factor);
#pragma unroll
    for (int r = 0; r < 2; ++r) shifts[r] = state.rows[r].shift(state.factor);
    if (state.large) online::compare_first(s, state.rows, shifts);
    online::exponentials(s, state.rows, shifts, score, state.randoms, key, state.factor);
    complete(grows);
}

// Ends the job in a slot.
__device__ __forceinline__ void finish(
    const TmaParams& maps, Smem& smem, State& state, Passed& at, Slots slot) {
    if (state.pending) {
        start_product(smem, state, at.v());
        end_product(smem, state, at.v());
    }
    float inverse[2];
    conclude(maps.call, inverse, state, smem.jobs[slot.at()]);
    store(maps, smem, state, inverse, slot, at.group);
}

// Scores are in units of |scale|: the queries of a negative one change their signs.
__device__ __forceinline__ void negate(QueryTile& q) {
    auto* const words = reinterpret_cast<uint32*>(q.at);
#pragma unroll 1
    for (int i = thread_of_group(); i < QueryTile::kBytes / 4; i += kGroupThreads)
        words[i] ^= 0x80008000u;
    hw::fence_proxy_async();
    sync_group();
}

__device__ __forceinline__ void compute(const TmaParams& maps, Smem& smem, int group) {
    const Params& p = maps.call;
    const bool negates = !kScored && static_cast<float>(p.scale) < 0.0f;
    State state;
    state.pending = false;
    bool unfinished = false;  // the job before
    Passed at = {group};
    Slots slot;
    if (kInTurns && group == kGroups - 1) hw::named_barrier_arrive(1, 2 * kGroupThreads);
    for (;; slot.next()) {
        hw::mbarrier_wait(smem.job_full[slot.at()], slot.parity());
        const Job& job = smem.jobs[slot.at()];
        const int32 kind = uniform(job.kind);
        const SeenTiles keys = job.keys, own = job.keys_of_group[group];
        int32 tile = uniform(keys.any.last);
        const bool works = kind == kOnce || kind == kAgain;
        const bool begins = works && uniform(own.has(tile - 1));  // with the block's first tile
        if (kFlat && unfinished && !(state.pending && begins)) {
            finish(maps, smem, state, at, {slot.count - 1});
        }
        if (kind == kEnd) break;
        const Places place = {slot.count};
        hw::mbarrier_wait(smem.q_full[place.at()], place.parity());
        if (kind == kPause) {
            arrive(smem.q_empty[place.at()]);
            arrive(smem.job_empty[slot.at()]);
            unfinished = false;
            continue;
        }
        if (uniform(own.any.first >= own.any.last)) {
            start(p, state, job);
            fragment::clear(state.out);
        } else if (negates) {
            negate(smem.q[place.at()][group]);
        }
        bool starts = true;
        const int32 first = uniform(keys.any.first);
        // Of these tiles nothing is hidden from the group, nor from others of the block.
        const TileRange plain = {uniform(max(keys.all.first, own.all.first)),
                                 uniform(min(keys.all.last, own.all.last))};
        while (tile > first) {
            --tile;
            bool hides = false;
            if (!plain.holds(tile)) {
                if (!uniform(own.has(tile))) {
                    pass(smem, state, at, kind == kAgain && uniform(keys.hides(tile)));
                    continue;
                }
                hides = uniform(own.hides(tile));
            }
            if (!state.pending) {
                turn<false, false>(maps, smem, state, at, slot, tile, starts, hides);
            } else if (starts || !plain.holds(tile)) {
                turn<false, true>(maps, smem, state, at, slot, tile, starts, hides);
            } else {
#pragma unroll 1
                for (;; --tile) {
                    turn<true, true>(maps, smem, state, at, slot, tile, false, false);
                    if (tile <= plain.first) break;
                }
            }
            starts = false;
            if (kind == kAgain && uniform(keys.hides(tile))) {
                add_special(p, smem, state, at, job, tile);
            }
        }
        arrive(smem.q_empty[place.at()]);  // no product reads these queries any more
        unfinished = true;
        if (!kFlat) finish(maps, smem, state, at, slot);
    }
    hw::bulk_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(plan::kThreads, 1)
    forward_sm90(const __grid_constant__ TmaParams p) {
    Smem& smem = hw::shared_memory<Smem>();
    if (threadIdx.x == 0) {
        hw::prefetch(p.q);
        hw::prefetch(p.k);
        hw::prefetch(p.v);
        hw::prefetch(p.o);
        for (int i = 0; i < kJobs; ++i) {
            hw::mbarrier_init(smem.job_full[i], 1);
            hw::mbarrier_init(smem.job_empty[i], kComputingWarps + 3);
            for (int32& results : smem.spoilt[i]) results = 0;
        }
        for (int i = 0; i < plan::kSlots; ++i) {
            hw::mbarrier_init(smem.q_full[i], 1);
            hw::mbarrier_init(smem.q_empty[i], kComputingWarps);
        }
        for (int i = 0; i < plan::kStages; ++i) {
            hw::mbarrier_init(smem.k_full[i], 1);
            hw::mbarrier_init(smem.k_empty[i], kComputingWarps);
            hw::mbarrier_init(smem.v_full[i], 1);
            hw::mbarrier_init(smem.v_seen[i], 1);
            hw::mbarrier_init(smem.v_empty[i], kComputingWarps + 1);
        }
        hw::mbarrier_init(smem.special_added, kComputingWarps);
        hw::mbarrier_init(smem.v_cleared, 1);
        hw::fence_mbarrier_init();
    }
    __syncthreads();
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (warp >= 4) {
        if constexpr (kGroups > 1) hw::registers_increase<kRegisters>();
        compute(p, smem, warp / 4 - 1);
        return;
    }
    if constexpr (kGroups > 1) hw::registers_decrease<kFewRegisters>();
    if (warp == 0) {
        take_all(p, smem);
    } else if (warp == 1) {
        if (hw::elect_one()) load_all(smem, smem.k, p.k, smem.k_full, smem.k_empty);
    } else if (warp == 2) {
        if (hw::elect_one()) load_all(smem, smem.v, p.v, smem.v_full, smem.v_empty);
    } else {
        look_through_values(smem);
    }
}
