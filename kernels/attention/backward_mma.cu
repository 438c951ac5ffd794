// SPDX-License-Identifier: Apache-2.0
// The gradients by mma.sync, for float16 and bfloat16 on sm_80 and later:
//
//     dk[j] = scale * sum_i dscore[i][j] slope[i][j] q[i],   dv[j] = sum_i P[i][j] dout[i],
//     dq[i] = scale * sum_j dscore[i][j] slope[i][j] k[j],   dscore[i][j] = P[i][j] (dP[i][j] - delta[i]),
//     P = exp(score - lse),   dP[i][j] = <dout[i], v[j]>,   score and its slope: parts/score.cuh
//
// A block owns kTileKv keys of one key head, each warp kSlabs slabs of 16 of them, and keeps dk and dv
// in registers. It walks the query heads of the group and, in each, the query tiles that see these
// keys. Scores are transposed (rows are keys), so that the fragments of P^T and dscore^T that two
// products leave are left operands of the next two; only dq, which sums over keys and so over warps,
// takes dscore from shared memory:
//
//     copy       q0 dout0 | q1 dout1                                  |
//     compute             | s = k q^T, dp = v dout^T, dv += p dout    | (turn) dq = ds^T k
//                         | ds to shared memory, dk += ds q           | dq to its sums
//
// Sums of dq are in workspace (parts/gradient_mma.cuh). Key tiles add theirs in order, which makes the
// result deterministic: a block waits until those before it have had their turn with this query tile.
// They were launched earlier and walk the queries in the same order, from the last to the first, so
// that nobody waits for long: tile j begins one step behind tile j - 1. Where causal order hides
// queries, it is the first ones, and the longest walks are launched first. The first of a tile's turns
// stores, so that sums need not be zeroed.
//
// kSplits: a block computes only one in kSplits of the columns of dk, dv and dq, for large heads.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "hw/reduce.cuh"
#include "hw/semaphore.cuh"
#include "parts/fragment.cuh"
#include "parts/gradient_mma.cuh"
#include "parts/score.cuh"
#include "parts/work.cuh"

using fragment::kSlab;

constexpr int kSlabs = plan::kTileKv / (kSlab * plan::kWarps);
constexpr int kRowsOfWarp = kSlab * kSlabs;
constexpr int kQueries8 = plan::kTileQ / 8;                  // columns of a fragment of scores
constexpr int kCols8 = plan::kDim / 8 / plan::kSplits;        // of dk
constexpr int kColsV8 = plan::kDimV / 8 / plan::kSplits;      // of dv
constexpr int kDqWarpsX = plan::kWarps / plan::kDqWarps;     // warps side by side for dq
constexpr int kDqSlabs = plan::kTileQ / kSlab / plan::kDqWarps;
constexpr int kDqCols16 = (kCols8 / 2 + kDqWarpsX - 1) / kDqWarpsX;

// Options that make a score more than scale * product.
constexpr bool kScored = plan::kSoftcap || plan::kBias || plan::kAlibi;

using TileQ = fragment::Tile<plan::kTileQ, plan::kDim>;
using TileDout = fragment::Tile<plan::kTileQ, plan::kDimV>;
using TileK = fragment::Tile<plan::kTileKv, plan::kDim>;
using TileV = fragment::Tile<plan::kTileKv, plan::kDimV>;
using Scores8 = float[kSlabs][kQueries8][4];

struct Smem {
    TileK k;
    TileV v;
    TileQ q[plan::kSlots];
    TileDout dout[plan::kSlots];
    fragment::Tile<plan::kTileKv, plan::kTileQ> dscores;  // transposed
    RowStats rows[plan::kSlots][plan::kTileQ];
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

// One turn of the main loop: a query tile of one query head of the group.
struct Visit {
    int32 head, tile;
};

// What a block knows.
struct Block {
    const Params& p;
    const Entry& entry;
    Smem& smem;
    int split;
    int warp_row;     // the warp's first row in tiles of keys
    int32 first_key;  // of the block
    TileRange queries, plain;
    bool special_k;
};

// Starts to bring what a visit needs.
__device__ __forceinline__ void copy(const Block& b, Visit visit, int slot) {
    const Params& p = b.p;
    const int32 first = visit.tile * plan::kTileQ;
    fragment::copy<plan::kAligned, plan::kThreads>(b.smem.q[slot],
                                   query_matrix(p.q, b.entry, visit.head, p.head_dim), first);
    fragment::copy<plan::kAligned, plan::kThreads>(b.smem.dout[slot],
                                   query_matrix(p.dout, b.entry, visit.head, p.head_dim_v), first);
    const RowStats* const rows =
        row_stats(p, query_slot<plan::kTileQ>(p, b.entry, visit.head, visit.tile));
    for (int i = 2 * static_cast<int>(threadIdx.x); i < plan::kTileQ; i += 2 * plan::kThreads) {
        hw::cp_async<16>(&b.smem.rows[slot][i], rows + i, true);
    }
}

// Products become weights (P after dropout) and gradients of scores; `query` and `key` are the first
// of the tile and of the warp.
template <bool kPlain>
__device__ __forceinline__ void gradients(Scores8& s,
                                          Scores8& dp,
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

// Which pairs of a warp's fragments are visible; see fragment::add_special. Rare, so that it is to be
// short. kTransposed: rows are keys.
template <bool kTransposed, int kCount, int kColumns8>
__device__ __forceinline__ void look(uint64 (&seen)[kCount],
                                     const Scores& score,
                                     int32 row,
                                     int32 col) {
#pragma unroll
    for (int slab = 0; slab < kCount; ++slab) {
        seen[slab] = 0;
#pragma unroll 1
        for (int bit = 0; bit < 4 * kColumns8; ++bit) {
            const int32 at_row = row + kSlab * slab + fragment::row_of(bit % 4);
            const int32 at_col = col + bit / 4 * 8 + fragment::col_of(bit % 4);
            if (kTransposed ? score.visible(at_col, at_row) : score.visible(at_row, at_col)) {
                seen[slab] |= uint64{1} << bit;
            }
        }
    }
}

// sums += x b of a visit, where rows of x are keys of the warp.
template <bool kPlain, int kColumns8, int kCols>
__device__ __forceinline__ void add_product(float (&sums)[kSlabs][kColumns8][4],
                                            const Scores8& x,
                                            const fragment::Tile<plan::kTileQ, kCols>& b,
                                            int col,
                                            const Scores& score,
                                            int32 query,
                                            int32 key) {
    if (!kPlain && __syncthreads_or(fragment::has_special<plan::kThreads>(b))) {
        fragment::add_x_b<true>(sums, x, b, col);
        uint64 seen[kSlabs];
        look<true, kSlabs, kQueries8>(seen, score, key, query);
        fragment::add_special<1, kColumns8 / 2>(sums, seen, b, col, 0);
    } else {
        fragment::add_x_b(sums, x, b, col);
    }
}

// The block's part of dq of a visit, to be added to its sums.
template <bool kPlain>
__device__ __forceinline__ void add_dq(const Block& b,
                                       const Scores& score,
                                       int64 slot,
                                       int32 query,
                                       bool first_turn) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int slab = warp / kDqWarpsX * kDqSlabs;
    const int col16 = warp % kDqWarpsX;  // and every kDqWarpsX-th
    const int first_col = b.split * kCols8 * 8;
    float dq[kDqSlabs][2 * kDqCols16][4];
    fragment::clear(dq);
    if (!kPlain && b.special_k) {
        fragment::add_at_b<true, kDqWarpsX, kCols8 / 2>(dq, b.smem.dscores, kSlab * slab, b.smem.k,
                                                        first_col, col16);
        uint64 seen[kDqSlabs];
        look<false, kDqSlabs, plan::kTileKv / 8>(seen, score, query + kSlab * slab, b.first_key);
        fragment::add_special<kDqWarpsX, kCols8 / 2>(dq, seen, b.smem.k, first_col, col16);
    } else {
        fragment::add_at_b<false, kDqWarpsX, kCols8 / 2>(dq, b.smem.dscores, kSlab * slab,
                                                         b.smem.k, first_col, col16);
    }
#pragma unroll
    for (int s = 0; s < kDqSlabs; ++s) {
#pragma unroll
        for (int n = 0; n < 2 * kDqCols16; ++n) {
            const int col8 = 2 * (col16 + n / 2 * kDqWarpsX) + n % 2;
            if (col8 >= kCols8) break;
            float* const to = dq_sums(b.p, slot, slab + s, b.split * kCols8 + col8);
            if (first_turn) {
                using Four = hw::Vec<float, 4>;
                const auto& x = dq[s][n];
                hw::store(reinterpret_cast<Four*>(to), Four{{x[0], x[1], x[2], x[3]}});
            } else {
                hw::reduce_add(to, dq[s][n]);
            }
        }
    }
}

struct Sums {
    float dk[kSlabs][kCols8][4];
    float dv[kSlabs][kColsV8][4];
};

template <bool kPlain>
__device__ __forceinline__ void turn(const Block& b, Sums& sums, Visit visit, int slot) {
    Smem& smem = b.smem;
    const int32 query = visit.tile * plan::kTileQ;
    const int32 key = b.first_key + b.warp_row;
    const Scores score = Scores::of(b.p, b.entry, visit.head);
    const int first_col = b.split * kCols8 * 8, first_col_v = b.split * kColsV8 * 8;

    Scores8 s, dp;
    fragment::clear(s);
    fragment::add_a_bt(s, smem.k, b.warp_row, smem.q[slot]);
    fragment::clear(dp);
    fragment::add_a_bt(dp, smem.v, b.warp_row, smem.dout[slot]);
    gradients<kPlain>(s, dp, smem.rows[slot], score, query, key);
    fragment::store_rounded(smem.dscores, dp, b.warp_row);
    add_product<kPlain>(sums.dv, s, smem.dout[slot], first_col_v, score, query, key);
    add_product<kPlain>(sums.dk, dp, smem.q[slot], first_col, score, query, key);
    if (!b.p.dq.data) return;

    const int64 at = query_slot<plan::kTileQ>(b.p, b.entry, visit.head, visit.tile);
    const int32 before = b.first_key / plan::kTileKv -
                         score.band.key_tiles(query, plan::kTileQ, plan::kTileKv).first;
    if (threadIdx.x == 0) hw::semaphore_wait(dq_turn(b.p, at, b.split), before);
    __syncthreads();
    add_dq<kPlain>(b, score, at, query, before == 0);
}

__device__ __forceinline__ void write_results(const Block& b, const Scores& score, int32 head, const Sums& sums) {
    const Params& p = b.p;
    if (!p.dk.data) return;
    const Matrix dk = key_matrix(p.dk, b.entry, head, p.head_dim);
    const Matrix dv = key_matrix(p.dv, b.entry, head, p.head_dim_v);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
        const int32 row = b.first_key + b.warp_row + kSlab * slab;
#pragma unroll
        for (int n = 0; n < kCols8; ++n) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = sums.dk[slab][n][i] * score.scale;
            fragment::write(dk, x, row, 8 * (b.split * kCols8 + n));
        }
#pragma unroll
        for (int n = 0; n < kColsV8; ++n) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = sums.dv[slab][n][i] * score.kept_factor();
            fragment::write(dv, x, row, 8 * (b.split * kColsV8 + n));
        }
    }
}

__device__ __forceinline__ void backward_tile(const Params& p, const Work& work, int split, Smem& smem) {
    const Entry& entry = work.entry;
    const int32 group = p.heads_q / p.heads_kv;
    const int32 first_key = work.tile * plan::kTileKv;
    const Scores any = Scores::of(p, entry, 0);
    const TileRange queries = any.band.query_tiles(first_key, plan::kTileKv, plan::kTileQ);
    Block b = {p,
               entry,
               smem,
               split,
               static_cast<int>(threadIdx.x) / 32 * kRowsOfWarp,
               first_key,
               queries,
               any.plain_query_tiles(first_key, plan::kTileKv, plan::kTileQ),
               false};
    Sums sums;
    fragment::clear(sums.dk);
    fragment::clear(sums.dv);

    const int32 first_head = work.head * group;
    const int32 turns = group * (queries.last - queries.first);
    // Heads in order, and the queries of each from the last to the first.
    Visit visit = {first_head, queries.last - 1};
    auto next = [&](Visit v) -> Visit {
        if (v.tile > queries.first) return {v.head, v.tile - 1};
        return {v.head + 1, queries.last - 1};
    };
    if (turns > 0) {
        fragment::copy<plan::kAligned, plan::kThreads>(smem.k, key_matrix(p.k, entry, work.head, p.head_dim),
                                       first_key);
        fragment::copy<plan::kAligned, plan::kThreads>(smem.v, key_matrix(p.v, entry, work.head, p.head_dim_v),
                                       first_key);
        if (plan::kSlots > 1) copy(b, visit, 0);
        hw::cp_async_commit();
        if (b.plain.last - b.plain.first < queries.last - queries.first) {
            hw::cp_async_wait<0>();
            __syncthreads();
            b.special_k = __syncthreads_or(fragment::has_special<plan::kThreads>(smem.k)) != 0;
        }
    }
    int* turn_taken = nullptr;  // of the previous visit: others may go on from there
    int slot = 0;
    for (int32 i = 0; i < turns; ++i) {
        const Visit now = visit;
        visit = next(visit);
        if (plan::kSlots == 1) {
            __syncthreads();
            copy(b, now, 0);
            hw::cp_async_commit();
        }
        hw::cp_async_wait<0>();
        __syncthreads();
        if (turn_taken && threadIdx.x == 0) hw::semaphore_add(turn_taken, 1);
        if (plan::kSlots > 1) {
            if (i + 1 < turns) copy(b, visit, slot ^ 1);
            hw::cp_async_commit();
        }
        if (now.tile >= b.plain.first && now.tile < b.plain.last) {
            turn<true>(b, sums, now, slot);
        } else {
            turn<false>(b, sums, now, slot);
        }
        if (p.dq.data) {
            turn_taken = dq_turn(p, query_slot<plan::kTileQ>(p, entry, now.head, now.tile), split);
        }
        if (plan::kSlots > 1) slot ^= 1;
    }
    if (turn_taken) {
        __syncthreads();
        if (threadIdx.x == 0) hw::semaphore_add(turn_taken, 1);
    }
    write_results(b, any, work.head, sums);
}

extern "C" __global__ void __launch_bounds__(plan::kThreads, plan::kBlocksPerSm)
    backward_mma(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int64 parts = work_parts<Keys, plan::kTileKv>(p) * plan::kSplits;
    for (int64 index = blockIdx.x; index < parts; index += gridDim.x) {
        if (index != blockIdx.x) __syncthreads();  // all have finished the previous part
        Work work;
        if (work_at<Keys, plan::kTileKv>(p, index / plan::kSplits, work)) {
            backward_tile(p, work, static_cast<int>(index % plan::kSplits), smem);
        }
    }
}
