// SPDX-License-Identifier: Apache-2.0
// Attention forward by mma.sync, for float16 and bfloat16 on sm_80 and later. What it computes is in
// forward_simt.cu.
//
// A block computes kTileQ rows of one head, each of its warps kSlabs slabs of 16. It walks the key
// tiles that these rows see. Scores, probabilities and results stay in registers: the fragment of
// scores that one product leaves is the left operand of the next.
//
//     copy       q k0 |  v0      |  k1      |  v1      |  k2 ...
//     compute         |  s = q k0|  out += p v0  ...      | = cp_async_wait and __syncthreads
//
// Each barrier says two things: the tile that was copied is there, and all have finished with the
// one whose place is taken next. While one block waits another of the multiprocessor computes.
//
// Budget: a thread holds kSlabs * (kTileKv + kDimV) / 2 accumulators; arch/mma.py has the tiles that
// leave no spills.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "hw/sync.cuh"
#include "parts/fragment.cuh"
#include "parts/score.cuh"
#include "parts/softmax_lazy.cuh"
#include "parts/work.cuh"

constexpr int kSlabs = plan::kTileQ / (fragment::kSlab * plan::kWarps);
constexpr int kKeys8 = plan::kTileKv / 8;  // columns of a fragment of scores
constexpr int kCols8 = plan::kDimV / 8;    // and of results
constexpr int kRows = 2 * kSlabs;          // that a lane has elements of
constexpr int kRowsOfWarp = fragment::kSlab * kSlabs;

// Options that make a score more than scale * product. Without them scores stay in units of
// products, and the scale is part of the exponential's factor.
constexpr bool kScored = plan::kSoftcap || plan::kBias || plan::kAlibi || plan::kSinks;

struct Smem {
    fragment::Tile<plan::kTileQ, plan::kDim> q;
    fragment::Tile<plan::kTileKv, plan::kDim> k;
    fragment::Tile<plan::kTileKv, plan::kDimV> v;
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

using LazyRow = softmax::LazyRow;

// Calls visit(slab, n, i, query, key) for each pair that the lane holds a score of. `query` and `key`
// are the first of the warp's rows and of the tile.
template <class Visit>
__device__ __forceinline__ void for_each_pair(int32 query, int32 key, Visit visit) {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
        for (int n = 0; n < kKeys8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                visit(slab, n, i, query + fragment::kSlab * slab + fragment::row_of(i),
                      key + 8 * n + fragment::col_of(i));
            }
        }
    }
}

// Products become scores.
__device__ __forceinline__ void finish_scores(
    float (&s)[kSlabs][kKeys8][4], const Scores& score, int32 query, int32 key, bool hides) {
    if (!kScored && score.scale < 0.0f) {
        for_each_pair(0, 0, [&](int slab, int n, int i, int32, int32) {
            s[slab][n][i] = -s[slab][n][i];
        });
    }
    if (kScored || hides) {
        for_each_pair(query, key, [&](int slab, int n, int i, int32 row, int32 col) {
            float& x = s[slab][n][i];
            if constexpr (kScored) {
                x = score.at(x, row, col, hides).value;
            } else {
                if (!score.visible(row, col)) x = -softmax::infinity<float>();
            }
        });
    }
}

// Which of these pairs are visible: bit 4 n + i of seen[slab]. Rare, so that it is to be short.
__device__ __forceinline__ void look(uint64 (&seen)[kSlabs],
                                     const Scores& score,
                                     int32 query,
                                     int32 key) {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
        seen[slab] = 0;
#pragma unroll 1
        for (int bit = 0; bit < 4 * kKeys8; ++bit) {
            const int32 row = query + fragment::kSlab * slab + fragment::row_of(bit % 4);
            const int32 col = key + bit / 4 * 8 + fragment::col_of(bit % 4);
            if (score.visible(row, col)) seen[slab] |= uint64{1} << bit;
        }
    }
}

// Move the references of rows that have outgrown them, and rescale what was summed up.
//
// Whether one has is asked of the scores' bits as integers: the order of positive numbers is the
// same, negative ones are below all of them, and three of them are compared at once. For a limit
// below 0, which says nothing then, the answer is yes.
// Returns whether a row of the warp now has a large shift; `large` is what was returned before.
__device__ __forceinline__ bool raise(LazyRow (&rows)[kRows],
                                      float (&out)[kSlabs][kCols8][4],
                                      const float (&s)[kSlabs][kKeys8][4],
                                      float factor,
                                      float headroom,
                                      bool large) {
    bool grows = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        int largest = -1;
#pragma unroll
        for (int n = 0; n < kKeys8; ++n) {
            const float(&x)[4] = s[r / 2][n];
            largest = hw::max3(largest, __float_as_int(x[r % 2 * 2]),
                               __float_as_int(x[r % 2 * 2 + 1]));
        }
        const float limit = rows[r].limit(headroom);
        grows = grows || limit < 0.0f || largest > __float_as_int(limit);
    }
    if (!__any_sync(0xffffffffu, grows)) return large;
    large = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float largest = -softmax::infinity<float>();
#pragma unroll
        for (int n = 0; n < kKeys8; ++n) {
            const float(&x)[4] = s[r / 2][n];
            largest = softmax::larger(largest, softmax::larger(x[r % 2 * 2], x[r % 2 * 2 + 1]));
        }
        const float scale = rows[r].raise(softmax::row_max<4>(largest), factor);
        large = large || rows[r].is_large(factor);
#pragma unroll
        for (int n = 0; n < kCols8; ++n) {
            out[r / 2][n][r % 2 * 2] *= scale;
            out[r / 2][n][r % 2 * 2 + 1] *= scale;
        }
    }
    return __any_sync(0xffffffffu, large);
}

// Scores become probabilities, up to a factor of the row.
template <bool kLarge>
__device__ __forceinline__ void exponentials(float (&s)[kSlabs][kKeys8][4],
                                             LazyRow (&rows)[kRows],
                                             const Scores& score,
                                             const Scores::Row (&randoms)[kRows],
                                             int32 key,
                                             float factor) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float shift = rows[r].shift(factor);
#pragma unroll
        for (int n = 0; n < kKeys8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& x = s[r / 2][n][r % 2 * 2 + i];
                x = kLarge ? rows[r].exponential(x, factor)
                           : hw::exp2_approx(fmaf(x, factor, -shift));
                rows[r].sum += x;
                if constexpr (plan::kDropout) {
                    x = score.survives(x, randoms[r], key + 8 * n + fragment::col_of(i));
                }
            }
        }
    }
}

__device__ __forceinline__ void write_results(const Params& p,
                                              const Work& work,
                                              const Scores& score,
                                              int32 query,
                                              LazyRow (&rows)[kRows],
                                              const float (&out)[kSlabs][kCols8][4]) {
    const Matrix to = query_matrix(p.out, work.entry, work.head, p.head_dim_v);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float total = softmax::row_sum<4>(rows[r].sum);
        const float inverse = softmax::Row<float>::inverse(total) * score.kept_factor();
        const int32 row = query + fragment::kSlab * (r / 2) + fragment::row_of(r % 2 * 2);
        if (row >= to.rows) continue;
        if (p.lse.data && fragment::lane() % 4 == 0) {
            const Vector lse = vector(p.lse, work.entry, work.head);
            hw::store(lse.at(row), rows[r].log_sum_exp(total, kScored ? 1.0f : score.unit()));
        }
        Element* const at = to.data + row * to.stride_row;
#pragma unroll
        for (int n = 0; n < kCols8; ++n) {
            const int32 col = 8 * n + fragment::col_of(0);
            const float x = out[r / 2][n][r % 2 * 2] * inverse;
            const float y = out[r / 2][n][r % 2 * 2 + 1] * inverse;
            if (to.aligned) {  // rows have whole words
                if (col < to.cols) {
                    hw::store(reinterpret_cast<uint32*>(at + col), hw::pack2<Element>(x, y));
                }
            } else {
                if (col < to.cols) hw::store(at + col * to.stride_col, narrow<Element>(x));
                if (col + 1 < to.cols) {
                    hw::store(at + (col + 1) * to.stride_col, narrow<Element>(y));
                }
            }
        }
    }
}

__device__ __forceinline__ void forward_tile(const Params& p, const Work& work, Smem& smem) {
    const Entry& entry = work.entry;
    const Scores score = Scores::of(p, entry, work.head);
    const int32 head_kv = work.head / (p.heads_q / p.heads_kv);
    const Matrix gQ = query_matrix(p.q, entry, work.head, p.head_dim);
    const Matrix gK = key_matrix(p.k, entry, head_kv, p.head_dim);
    const Matrix gV = key_matrix(p.v, entry, head_kv, p.head_dim_v);
    const int32 first_query = work.tile * plan::kTileQ;
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * kRowsOfWarp;
    const int32 query = first_query + warp_row;
    const TileRange keys = score.band.key_tiles(first_query, plan::kTileQ, plan::kTileKv);
    const float factor = kScored ? softmax::kLog2e : score.unit() * softmax::kLog2e;
    const float headroom = softmax::kHeadroom / factor;

    LazyRow rows[kRows];
    Scores::Row randoms[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        rows[r] = LazyRow::empty();
        if constexpr (plan::kSinks) {
            if (p.sinks.data && !entry.slack) {
                const float sink = hw::load(head_value(p.sinks, 0, work.head));
                rows[r] = LazyRow::with_sink(sink, factor, fragment::lane() % 4 == 0);
            }
        }
        randoms[r] =
            score.row(query + fragment::kSlab * (r / 2) + fragment::row_of(r % 2 * 2));
    }
    bool large = kScored;  // until the first tile tells: a sink may be large
    float out[kSlabs][kCols8][4];
    fragment::clear(out);

    if (keys.first < keys.last) {
        fragment::copy<plan::kThreads>(smem.q, gQ, first_query);
        fragment::copy<plan::kThreads>(smem.k, gK, keys.first * plan::kTileKv);
    }
    hw::cp_async_commit();
    for (int32 tile = keys.first; tile < keys.last; ++tile) {
        const int32 key = tile * plan::kTileKv;
        const bool block_hides = score.hides(first_query, plan::kTileQ, key, plan::kTileKv);
        const bool hides =
            block_hides && score.hides(query, kRowsOfWarp, key, plan::kTileKv);
        hw::cp_async_wait<0>();
        __syncthreads();
        fragment::copy<plan::kThreads>(smem.v, gV, key);
        hw::cp_async_commit();

        float s[kSlabs][kKeys8][4];
        fragment::clear(s);
        fragment::add_a_bt(s, smem.q, warp_row, smem.k);

        hw::cp_async_wait<0>();
        __syncthreads();
        if (tile + 1 < keys.last) fragment::copy<plan::kThreads>(smem.k, gK, key + plan::kTileKv);
        hw::cp_async_commit();
        const bool careful =
            block_hides && __syncthreads_or(fragment::has_special<plan::kThreads>(smem.v)) != 0;

        finish_scores(s, score, query, key, hides);
        large = raise(rows, out, s, factor, headroom, large);
        if (large) {
            exponentials<true>(s, rows, score, randoms, key, factor);
        } else {
            exponentials<false>(s, rows, score, randoms, key, factor);
        }
        if (careful) {
            uint64 seen[kSlabs];
            look(seen, score, query, key);
            fragment::add_special(out, seen, smem.v);
            __syncthreads();
            fragment::clear_special<plan::kThreads>(smem.v);
            __syncthreads();
        }
        fragment::add_x_b(out, s, smem.v);
    }
    write_results(p, work, score, query, rows, out);
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
