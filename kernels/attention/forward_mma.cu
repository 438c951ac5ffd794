// SPDX-License-Identifier: Apache-2.0
// Attention forward by mma.sync, for float16 and bfloat16 on sm_80 and later. What it computes is
// in forward_simt.cu.
//
// A block computes kTileQ rows of one head, each of its warps kSlabs slabs of 16. It walks the key
// tiles that these rows see. Scores, probabilities and results stay in registers: the fragment of
// scores that one product leaves is the left operand of the next.
//
//     copy       q k0 v0 | k1 v1           | k2 v2           |
//     compute            | s = q k0, out += p v0 | s = q k1, out += p v1 |
//
// Tiles of a bias or mask come with those of K and V (pair_tile.cuh) where their rows can be
// copied. Two slots of all these take turns. The one barrier of a turn says two things: the tiles
// copied during the turn before are there, and all have finished with the slot that is filled next.
// While one block waits another of the multiprocessor computes.
//
// Budget: a thread holds kSlabs * (kTileKv + kDimV) / 2 accumulators; arch/mma.py has the tiles
// that leave no spills.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "hw/sync.cuh"
#include "parts/fragment.cuh"
#include "parts/exponent.cuh"
#include "parts/pair_tile.cuh"
#include "parts/pipeline.cuh"
#include "parts/special.cuh"
#include "parts/work.cuh"

constexpr int kSlabs = plan::kTileQ / (fragment::kSlab * plan::kWarps);
constexpr int kKeys8 = plan::kTileKv / 8;  // columns of a fragment of scores
constexpr int kCols8 = plan::kDimV / 8;    // and of results
constexpr int kRows = 2 * kSlabs;          // that a lane has elements of
constexpr int kRowsOfWarp = fragment::kSlab * kSlabs;

constexpr bool kPairs = pair_tile::kCopiesBias || pair_tile::kCopiesMask;

using online::kScored;
using online::LazyRow;

struct Slot : pair_tile::Both {
    fragment::Tile<plan::kTileKv, plan::kDim> k;
    fragment::Tile<plan::kTileKv, plan::kDimV> v;
};
struct Smem {
    fragment::Tile<plan::kTileQ, plan::kDim> q;
    Slot slots[2];
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

__device__ __forceinline__ void write_results(const Params& p,
                                              const Work& work,
                                              const Scores& score,
                                              int32 query,
                                              const LazyRow (&rows)[kRows],
                                              const float (&out)[kSlabs][kCols8][4]) {
    const Matrix to = query_matrix(p.out, work.entry, work.head, p.head_dim_v);
    float factors[kRows];
    online::conclude(factors, p, work.entry, work.head, score, rows, query);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int32 row = online::row_at(query, r);
        const float inverse = factors[r];
#pragma unroll
        for (int n = 0; n < kCols8; ++n) {
            const float (&x)[4] = out[r / 2][n];
            fragment::write_two(to, x[r % 2 * 2] * inverse, x[r % 2 * 2 + 1] * inverse, row,
                                8 * n + fragment::col_of(0));
        }
    }
}

// What a warp knows of its rows while it walks the keys.
struct State {
    LazyRow rows[kRows];
    Scores::Row randoms[kRows];
    online::Exponent exponent;
    float out[kSlabs][kCols8][4];
    bool large;  // a row of the warp has a large shift
};

// One turn of the main loop: a tile of keys. Most turns are plain: the band hides nothing of the
// tile from the block, bias and mask are in shared memory as far as there are any, and no shift of
// the warp is large. `special`: values of the tile that are infinite or NaN may be hidden. With
// bias or mask it is known at the barrier of the turn, for any tile may hide some; else it is said
// of tiles that hide something, and looked for.
template <bool kPlain>
__device__ __forceinline__ void turn(State& state,
                                     const fragment::Tile<plan::kTileQ, plan::kDim>& q,
                                     Slot& tiles,
                                     const Scores& score,
                                     int warp_row,
                                     int32 query,
                                     int32 key,
                                     float factor,
                                     bool special = false) {
    bool cut = false;  // something of the tile is hidden from the warp
    if constexpr (!kPlain && !kPairs) {
        cut = uniform(score.hides(query, kRowsOfWarp, key, plan::kTileKv));
    }
    const PairWords<kSlabs, kKeys8, false> words = {};
    float s[kSlabs][kKeys8][4];
    fragment::clear(s);
    fragment::add_a_bt(s, q, warp_row, tiles.k);
    if constexpr (kPlain && online::kFuses && !kPairs) {
        if (online::fuses(state.rows, s, state.exponent, score, query, key)) {
            online::exponentials_of_products(s, state.rows, state.exponent, score, state.randoms,
                                             query, key);
            fragment::add_x_b(state.out, s, tiles.v);
            return;
        }
    }
    if constexpr (kPairs) {
        pair_tile::finish_scores<!kPlain, !kPlain>(s, tiles, score, query, key, warp_row);
    } else if (!kPlain && cut) {
        online::finish_scores<true, false>(s, words, score, query, key);
    } else if (kScored) {
        online::finish_scores<false, false>(s, words, score, query, key);
    }
    const bool grows = online::outgrown(state.rows, s, factor);
    if (grows) {
        float scales[kRows];
        state.large = online::raise(state.rows, scales, s, factor);
        online::rescale(state.out, scales);
    }
    float shifts[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) shifts[r] = state.rows[r].shift(factor);
    if ((!kPlain || grows) && state.large) online::compare_first(s, state.rows, shifts);
    online::exponentials(s, state.rows, shifts, score, state.randoms, key, factor);
    if (!kPlain && special && (kPairs || special::any<plan::kThreads>(tiles.v))) {
        uint64 seen[kSlabs];
        online::look<kKeys8>(seen, score, query, key);
        special::add(state.out, tiles.v, [&](int slab, int i, int k) {
            return seen[slab] >> (4 * (k / 8) + i + k % 2) & 1;
        });
        __syncthreads();
        special::clear<plan::kThreads>(tiles.v);
    }
    fragment::add_x_b(state.out, s, tiles.v);
}

__device__ __forceinline__ void forward_tile(const Params& p, const Work& work, Smem& smem) {
    const Entry& entry = work.entry;
    const Scores score = Scores::of(p, entry, work.head);
    const int32 head_kv = work.head / (p.heads_q / p.heads_kv);
    const Matrix gQ = query_matrix(p.q, entry, work.head, p.head_dim);
    Matrix gK = key_matrix(p.k, entry, head_kv, p.head_dim);
    Matrix gV = key_matrix(p.v, entry, head_kv, p.head_dim_v);
    const int32 first_query = work.tile * plan::kTileQ;
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * kRowsOfWarp;
    const int32 query = first_query + warp_row;
    const TileRange keys = score.band.key_tiles(first_query, plan::kTileQ, plan::kTileKv);
    const TileRange plain =
        pair_tile::in_place(score)
            ? TileRange{0, 0}
            : score.band.full_key_tiles(first_query, plan::kTileQ, plan::kTileKv);
    const float factor = online::factor_of(score);

    State state;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        state.rows[r] = LazyRow::empty();
        state.randoms[r] = score.row(online::row_at(query, r));
    }
    state.large = false;
    if constexpr (online::kFuses) state.exponent = online::Exponent::of(score);
    fragment::clear(state.out);

    auto copy_next = [&](int slot, int32 tile) {
        const int32 key = tile * plan::kTileKv;
        Slot& to = smem.slots[slot];
        fragment::copy<plan::kAligned, plan::kThreads>(to.k, gK, 0);
        fragment::copy<plan::kAligned, plan::kThreads>(to.v, gV, 0);
        gK.skip(plan::kTileKv);
        gV.skip(plan::kTileKv);
        to.copy<plan::kThreads>(score, first_query, key);
    };
    const bool any = keys.first < keys.last;
    if (any) {
        gK.skip(keys.first * plan::kTileKv);
        gV.skip(keys.first * plan::kTileKv);
        fragment::copy<plan::kAligned, plan::kThreads>(smem.q, gQ, first_query);
        copy_next(0, keys.first);
    }
    hw::cp_async_commit();
    if (any && !kScored && score.scale < 0.0f) {  // scores are in units of |scale|
        hw::cp_async_wait<0>();
        __syncthreads();
        fragment::negate<plan::kThreads>(smem.q);
    }
    int slot = 0;
    for (int32 tile = keys.first; tile < keys.last; ++tile, slot ^= 1) {
        Slot& tiles = smem.slots[slot];
        hw::cp_async_wait<0>();
        const bool is_plain = plain.holds(tile);
        bool special = !is_plain;
        if constexpr (kPairs) {
            special =
                __syncthreads_or(fragment::copied_special<plan::kAligned, plan::kThreads>(tiles.v));
        } else {
            __syncthreads();
        }
        if (tile + 1 < keys.last) copy_next(slot ^ 1, tile + 1);
        hw::cp_async_commit();
        const int32 key = tile * plan::kTileKv;
        if (is_plain && !state.large && !(kPairs && special)) {
            turn<true>(state, smem.q, tiles, score, warp_row, query, key, factor);
        } else {
            // `query` worked out anew, as below: ptxas for sm_80 would keep it twice, and spill.
            turn<false>(state, smem.q, tiles, score, warp_row, hw::forget(first_query) + warp_row,
                        key, factor, special);
        }
    }
    write_results(p, work, score, hw::forget(first_query) + warp_row, state.rows, state.out);
}

extern "C" __global__ void __launch_bounds__(plan::kThreads, plan::kBlocksPerSm)
    forward_mma(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int64 parts = work_parts<Queries, plan::kTileQ>(p);
    for (int64 index = blockIdx.x; index < parts; index += gridDim.x) {
        if (index != blockIdx.x) __syncthreads();  // all have finished the previous part
        Work work;
        if (work_at<Queries, plan::kTileQ>(p, index, work)) forward_tile(p, work, smem);
    }
}
