// SPDX-License-Identifier: Apache-2.0
// The gradients by mma.sync, for float16 and bfloat16 on sm_80 and later:
//
//     dk[j] = scale * sum_i dscore[i][j] slope[i][j] q[i],   dv[j] = sum_i P[i][j] dout[i],
//     dq[i] = scale * sum_j dscore[i][j] slope[i][j] k[j],
//     dscore[i][j] = P[i][j] (dP[i][j] - delta[i]),   P = exp(score - lse),
//     dP[i][j] = <dout[i], v[j]>,   score and its slope: parts/score.cuh
//
// A block owns kTileKv keys of one key head and keeps their dk and dv in registers. It walks the
// query heads of the group and, in each, the query tiles that see these keys. Scores are
// transposed: rows are keys.
//
//     copy       q0 dout0 | q1 dout1                                   |
//     compute             | s = k q^T, dp = v dout^T | (turn) dq = ds^T k, dv += p dout, dk += ds q
//     |
//
// Warps form a grid of keys and queries, kQueryWarps wide, for the first two products, and of keys
// and columns for dv and dk. Where it is one warp wide, the fragments of p and ds are their left
// operands; else p goes through shared memory, as ds must for dq, which sums over keys and so over
// warps.
//
// Sums of dq are in workspace (parts/gradient_mma.cuh). Key tiles add theirs in order, which makes
// the result deterministic: a block waits until those before it have had their turn with kTurn
// query tiles, as one wait costs about a microsecond. All walk the queries from the last to the
// first, so that tile j need only stay a turn behind tile j - 1; where causal order hides queries,
// it is the first ones, and the longest walks are launched first. The first to add to a tile
// stores, so that sums need not be zeroed.
//
// Without kOrdered only those that may store have turns, the first one or few of each. The others
// wait for these alone, add theirs whenever they come, and the result may differ from call to call.
//
// kSplits: a block computes only one in kSplits of the columns of dk, dv and dq, for large heads.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "hw/reduce.cuh"
#include "hw/semaphore.cuh"
#include "parts/fragment.cuh"
#include "parts/gradient_mma.cuh"
#include "parts/special.cuh"
#include "parts/transposed.cuh"
#include "parts/work.cuh"

using fragment::kSlab;

constexpr bool kThroughShared = plan::kQueryWarps > 1;
constexpr int kRowsOfWarp = plan::kTileKv / (plan::kWarps / plan::kQueryWarps);
constexpr int kSlabs = kRowsOfWarp / kSlab;
constexpr int kQueriesOfWarp = plan::kTileQ / plan::kQueryWarps;
constexpr int kQueries8 = kQueriesOfWarp / 8;               // columns of a fragment of scores
constexpr int kSplitCols = plan::kDim / plan::kSplits;      // columns of dk and dq of a block
constexpr int kSplitColsV = plan::kDimV / plan::kSplits;    // and of dv
constexpr int kCols8 = kSplitCols / plan::kQueryWarps / 8;  // of a warp
constexpr int kColsV8 = kSplitColsV / plan::kQueryWarps / 8;
constexpr int kDqWarpsX = plan::kWarps / plan::kDqWarps;  // warps side by side for dq
constexpr int kDqSlabs = plan::kTileQ / kSlab / plan::kDqWarps;
constexpr int kDqBlocks = kSplitCols / 16;  // blocks of columns, which those warps share
static_assert(kSplitCols % (16 * plan::kQueryWarps) == 0 &&
                  kSplitColsV % (16 * plan::kQueryWarps) == 0,
              "whole blocks of columns a warp");
constexpr int kDqBlocksOfWarp = (kDqBlocks + kDqWarpsX - 1) / kDqWarpsX;
// Key tiles that may be the first of a query tile of a turn, unless there are fewer.
constexpr int32 kFirstTiles = 1 + (kTurnRows - plan::kTileQ + plan::kTileKv - 1) / plan::kTileKv;

template <int kCols>
using TileOfQueries = fragment::Tile<plan::kTileQ, kCols>;
template <int kCols>
using TileOfKeys = fragment::Tile<plan::kTileKv, kCols>;
using Fragments = float[kSlabs][kQueries8][4];  // of scores, transposed

// What a block does, in shared memory, where it costs no registers. Thread 0 writes it.
struct Notes {
    int64 index;  // of the part
    Work work;
    int32 split;               // of the columns
    TileRange queries, plain;  // tiles that see any of the keys, and all
    int32 group, visits;       // query heads, and how often a query tile of one is visited
    int32 special_k;           // K has infinities or NaN, and some pairs are hidden
    int32 special;             // so have K, Q or dout
};

struct Smem {
    TileOfKeys<plan::kDim> k;
    TileOfKeys<plan::kDimV> v;
    TileOfQueries<plan::kDim> q[plan::kSlots];
    TileOfQueries<plan::kDimV> dout[plan::kSlots];
    TileOfKeys<plan::kTileQ> factors[kThroughShared ? 2 : 1];  // dscores, and P
    RowStats rows[plan::kSlots][plan::kTileQ];
    alignas(16) Notes notes;
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

// What a warp works on.
struct Place {
    int32 first_key;  // of the block
    int split;        // of the columns
    int row;          // the warp's first row in tiles of keys,
    int query;        // its first query of a tile, for scores,
    int col, col_v;   // and its first column of dk and dv
};

// One turn of the main loop: a query tile of one query head of the group.
struct Visit {
    int32 head, tile;
    bool starts, ends;  // a turn with dq
};

// Visit i: heads in order, and the queries of each from the last to the first.
__device__ __forceinline__ Visit visit_of(const Notes& notes, int32 i) {
    const int32 tiles = notes.queries.last - notes.queries.first;
    const int32 tile = notes.queries.last - 1 - i % tiles;
    return {notes.work.head * notes.group + i / tiles, tile,
            i % tiles == 0 || (tile + 1) % plan::kTurn == 0,
            tile == notes.queries.first || tile % plan::kTurn == 0};
}

// The first key tile that has a turn with the dq of a query tile.
__device__ __forceinline__ int32 first_of_turn(const Band& band, int32 tile) {
    return band.key_tiles(tile / plan::kTurn * kTurnRows, kTurnRows, plan::kTileKv).first;
}

struct Sums {
    float dk[kSlabs][kCols8][4];
    float dv[kSlabs][kColsV8][4];
};

__device__ __forceinline__ Place place_of(const Notes& notes) {
    const int32 tile = notes.work.tile;
    const int split = notes.split;
    const int warp = hw::forget(static_cast<int>(threadIdx.x)) / 32;
    const int warp_x = warp % plan::kQueryWarps;
    return {tile * plan::kTileKv,
            split,
            warp / plan::kQueryWarps * kRowsOfWarp,
            warp_x * kQueriesOfWarp,
            split * kSplitCols + warp_x * kCols8 * 8,
            split * kSplitColsV + warp_x * kColsV8 * 8};
}

// Starts to bring what a visit needs.
__device__ __forceinline__ void copy(const Params& p, Smem& smem, Visit visit, int slot) {
    const Entry& entry = smem.notes.work.entry;
    const int32 first = visit.tile * plan::kTileQ;
    fragment::copy<plan::kAligned, plan::kThreads>(
        smem.q[slot], query_matrix(p.q, entry, visit.head, p.head_dim), first);
    fragment::copy<plan::kAligned, plan::kThreads>(
        smem.dout[slot], query_matrix(p.dout, entry, visit.head, p.head_dim_v), first);
    const RowStats* const rows =
        row_stats(p, query_slot<plan::kTileQ>(p, entry, visit.head, visit.tile));
    for (int i = 2 * static_cast<int>(threadIdx.x); i < plan::kTileQ; i += 2 * plan::kThreads) {
        hw::cp_async<16>(&smem.rows[slot][i], rows + i, true);
    }
}

// sums += x b, where rows of x are the warp's keys and columns the queries of the tile: of `x`, or
// of `factor` if it went through shared memory.
template <int kColumns8, int kCols>
__device__ __forceinline__ void add_product(float (&sums)[kSlabs][kColumns8][4],
                                            const Fragments& x,
                                            const TileOfKeys<plan::kTileQ>& factor,
                                            int row,
                                            const TileOfQueries<kCols>& b,
                                            int col) {
    if constexpr (kThroughShared) {
        fragment::add_a_b(sums, factor, row, b, col);
    } else {
        fragment::add_x_b(sums, x, b, col);
    }
}

// Adds the block's part of dq of a query tile, which begins at `query`, to its sums.
__device__ __forceinline__ void add_dq(
    const Params& p, const Place& at, const Smem& smem, int64 slot, bool special_k, bool is_first) {
    const int warp = hw::forget(static_cast<int>(threadIdx.x)) / 32;
    const int slab = warp / kDqWarpsX * kDqSlabs;
    const int block = warp % kDqWarpsX;  // of 16 columns; and every kDqWarpsX-th after it
    const int col = at.split * kSplitCols;
    float dq[kDqSlabs][2 * kDqBlocksOfWarp][4];
    fragment::clear(dq);
    if (special_k) {
        fragment::add_at_b<true, kDqWarpsX, kDqBlocks>(dq, smem.factors[0], kSlab * slab, smem.k,
                                                       col, block);
    } else {
        fragment::add_at_b<false, kDqWarpsX, kDqBlocks>(dq, smem.factors[0], kSlab * slab, smem.k,
                                                        col, block);
    }
    float* const to = dq_sums(p, slot, slab, col / 8 + 2 * block);
#pragma unroll
    for (int n = 0; n < 2 * kDqBlocksOfWarp; ++n) {
        if (kDqBlocks % kDqWarpsX != 0 && block + n / 2 * kDqWarpsX >= kDqBlocks) break;
#pragma unroll
        for (int s = 0; s < kDqSlabs; ++s) {
            const float (&x)[4] = dq[s][n];
            float* const at_n = to + dq_distance(s, n / 2 * kDqWarpsX * 2 + n % 2);
            if (is_first) {
                using Four = hw::Vec<float, 4>;
                hw::store(reinterpret_cast<Four*>(at_n), Four{{x[0], x[1], x[2], x[3]}});
            } else {
                hw::reduce_add(at_n, x);
            }
        }
    }
}

// Clears a tile of infinities and NaN, for add_special() to see to them.
template <class Tile>
__device__ __forceinline__ void clear(Tile& tile, Smem& smem) {
    if (threadIdx.x == 0) smem.notes.special = 1;
    special::clear<plan::kThreads>(tile);
}

template <bool kPlain>
__device__ __forceinline__ void turn(
    const Params& p, Smem& smem, Sums& sums, Visit visit, int slot) {
    const Entry& entry = smem.notes.work.entry;
    const Place at = place_of(smem.notes);
    const int32 query = visit.tile * plan::kTileQ;
    const Scores score = Scores::of(p, entry, visit.head);
    auto& q = smem.q[slot];
    auto& dout = smem.dout[slot];

    Fragments s, dp;
    fragment::clear(s);
    fragment::add_a_bt(s, smem.k, at.row, q, at.query);
    const transposed::NothingHeld held;
    transposed::soften<kPlain>(s, score);
    if (!kPlain) transposed::hide(s, held, score, query + at.query, at.first_key + at.row);
    fragment::clear(dp);
    fragment::add_a_bt(dp, smem.v, at.row, dout, at.query);
    transposed::gradients<kPlain>(s, dp, smem.rows[slot] + at.query, held, score, query + at.query,
                                  at.first_key + at.row);
    fragment::store_rounded(smem.factors[0], dp, at.row, at.query);
    if (kThroughShared) fragment::store_rounded(smem.factors[kThroughShared], s, at.row, at.query);

    const int32 key_tile = at.first_key / plan::kTileKv;
    if (p.dq.data && visit.starts && threadIdx.x == 0) {
        int32 first = first_of_turn(score.band, visit.tile);
        if (!plan::kOrdered) first = max(first, key_tile - kFirstTiles);
        hw::semaphore_wait(dq_turn(p, entry, visit.head, visit.tile, at.split), key_tile - first);
    }
    __syncthreads();
    if (!kPlain) {
        if (special::any<plan::kThreads>(q)) clear(q, smem);
        if (special::any<plan::kThreads>(dout)) clear(dout, smem);
    }
    if (p.dq.data) {
        const int32 first = score.band.key_tiles(query, plan::kTileQ, plan::kTileKv).first;
        const int64 to = query_slot<plan::kTileQ>(p, entry, visit.head, visit.tile);
        add_dq(p, at, smem, to, !kPlain && smem.notes.special_k, key_tile == first);
    }
    add_product(sums.dv, s, smem.factors[kThroughShared], at.row, dout, at.col_v);
    add_product(sums.dk, dp, smem.factors[0], at.row, q, at.col);
}

__device__ __forceinline__ void write_results(const Params& p,
                                              const Notes& notes,
                                              const Sums& sums) {
    if (!p.dk.data) return;
    const Entry& entry = notes.work.entry;
    const int32 head = notes.work.head;
    const Place at = place_of(notes);
    const Scores score = Scores::of(p, entry, 0);
    const Matrix dk = key_matrix(p.dk, entry, head, p.head_dim);
    const Matrix dv = key_matrix(p.dv, entry, head, p.head_dim_v);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
        const int32 row = at.first_key + at.row + kSlab * slab;
        float x[4];
#pragma unroll
        for (int n = 0; n < kCols8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = sums.dk[slab][n][i] * score.scale;
            fragment::write(dk, x, row, at.col + 8 * n);
        }
#pragma unroll
        for (int n = 0; n < kColsV8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = sums.dv[slab][n][i] * score.kept_factor();
            fragment::write(dv, x, row, at.col_v + 8 * n);
        }
    }
}

// Adds what is special in Q, dout and K, in query tiles from which something is hidden, to the
// results of backward_tile(). Not inlined: what both work out would be kept in registers meanwhile.
__device__ __noinline__ void add_special(const Params& p, Smem& smem) {
    const Notes& notes = smem.notes;
    const Entry& entry = notes.work.entry;
    const Place at = place_of(notes);
    const Matrix dk = key_matrix(p.dk, entry, notes.work.head, p.head_dim);
    const Matrix dv = key_matrix(p.dv, entry, notes.work.head, p.head_dim_v);
    for (int32 i = 0; i < notes.visits; ++i) {
        const Visit visit = visit_of(notes, i);
        if (notes.plain.holds(visit.tile)) continue;
        const int32 query = visit.tile * plan::kTileQ;
        const Scores score = Scores::of(p, entry, visit.head);
        __syncthreads();
        copy(p, smem, visit, 0);
        hw::cp_async_commit();
        hw::cp_async_wait<0>();
        __syncthreads();
        for (int32 row = at.row; row < at.row + kRowsOfWarp; row += kSlab) {
            const int32 key = at.first_key + row;
            auto sees = [&](int i, int k) {
                return score.visible(query + k, key + fragment::row_of(i));
            };
            for (int col = at.col; p.dk.data && col < at.col + 8 * kCols8; col += 16) {
                special::add<false>(dk, key, col, smem.q[0], col, sees);
            }
            for (int col = at.col_v; p.dk.data && col < at.col_v + 8 * kColsV8; col += 16) {
                special::add<true>(dv, key, col, smem.dout[0], col, sees);
            }
        }
        if (!p.dq.data) continue;
        const int64 slot = query_slot<plan::kTileQ>(p, entry, visit.head, visit.tile);
        const int warp = hw::forget(static_cast<int>(threadIdx.x)) / 32;
        for (int slab = 0; slab < plan::kTileQ / kSlab; ++slab) {
            for (int block = warp; block < kDqBlocks; block += plan::kWarps) {
                const int col = at.split * kSplitCols + 16 * block;
                float x[2][4];
                special::sums<false>(x, smem.k, col, [&](int i, int k) {
                    return score.visible(query + kSlab * slab + fragment::row_of(i),
                                         at.first_key + k);
                });
                hw::reduce_add(dq_sums(p, slot, slab, col / 8), x[0]);
                hw::reduce_add(dq_sums(p, slot, slab, col / 8 + 1), x[1]);
            }
        }
    }
}

// Lets the next key tile have its turn, if visit i ended one; behind a barrier. Not by the thread
// that waits for turns, since either takes time.
__device__ __forceinline__ void end_turn(const Params& p, const Notes& notes, int32 i) {
    if (!p.dq.data || i < 0 || threadIdx.x != plan::kThreads - 32) return;
    const Visit done = visit_of(notes, i);
    if (!done.ends) return;
    if constexpr (!plan::kOrdered) {  // does anybody wait for it?
        const Band band = Band::of(p, notes.work.entry);
        if (notes.work.tile - first_of_turn(band, done.tile) >= kFirstTiles) return;
    }
    hw::semaphore_add(dq_turn(p, notes.work.entry, done.head, done.tile, notes.split), 1);
}

__device__ __forceinline__ void backward_tile(const Params& p, Smem& smem) {
    Notes& notes = smem.notes;
    const Entry& entry = notes.work.entry;
    Sums sums;
    fragment::clear(sums.dk);
    fragment::clear(sums.dv);
    if (notes.visits > 0) {
        const int32 first_key = notes.work.tile * plan::kTileKv;
        fragment::copy<plan::kAligned, plan::kThreads>(
            smem.k, key_matrix(p.k, entry, notes.work.head, p.head_dim), first_key);
        fragment::copy<plan::kAligned, plan::kThreads>(
            smem.v, key_matrix(p.v, entry, notes.work.head, p.head_dim_v), first_key);
        if (plan::kSlots > 1) copy(p, smem, visit_of(notes, 0), 0);
        hw::cp_async_commit();
        if (notes.plain.last - notes.plain.first < notes.queries.last - notes.queries.first) {
            hw::cp_async_wait<0>();
            __syncthreads();
            const bool special_k = special::any<plan::kThreads>(smem.k);
            if (threadIdx.x == 0) notes.special_k = notes.special = special_k;
        }
    }
    for (int32 i = 0; i < notes.visits; ++i) {
        const int slot = i % plan::kSlots;
        if (plan::kSlots == 1) {
            __syncthreads();
            copy(p, smem, visit_of(notes, i), 0);
            hw::cp_async_commit();
        }
        hw::cp_async_wait<0>();
        __syncthreads();
        end_turn(p, notes, i - 1);
        if (plan::kSlots > 1) {
            if (i + 1 < notes.visits) copy(p, smem, visit_of(notes, i + 1), slot ^ 1);
            hw::cp_async_commit();
        }
        const Visit visit = visit_of(notes, i);
        if (notes.plain.holds(visit.tile)) {
            turn<true>(p, smem, sums, visit, slot);
        } else {
            turn<false>(p, smem, sums, visit, slot);
        }
    }
    __syncthreads();
    end_turn(p, notes, notes.visits - 1);
    write_results(p, notes, sums);
}

extern "C" __global__ void __launch_bounds__(plan::kThreads, plan::kBlocksPerSm)
    backward_mma(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    for (int64 index = blockIdx.x; index < work_parts<Keys, plan::kTileKv>(p) * plan::kSplits;) {
        const int64 part = interleaved<Keys, plan::kTileKv>(
            p, index / plan::kSplits, heads_of<Keys, plan::kTileKv>(p, plan::kTogether));
        Work work = {slack(Keys(), 0, 0), 0, 0};  // nothing, if there is nothing to do
        const bool any = work_at<Keys, plan::kTileKv>(p, part, work);
        if (threadIdx.x == 0) {
            const Scores score = Scores::of(p, work.entry, 0);
            const int32 key = work.tile * plan::kTileKv, group = p.heads_q / p.heads_kv;
            const TileRange queries = score.band.query_tiles(key, plan::kTileKv, plan::kTileQ);
            smem.notes = {index,
                          work,
                          static_cast<int>(index % plan::kSplits),
                          queries,
                          score.plain_query_tiles(key, plan::kTileKv, plan::kTileQ),
                          group,
                          group * (queries.last - queries.first),
                          0,
                          0};
        }
        __syncthreads();
        if (any) {
            backward_tile(p, smem);
            __syncthreads();
            if (smem.notes.special) add_special(p, smem);
        }
        index = smem.notes.index + gridDim.x;
        __syncthreads();  // all have finished the part
    }
}
