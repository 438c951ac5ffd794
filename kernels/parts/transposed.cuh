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

// What makes a score depend on its place.
constexpr bool kPlaced = plan::kBias || plan::kAlibi;

// What a kernel has found out of pairs before: nothing, so that Scores reads bias and mask element
// by element. Another one is in pair_blocks.cuh.
struct NothingHeld {
    static constexpr bool kPairs = false;  // whom band and mask hide from whom
    static constexpr bool kAdds = false;   // what a bias adds
    static constexpr bool kMarks = true;   // gradients() does not look up who is hidden: see hide()
};

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

// What stands for a hidden pair: no tangent, or the product of a score of -inf.
__device__ __forceinline__ float hidden_mark(const Scores& score) {
    if (plan::kSoftcap && score.cap > 0.0f) return 2.0f;
    return score.scale < 0.0f ? softmax::infinity<float>() : -softmax::infinity<float>();
}

using fragment::for_each;

// Products become tanh(score / cap) in their place, if there is a cap, by the formulas of the
// forward. All lanes of a warp.
template <bool kPlain, int kSlabs, int kQueries8>
__device__ __forceinline__ void soften(float (&s)[kSlabs][kQueries8][4], const Scores& score) {
    if (!plan::kSoftcap || !(score.cap > 0.0f)) return;
    const float ratio = score.share_of_cap();
    if constexpr (!kPlain) {
        for_each(s, [&](float& x) { x = softmax::tanh_by_size(softmax::scaled(ratio, x)); });
        return;
    }
    float largest = 0.0f;
    for_each(s, [&](float& x) {
        x = softmax::scaled(ratio, x);
        largest = fmaxf(largest, fabsf(x));
    });
    if (__all_sync(0xffffffffu, largest <= softmax::kTinyTangent)) {
        for_each(s, [](float& x) { x = softmax::tanh_tiny(x); });
    } else if (__all_sync(0xffffffffu, largest <= 1.0f)) {
        for_each(s, [](float& x) { x = softmax::tanh_small(x); });
    } else {
        for_each(s, [](float& x) {
            x = fabsf(x) <= 1.0f ? softmax::tanh_small(x) : softmax::tanh_any(x);
        });
    }
}

// Which queries of the fragment see a lane's keys by their position, or by all that is held, as in
// columns.cuh.
template <int kQueries8, class Held, int kSlabs>
__device__ __forceinline__ void look(
    uint32 (&bits)[kSlabs][2], const Held& held, const Scores& score, int32 query, int32 key) {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if constexpr (Held::kPairs) {
                bits[slab][r] = held.seen[slab][r];
            } else {
                const int32 row = key + fragment::kSlab * slab + fragment::row_of(2 * r);
                bits[slab][r] = columns::inside<kQueries8>(score.band.queries_of(row), query);
            }
        }
    }
}

// Does gradients() look up which pairs are hidden? Else hide() has marked them.
template <class Held>
constexpr bool kLooksUp = kPlaced || !Held::kMarks;

// Marks the products, or tangents, of pairs that band or mask hide, where gradients() has no other
// way to know.
template <class Held, int kSlabs, int kQueries8>
__device__ __forceinline__ void hide(float (&s)[kSlabs][kQueries8][4],
                                     const Held& held,
                                     const Scores& score,
                                     int32 query,
                                     int32 key) {
    if (kLooksUp<Held>) return;
    const float hidden = hidden_mark(score);
    uint32 bits[kSlabs][2];
    look<kQueries8>(bits, held, score, query, key);
    for_each_pair<kSlabs, kQueries8>(
        query, key, [&](int slab, int n, int i, int32 at_query, int32 at_key) {
            bool visible = columns::holds(bits[slab][i / 2], n, i % 2);
            if constexpr (plan::kMask) {
                if (!Held::kPairs) visible = visible && score.unmasked(at_query, at_key);
            }
            if (!visible) s[slab][n][i] = hidden;
        });
}

// Products become weights (P after dropout) and gradients of scores. Those of hidden pairs are 0,
// whatever else there is of their rows.
template <bool kPlain, class Held, int kSlabs, int kQueries8>
__device__ __forceinline__ void gradients(float (&s)[kSlabs][kQueries8][4],
                                          float (&dp)[kSlabs][kQueries8][4],
                                          const RowStats* rows,
                                          const Held& held,
                                          const Scores& score,
                                          int32 query,
                                          int32 key) {
    // Not 0, or -inf would not remain hidden.
    float scale = score.scale < 0.0f ? -score.unit() : score.unit();
    const bool softened = plan::kSoftcap && score.cap > 0.0f;
    if (softened) scale = score.cap;
    const float hidden = hidden_mark(score);
    uint32 bits[kSlabs][2];
    constexpr bool kLooks = !kPlain && kLooksUp<Held>;
    if (kLooks) look<kQueries8>(bits, held, score, query, key);
    // Of the first query and key; exact as long as sequences are shorter than 2^24.
    float first = 0.0f;
    if constexpr (plan::kAlibi) {
        first = static_cast<float>(
            score.distance(query + fragment::col_of(0), key + fragment::row_of(0)));
    }
    RowStats row[2];
    Scores::Row randoms[2];
    float biases[2][4];  // of 16 queries
    for_each_pair<kSlabs, kQueries8>(
        query, key, [&](int slab, int n, int i, int32 at_query, int32 at_key) {
            if (slab == 0 && i < 2) {
                row[i] = rows[8 * n + fragment::col_of(i)];
                randoms[i] = score.row(at_query);
            }
            if constexpr (Held::kAdds) {
                if (!kPlain && n % 2 + i == 0) held.added(biases, score, query, key, n / 2);
            }
            float& x = s[slab][n][i];
            float& dx = dp[slab][n][i];
            float slope = 1.0f;
            bool seen = true;
            if (softened) slope = (1.0f - x) * (1.0f + x);
            if (kLooks) seen = columns::holds(bits[slab][i / 2], n, i % 2);
            if constexpr (kPlaced) {
                float value = softmax::scaled(scale, x);
                if constexpr (plan::kMask) {
                    if (!kPlain && !Held::kPairs) seen = seen && score.unmasked(at_query, at_key);
                }
                if constexpr (plan::kBias) {
                    float added = 0.0f;
                    if constexpr (Held::kAdds) {
                        if (!kPlain) added = biases[n % 2][i];
                    } else if (seen) {
                        added = score.bias_at(at_query, at_key);
                    }
                    value += added;
                    seen = seen && !(added == -softmax::infinity<float>());
                }
                if constexpr (plan::kAlibi) {
                    const int further = 8 * n + i % 2 - fragment::kSlab * slab - i / 2 * 8;
                    value -= score.penalty(first + static_cast<float>(further));
                }
                x = hw::exp2_approx((value - row[i % 2].lse) * softmax::kLog2e);
            } else {
                if (!kPlain && !kLooks) seen = x != hidden;
                x = hw::exp2_approx(fmaf(x, scale, -row[i % 2].lse) * softmax::kLog2e);
            }
            dx = score.survives(dx, randoms[i % 2], at_key) * score.kept_factor();
            dx = x * (dx - row[i % 2].delta) * slope;
            x = score.survives(x, randoms[i % 2], at_key);
            if (!seen) x = dx = 0.0f;
        });
}

}  // namespace transposed
