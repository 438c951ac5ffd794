// SPDX-License-Identifier: Apache-2.0
// The gradients by mma.sync, for float16 and bfloat16 on sm_80 and later:
//
//     dk[j] = scale * sum_i dscore[i][j] slope[i][j] q[i],   dv[j] = sum_i P[i][j] dout[i],
//     dq[i] = scale * sum_j dscore[i][j] slope[i][j] k[j],
//     dscore[i][j] = P[i][j] (dP[i][j] - delta[i]),   P = exp(score - lse),
//     dP[i][j] = <dout[i], v[j]>,   score and its slope: parts/score.cuh
//
// A block owns kTileKv keys of one key head and keeps their dk and dv in registers. It walks the query
// heads of the group and, in each, the query tiles that see these keys. Scores are transposed: rows
// are keys.
//
//     copy       q0 dout0 | q1 dout1                                   |
//     compute             | s = k q^T, dp = v dout^T | (turn) dq = ds^T k, dv += p dout, dk += ds q |
//
// Warps form a grid of keys and queries, kQueryWarps wide, for the first two products, and of keys and
// columns for dv and dk. Where it is one warp wide, the fragments of p and ds are their left operands;
// else p goes through shared memory, as ds must for dq, which sums over keys and so over warps.
//
// Sums of dq are in workspace (parts/gradient_mma.cuh). Key tiles add theirs in order, which makes the
// result deterministic: a block waits until those before it have had their turn with this query tile.
// All walk the queries from the last to the first, so that tile j need only stay a step behind tile
// j - 1; where causal order hides queries, it is the first ones, and the longest walks are launched
// first. The first of a tile's turns stores, so that sums need not be zeroed.
//
// kSplits: a block computes only one in kSplits of the columns of dk, dv and dq, for large heads.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "hw/reduce.cuh"
#include "hw/semaphore.cuh"
#include "parts/fragment.cuh"
#include "parts/gradient_mma.cuh"
#include "parts/score.cuh"
#include "parts/special.cuh"
#include "parts/work.cuh"

using fragment::kSlab;

constexpr bool kThroughShared = plan::kQueryWarps > 1;
constexpr int kRowsOfWarp = plan::kTileKv / (plan::kWarps / plan::kQueryWarps);
constexpr int kSlabs = kRowsOfWarp / kSlab;
constexpr int kQueriesOfWarp = plan::kTileQ / plan::kQueryWarps;
constexpr int kQueries8 = kQueriesOfWarp / 8;            // columns of a fragment of scores
constexpr int kSplitCols = plan::kDim / plan::kSplits;   // columns of dk and dq of a block
constexpr int kSplitColsV = plan::kDimV / plan::kSplits;  // and of dv
constexpr int kCols8 = kSplitCols / plan::kQueryWarps / 8;  // of a warp
constexpr int kColsV8 = kSplitColsV / plan::kQueryWarps / 8;
constexpr int kDqWarpsX = plan::kWarps / plan::kDqWarps;  // warps side by side for dq
constexpr int kDqSlabs = plan::kTileQ / kSlab / plan::kDqWarps;
constexpr int kDqBlocks = kSplitCols / 16;  // blocks of columns, which those warps share
constexpr int kDqBlocksOfWarp = (kDqBlocks + kDqWarpsX - 1) / kDqWarpsX;

// Options that make a score more than scale * product.
constexpr bool kScored = plan::kSoftcap || plan::kBias || plan::kAlibi;

template <int kCols>
using TileOfQueries = fragment::Tile<plan::kTileQ, kCols>;
template <int kCols>
using TileOfKeys = fragment::Tile<plan::kTileKv, kCols>;
using Fragments = float[kSlabs][kQueries8][4];  // of scores, transposed

struct Smem {
    TileOfKeys<plan::kDim> k;
    TileOfKeys<plan::kDimV> v;
    TileOfQueries<plan::kDim> q[plan::kSlots];
    TileOfQueries<plan::kDimV> dout[plan::kSlots];
    TileOfKeys<plan::kTileQ> factors[kThroughShared ? 2 : 1];  // dscores, and P
    RowStats rows[plan::kSlots][plan::kTileQ];
    alignas(16) int special;  // tiles that hide something have infinities or NaN
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

// What a block and a warp know.
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
};

struct Sums {
    float dk[kSlabs][kCols8][4];
    float dv[kSlabs][kColsV8][4];
};

__device__ __forceinline__ Place place_of(int32 tile, int split) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int warp_x = warp % plan::kQueryWarps;
    return {tile * plan::kTileKv,
            split,
            warp / plan::kQueryWarps * kRowsOfWarp,
            warp_x * kQueriesOfWarp,
            split * kSplitCols + warp_x * kCols8 * 8,
            split * kSplitColsV + warp_x * kColsV8 * 8};
}

// Starts to bring what a visit needs.
__device__ __forceinline__ void copy(
    const Params& p, const Entry& entry, Smem& smem, Visit visit, int slot) {
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

// Products become weights (P after dropout) and gradients of scores; `query` and `key` are the first
// of the fragments.
template <bool kPlain>
__device__ __forceinline__ void gradients(Fragments& s,
                                          Fragments& dp,
                                          const RowStats* rows,
                                          const Scores& score,
                                          int32 query,
                                          int32 key) {
    const float factor = score.scale * softmax::kLog2e;
#pragma unroll
    for (int n = 0; n < kQueries8; ++n) {
        const RowStats row[2] = {rows[8 * n + fragment::col_of(0)],
                                 rows[8 * n + fragment::col_of(1)]};
        Scores::Row randoms[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) randoms[i] = score.row(query + 8 * n + fragment::col_of(i));
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int32 at_query = query + 8 * n + fragment::col_of(i);
                const int32 at_key = key + kSlab * slab + fragment::row_of(i);
                float& x = s[slab][n][i];
                float& dx = dp[slab][n][i];
                float slope = 1.0f;
                bool seen = true;
                if constexpr (kScored) {
                    const Score at = score.at(x, at_query, at_key, !kPlain);
                    x = hw::exp2_approx(fmaf(at.value, softmax::kLog2e, -row[i % 2].lse));
                    slope = at.slope;
                    seen = at.seen;
                } else {
                    if constexpr (!kPlain) seen = score.visible(at_query, at_key);
                    x = hw::exp2_approx(fmaf(x, factor, -row[i % 2].lse));
                }
                dx = score.survives(dx, randoms[i % 2], at_key) * score.kept_factor();
                dx = x * (dx - row[i % 2].delta) * slope;
                x = score.survives(x, randoms[i % 2], at_key);
                if (!seen) x = dx = 0.0f;
            }
        }
    }
}

// sums += x b, where rows of x are the warp's keys and columns the queries of the tile: of `x`, or of
// `factor` if it went through shared memory.
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
__device__ __forceinline__ void add_dq(const Params& p,
                                       const Place& at,
                                       const Smem& smem,
                                       int64 slot,
                                       bool special_k,
                                       bool is_first) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
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
#pragma unroll
    for (int n = 0; n < 2 * kDqBlocksOfWarp; ++n) {
        const int col16 = block + n / 2 * kDqWarpsX;
        if (kDqBlocks % kDqWarpsX != 0 && col16 >= kDqBlocks) break;
#pragma unroll
        for (int s = 0; s < kDqSlabs; ++s) {
            const float(&x)[4] = dq[s][n];
            float* const to = dq_sums(p, slot, slab + s, col / 8 + 2 * col16 + n % 2);
            if (is_first) {
                using Four = hw::Vec<float, 4>;
                hw::store(reinterpret_cast<Four*>(to), Four{{x[0], x[1], x[2], x[3]}});
            } else {
                hw::reduce_add(to, x);
            }
        }
    }
}

// Clears a tile of infinities and NaN, for add_special() to see to them.
template <class Tile>
__device__ __forceinline__ void clear(Tile& tile, Smem& smem) {
    if (threadIdx.x == 0) smem.special = 1;
    special::clear<plan::kThreads>(tile);
}

template <bool kPlain>
__device__ __forceinline__ void turn(const Params& p,
                                     const Entry& entry,
                                     const Place& at,
                                     Smem& smem,
                                     Sums& sums,
                                     Visit visit,
                                     int slot,
                                     bool special_k) {
    const int32 query = visit.tile * plan::kTileQ;
    const Scores score = Scores::of(p, entry, visit.head);
    auto& q = smem.q[slot];
    auto& dout = smem.dout[slot];

    Fragments s, dp;
    fragment::clear(s);
    fragment::add_a_bt(s, smem.k, at.row, q, at.query);
    fragment::clear(dp);
    fragment::add_a_bt(dp, smem.v, at.row, dout, at.query);
    gradients<kPlain>(s, dp, smem.rows[slot] + at.query, score, query + at.query,
                      at.first_key + at.row);
    fragment::store_rounded(smem.factors[0], dp, at.row, at.query);
    if (kThroughShared) fragment::store_rounded(smem.factors[kThroughShared], s, at.row, at.query);

    const int64 sums_slot = query_slot<plan::kTileQ>(p, entry, visit.head, visit.tile);
    const int32 turns_before = at.first_key / plan::kTileKv -
                               score.band.key_tiles(query, plan::kTileQ, plan::kTileKv).first;
    if (p.dq.data && threadIdx.x == 0) {
        hw::semaphore_wait(dq_turn(p, sums_slot, at.split), turns_before);
    }
    __syncthreads();
    if (!kPlain) {
        if (special::any<plan::kThreads>(q)) clear(q, smem);
        if (special::any<plan::kThreads>(dout)) clear(dout, smem);
    }
    if (p.dq.data) add_dq(p, at, smem, sums_slot, !kPlain && special_k, turns_before == 0);
    add_product(sums.dv, s, smem.factors[kThroughShared], at.row, dout, at.col_v);
    add_product(sums.dk, dp, smem.factors[0], at.row, q, at.col);
}

__device__ __forceinline__ void write_results(const Params& p,
                                              const Entry& entry,
                                              const Scores& score,
                                              int32 head,
                                              const Place& at,
                                              const Sums& sums) {
    if (!p.dk.data) return;
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

// Adds what is special in Q, dout and K, in query tiles from which something is hidden, to the results
// of backward_tile(). Not inlined: what both work out would be kept in registers meanwhile.
__device__ __noinline__ void add_special(const Params& p, int64 index, Smem& smem) {
    const int64 part = interleaved<Keys, plan::kTileKv>(p, index / plan::kSplits);
    const int split = static_cast<int>(index % plan::kSplits);
    Work work;
    work_at<Keys, plan::kTileKv>(p, part, work);
    const Entry& entry = work.entry;
    const Place at = place_of(work.tile, split);
    const Scores any = Scores::of(p, entry, 0);
    const TileRange queries = any.band.query_tiles(at.first_key, plan::kTileKv, plan::kTileQ);
    const TileRange plain = any.plain_query_tiles(at.first_key, plan::kTileKv, plan::kTileQ);
    const int32 group = p.heads_q / p.heads_kv;
    const Matrix dk = key_matrix(p.dk, entry, work.head, p.head_dim);
    const Matrix dv = key_matrix(p.dv, entry, work.head, p.head_dim_v);
    const int32 tiles = queries.last - queries.first;
    for (int32 i = 0; i < group * tiles; ++i) {
        const Visit visit = {work.head * group + i / tiles, queries.first + i % tiles};
        if (visit.tile >= plain.first && visit.tile < plain.last) continue;
        const int32 query = visit.tile * plan::kTileQ;
        const Scores score = Scores::of(p, entry, visit.head);
        __syncthreads();
        copy(p, entry, smem, visit, 0);
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
        const int warp = static_cast<int>(threadIdx.x) / 32;
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

__device__ __forceinline__ void backward_tile(const Params& p,
                                              const Work& work,
                                              int split,
                                              Smem& smem) {
    const Entry& entry = work.entry;
    const Place at = place_of(work.tile, split);
    const Scores any = Scores::of(p, entry, 0);
    const TileRange queries =
        any.band.query_tiles(at.first_key, plan::kTileKv, plan::kTileQ);
    const TileRange plain = any.plain_query_tiles(at.first_key, plan::kTileKv, plan::kTileQ);
    const int32 group = p.heads_q / p.heads_kv;
    const int32 turns = group * (queries.last - queries.first);
    Sums sums;
    fragment::clear(sums.dk);
    fragment::clear(sums.dv);

    // Heads in order, and the queries of each from the last to the first.
    Visit visit = {work.head * group, queries.last - 1};
    auto next = [&](Visit v) -> Visit {
        if (v.tile > queries.first) return {v.head, v.tile - 1};
        return {v.head + 1, queries.last - 1};
    };
    bool special_k = false;  // K holds infinities or NaN, and some pairs are hidden
    if (turns > 0) {
        fragment::copy<plan::kAligned, plan::kThreads>(
            smem.k, key_matrix(p.k, entry, work.head, p.head_dim), at.first_key);
        fragment::copy<plan::kAligned, plan::kThreads>(
            smem.v, key_matrix(p.v, entry, work.head, p.head_dim_v), at.first_key);
        if (plan::kSlots > 1) copy(p, entry, smem, visit, 0);
        hw::cp_async_commit();
        if (plain.last - plain.first < queries.last - queries.first) {
            hw::cp_async_wait<0>();
            __syncthreads();
            special_k = special::any<plan::kThreads>(smem.k);
            if (threadIdx.x == 0) smem.special = special_k;
        }
    }
    int* taken = nullptr;  // the turn of the previous visit: the next in order may go on
    for (int32 i = 0; i < turns; ++i) {
        const int slot = i % plan::kSlots;
        const Visit now = visit;
        visit = next(visit);
        if (plan::kSlots == 1) {
            __syncthreads();
            copy(p, entry, smem, now, 0);
            hw::cp_async_commit();
        }
        hw::cp_async_wait<0>();
        __syncthreads();
        if (taken && threadIdx.x == 0) hw::semaphore_add(taken, 1);
        if (plan::kSlots > 1) {
            if (i + 1 < turns) copy(p, entry, smem, visit, slot ^ 1);
            hw::cp_async_commit();
        }
        if (now.tile >= plain.first && now.tile < plain.last) {
            turn<true>(p, entry, at, smem, sums, now, slot, false);
        } else {
            turn<false>(p, entry, at, smem, sums, now, slot, special_k);
        }
        if (p.dq.data) {
            taken = dq_turn(p, query_slot<plan::kTileQ>(p, entry, now.head, now.tile), split);
        }
    }
    if (taken) {
        __syncthreads();
        if (threadIdx.x == 0) hw::semaphore_add(taken, 1);
    }
    write_results(p, entry, any, work.head, at, sums);
}

extern "C" __global__ void __launch_bounds__(plan::kThreads, plan::kBlocksPerSm)
    backward_mma(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int64 parts = work_parts<Keys, plan::kTileKv>(p) * plan::kSplits;
    for (int64 index = blockIdx.x; index < parts; index += gridDim.x) {
        if (index != blockIdx.x) __syncthreads();  // all have finished the previous part
        const int64 part = interleaved<Keys, plan::kTileKv>(p, index / plan::kSplits);
        const int split = static_cast<int>(index % plan::kSplits);
        if (threadIdx.x == 0) smem.special = 0;
        Work work;
        if (work_at<Keys, plan::kTileKv>(p, part, work)) {
            backward_tile(p, work, split, smem);
            __syncthreads();
            if (smem.special) add_special(p, index, smem);
        }
    }
}
