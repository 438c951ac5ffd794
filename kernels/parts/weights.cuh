// SPDX-License-Identifier: Apache-2.0
// A tile of products becomes weights and then gradients of scores, in kernels that compute one
// gradient, of calls without options: on fragments (fragment.cuh) of 16 rows, which are queries or
// keys. As transposed.cuh, in two steps, since a gradient's product may still run in the first.
#pragma once
#include "parts/columns.cuh"
#include "parts/fragment.cuh"
#include "parts/row_stats.cuh"
#include "parts/score.cuh"
#include "parts/softmax_lazy.cuh"

namespace weights {

// What a hidden pair has for a weight until it has a gradient; no other weight is negative.
constexpr float kHidden = -1.0f;

// Calls visit(n, i, stats) for each pair that the lane holds. `own` is of the lane's two rows, if
// they are queries; else `columns` is of all queries of the tile.
template <bool kRowsAreQueries, int kCols8, class Visitor>
__device__ __forceinline__ void for_each_pair(const RowStats (&own)[2],
                                              const RowStats* columns,
                                              Visitor visit) {
    struct alignas(16) Two {
        RowStats at[2];
    };
    const Two* const twos = reinterpret_cast<const Two*>(columns) + fragment::col_of(0) / 2;
#pragma unroll
    for (int n = 0; n < kCols8; ++n) {
        Two two = {};
        if constexpr (!kRowsAreQueries) two = twos[4 * n];
#pragma unroll
        for (int i = 0; i < 4; ++i) visit(n, i, kRowsAreQueries ? own[i / 2] : two.at[i % 2]);
    }
}

// What products are multiplied by. Not 0, for 0 * inf is NaN, and `scale` may be too small.
__device__ __forceinline__ float factor_of(const Scores& score) {
    return score.scale < 0.0f ? -score.unit() : score.unit();
}

// Products become weights.
template <bool kRowsAreQueries, int kCols8>
__device__ __forceinline__ void of_products(float (&s)[1][kCols8][4],
                                            float factor,
                                            const RowStats (&own)[2],
                                            const RowStats* columns) {
    for_each_pair<kRowsAreQueries, kCols8>(own, columns, [&](int n, int i, const RowStats& stats) {
        float& x = s[0][n][i];
        x = hw::exp2_approx(fmaf(x, factor, -stats.lse) * softmax::kLog2e);
    });
}

// Weights of hidden pairs become `hidden`; the tile begins at (row, col).
template <bool kRowsAreQueries, int kCols8>
__device__ __forceinline__ void hide(
    float (&s)[1][kCols8][4], const Scores& score, int32 row, int32 col, float hidden) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int32 at = row + fragment::row_of(2 * r);
        const SeenRun run = kRowsAreQueries ? score.band.keys_of(at) : score.band.queries_of(at);
        const uint32 seen = columns::inside<kCols8>(run, col);
#pragma unroll
        for (int n = 0; n < kCols8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (!columns::holds(seen, n, i)) s[0][n][2 * r + i] = hidden;
            }
        }
    }
}

// Gradients of weights become gradients of scores; those of hidden pairs are 0, whatever else there
// is of their rows.
template <bool kRowsAreQueries, bool kHides, int kCols8>
__device__ __forceinline__ void gradients(float (&dp)[1][kCols8][4],
                                          const float (&weights)[1][kCols8][4],
                                          const RowStats (&own)[2],
                                          const RowStats* columns) {
    for_each_pair<kRowsAreQueries, kCols8>(own, columns, [&](int n, int i, const RowStats& stats) {
        const float weight = weights[0][n][i];
        float& x = dp[0][n][i];
        x = weight * (x - stats.delta);
        if (kHides && weight == kHidden) x = 0.0f;
    });
}

}  // namespace weights
