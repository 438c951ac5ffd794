// SPDX-License-Identifier: Apache-2.0
// A tile of products becomes probabilities and gradients of scores, in the backward: on fragments
// (fragment.cuh) whose rows are keys and whose columns are queries.
#pragma once
#include "parts/columns.cuh"
#include "parts/fragment.cuh"
#include "parts/gradient_mma.cuh"
#include "parts/score.cuh"
#include "parts/softmax_lazy.cuh"

namespace transposed {

// Options that make a score more than scale * product.
constexpr bool kScored = plan::kSoftcap || plan::kBias || plan::kAlibi;

// Calls visit(slab, n, i, query, key) for each pair that the lane holds a score of; `query` and
// `key` are the first of the fragments.
template <int kSlabs, int kQueries8, class Visitor>
__device__ __forceinline__ void for_each_pair(int32 query, int32 key, Visitor visit) {
#pragma unroll
    for (int n = 0; n < kQueries8; ++n) {
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                visit(slab, n, i, query + 8 * n + fragment::col_of(i),
                      key + fragment::kSlab * slab + fragment::row_of(i));
            }
        }
    }
}

// The product of a hidden pair, where options do not say that it is.
__device__ __forceinline__ float hidden_product(const Scores& score) {
    return score.scale < 0.0f ? softmax::infinity<float>() : -softmax::infinity<float>();
}

// Marks the products of pairs that are hidden, where gradients() has no other way to know.
template <int kSlabs, int kQueries8>
__device__ __forceinline__ void hide(float (&s)[kSlabs][kQueries8][4],
                                     const Scores& score,
                                     int32 query,
                                     int32 key) {
    if (kScored) return;
    const float hidden = hidden_product(score);
    uint32 seen[kSlabs][2];  // of a lane's keys
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32 row = key + fragment::kSlab * slab + fragment::row_of(2 * r);
            seen[slab][r] = columns::inside<kQueries8>(score.band.queries_of(row), query);
        }
    }
    for_each_pair<kSlabs, kQueries8>(
        query, key, [&](int slab, int n, int i, int32 at_query, int32 at_key) {
            if (!columns::holds(seen[slab][i / 2], n, i % 2) || !score.shown(at_query, at_key))
                s[slab][n][i] = hidden;
        });
}

// Products become weights (P after dropout) and gradients of scores. Those of hidden pairs are 0,
// whatever else there is of their rows.
template <bool kPlain, int kSlabs, int kQueries8>
__device__ __forceinline__ void gradients(float (&s)[kSlabs][kQueries8][4],
                                          float (&dp)[kSlabs][kQueries8][4],
                                          const RowStats* rows,
                                          const Scores& score,
                                          int32 query,
                                          int32 key) {
    // Not 0, or -inf would not remain hidden.
    const float scale = score.scale < 0.0f ? -score.unit() : score.unit();
    const float hidden = hidden_product(score);
    RowStats row[2];
    Scores::Row randoms[2];
    for_each_pair<kSlabs, kQueries8>(
        query, key, [&](int slab, int n, int i, int32 at_query, int32 at_key) {
            if (slab == 0 && i < 2) {
                row[i] = rows[8 * n + fragment::col_of(i)];
                randoms[i] = score.row(at_query);
            }
            float& x = s[slab][n][i];
            float& dx = dp[slab][n][i];
            float slope = 1.0f;
            bool seen = true;
            if constexpr (kScored) {
                const Score at = score.at(x, at_query, at_key, !kPlain);
                x = hw::exp2_approx((at.value - row[i % 2].lse) * softmax::kLog2e);
                slope = at.slope;
                seen = at.seen;
            } else {
                if (!kPlain) seen = x != hidden;
                x = hw::exp2_approx(fmaf(x, scale, -row[i % 2].lse) * softmax::kLog2e);
            }
            dx = score.survives(dx, randoms[i % 2], at_key) * score.kept_factor();
            dx = x * (dx - row[i % 2].delta) * slope;
            x = score.survives(x, randoms[i % 2], at_key);
            if (!seen) x = dx = 0.0f;
        });
}

}  // namespace transposed
