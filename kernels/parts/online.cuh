// SPDX-License-Identifier: Apache-2.0
// A tile of products becomes scores and then probabilities: the online softmax of softmax_lazy.cuh
// on the fragments of a warp, as products on tensor cores leave them (fragment.cuh).
//
// A lane has the elements [slab][n][i] of scores in row fragment::row_of(i) of a slab, column 8 n +
// fragment::col_of(i): of 2 kSlabs rows, row r being r % 2 * 8 down in slab r / 2.
#pragma once
#include "hw/sync.cuh"
#include "parts/columns.cuh"
#include "parts/fragment.cuh"
#include "parts/pair_words.cuh"
#include "parts/score.cuh"
#include "parts/softmax_lazy.cuh"

namespace online {

// Options that make a score more than scale * product. Without them scores stay in units of
// products, and the scale is part of the exponential's factor.
constexpr bool kScored = plan::kSoftcap || plan::kBias || plan::kAlibi;

using softmax::LazyRow;

constexpr float kLargest = 3.4028234e38f;  // number

// What an exponential takes beside the score: exp2(score * factor).
__device__ __forceinline__ float factor_of(const Scores& score) {
    // A scale near the largest number must not make it infinite.
    return kScored ? softmax::kLog2e : fminf(score.unit() * softmax::kLog2e, kLargest);
}

// The row r of a lane, of rows that begin at `first`.
__device__ __forceinline__ int32 row_at(int32 first, int r) {
    return first + fragment::kSlab * (r / 2) + fragment::row_of(r % 2 * 2);
}

using fragment::for_each;
using softmax::kCubic;
using softmax::kQuintic;
constexpr float kCapped = softmax::kTinyTangent;  // of the cap: see tanh_tiny()

// Products become cap * tanh(score / cap), by one of three formulas, whose errors are at most 1e-7
// of the cap. Mostly no score of the warp is beyond a quarter of the cap.
template <bool kHides, int kSlabs, int kKeys8>
__device__ __forceinline__ void soften(float (&s)[kSlabs][kKeys8][4], const Scores& score) {
    const float ratio = score.share_of_cap();
    if constexpr (kHides) {
        for_each(s, [&](float& x) {
            x = softmax::scaled(score.cap, softmax::tanh_by_size(softmax::scaled(ratio, x)));
        });
        return;
    }
    float largest = 0.0f;
    for_each(s, [&](float& x) { largest = fmaxf(largest, fabsf(x)); });
    largest *= fabsf(ratio);
    if (__all_sync(0xffffffffu, largest <= kCapped)) {
        for_each(s, [&](float& x) {
            x = softmax::scaled(score.cap, softmax::tanh_tiny(softmax::scaled(ratio, x)));
        });
    } else if (__all_sync(0xffffffffu, largest <= 1.0f)) {
        for_each(s, [&](float& x) {
            x = softmax::scaled(score.cap, softmax::tanh_small(softmax::scaled(ratio, x)));
        });
    } else {
        for_each(s, [&](float& x) {
            x = softmax::scaled(ratio, x);
            // Both, since a choice between them would be a branch for each number.
            const float small = softmax::tanh_small(x), any = softmax::tanh_any(x);
            x = softmax::scaled(score.cap, fabsf(x) <= 1.0f ? small : any);
        });
    }
}

// Row r of a lane: products, scaled and softened, become scores. Seen are the columns that `sees`
// says, by n and i.
template <bool kHides, BiasWords kWords, int kSlabs, int kKeys8, class Words, class Sees>
__device__ __forceinline__ void finish_row(float (&s)[kSlabs][kKeys8][4],
                                           int r,
                                           const Words& words,
                                           const Scores& score,
                                           int32 query,
                                           int32 key,
                                           Sees sees) {
    const int32 row = row_at(query, r);
    // Of the first key; exact as long as sequences are shorter than 2^24.
    float distance = 0.0f;
    if constexpr (plan::kAlibi) {
        distance = static_cast<float>(score.distance(row, key + fragment::col_of(0)));
    }
#pragma unroll
    for (int n = 0; n < kKeys8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float& x = s[r / 2][n][r % 2 * 2 + i];
            bool seen = true;
            if constexpr (kHides) seen = sees(n, i);
            if constexpr (kHides && plan::kBias) {
                float added = 0.0f;
                if constexpr (kWords != BiasWords::kNone) {
                    added = words.template added<kWords>(r, n, i);
                } else {
                    added = seen ? score.bias_at(row, key + 8 * n + fragment::col_of(i)) : 0.0f;
                }
                x += added;
                seen = seen && !(added == -softmax::infinity<float>());
            }
            if constexpr (plan::kAlibi)
                x -= score.penalty(distance - static_cast<float>(8 * n + i));
            if (kHides && !seen) x = -softmax::infinity<float>();
        }
    }
}

// Those of some columns that the mask shows to a row, as bits.
template <int kKeys8>
__device__ __forceinline__ uint32 unmasked(uint32 bits, const Scores& score, int32 row, int32 key) {
    if (!score.mask.data) return bits;
#pragma unroll 4
    for (int n = 0; n < kKeys8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool seen = columns::holds(bits, n, i) &&
                              score.unmasked(row, key + 8 * n + fragment::col_of(i));
            if (!seen) bits &= ~(1u << (2 * n + i));
        }
    }
    return bits;
}

// Products become scores; the pairs begin at (query, key). If some are hidden, all lanes of a warp,
// and `words` has been read for this tile. kBits: those that are hidden are looked up as bits,
// which is quicker than a compare each, but takes more registers.
template <bool kHides, bool kBits, int kSlabs, int kKeys8, class Words>
__device__ __forceinline__ void finish_scores(float (&s)[kSlabs][kKeys8][4],
                                              const Words& words,
                                              const Scores& score,
                                              int32 query,
                                              int32 key) {
    static_assert(kBits || !Words::kReads, "words of a mask are bits");
    if constexpr (kScored) {
        if (plan::kSoftcap && score.cap > 0.0f) {
            soften<kHides>(s, score);
        } else {
            for_each(s, [&](float& x) { x = softmax::scaled(score.scale, x); });
        }
    }
#pragma unroll
    for (int r = 0; r < 2 * kSlabs; ++r) {
        const int32 row = row_at(query, r);
        const SeenRun keys = score.band.keys_of(row);
        uint32 bits = kHides && kBits ? columns::inside<kKeys8>(keys, key) : 0;
        if constexpr (kHides && kBits && plan::kMask) {
            bits &= words.has_mask() ? words.shown(r) : unmasked<kKeys8>(bits, score, row, key);
        }
        const auto sees = [&](int n, int i) {
            const int32 col = key + 8 * n + fragment::col_of(i);
            bool seen = kBits ? columns::holds(bits, n, i) : keys.holds(col);
            if (plan::kMask && !kBits) seen = seen && score.unmasked(row, col);
            return seen;
        };
        const BiasWords bias = kHides ? words.bias() : BiasWords::kNone;
        if (bias == BiasWords::kAhead) {
            finish_row<kHides, BiasWords::kAhead>(s, r, words, score, query, key, sees);
        } else if (bias == BiasWords::kWide) {
            finish_row<kHides, BiasWords::kWide>(s, r, words, score, query, key, sees);
        } else {
            finish_row<kHides, BiasWords::kNone>(s, r, words, score, query, key, sees);
        }
    }
}

// Which of these pairs are visible: bit 4 n + i of seen[slab]. Rare, so that it is to be short.
template <int kKeys8, int kSlabs>
__device__ __forceinline__ void look(uint64 (&seen)[kSlabs],
                                     const Scores& score,
                                     int32 query,
                                     int32 key) {
    static_assert(4 * kKeys8 <= 64, "a bit for each");
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

// May a row of the warp have outgrown its reference?
//
// Asked of the scores' bits as integers: the order of positive numbers is the same, negative ones
// are below all of them, and three of them are compared at once. For a limit below 0, which says
// nothing then, the answer is yes.
template <int kSlabs, int kKeys8>
__device__ __forceinline__ bool outgrown(const LazyRow (&rows)[2 * kSlabs],
                                         const float (&s)[kSlabs][kKeys8][4],
                                         float factor) {
    const float headroom = softmax::kHeadroom * hw::rcp_approx(factor);
    bool grows = false;
#pragma unroll
    for (int r = 0; r < 2 * kSlabs; ++r) {
        int largest = -1;
#pragma unroll
        for (int n = 0; n < kKeys8; ++n) {
            const float (&x)[4] = s[r / 2][n];
            largest =
                hw::max3(largest, __float_as_int(x[r % 2 * 2]), __float_as_int(x[r % 2 * 2 + 1]));
        }
        const float limit = rows[r].limit(headroom);
        grows |= limit<0.0f | largest> __float_as_int(limit);
    }
    return __any_sync(0xffffffffu, grows);
}

// The largest scores of rows, over all lanes. Rows go through it together: each waits for one
// number after the other.
template <int kSlabs, int kKeys8>
__device__ __forceinline__ void row_maxima(float (&largest)[2 * kSlabs],
                                           const float (&s)[kSlabs][kKeys8][4]) {
#pragma unroll
    for (int n = 0; n < kKeys8; ++n) {
#pragma unroll
        for (int r = 0; r < 2 * kSlabs; ++r) {
            const float (&x)[4] = s[r / 2][n];
            const float two = softmax::larger(x[r % 2 * 2], x[r % 2 * 2 + 1]);
            largest[r] = n == 0 ? two : softmax::larger(largest[r], two);
        }
    }
#pragma unroll
    for (int step = 2; step > 0; step /= 2) {
        float others[2 * kSlabs];
#pragma unroll
        for (int r = 0; r < 2 * kSlabs; ++r) {
            others[r] = __shfl_xor_sync(0xffffffffu, largest[r], step);
        }
#pragma unroll
        for (int r = 0; r < 2 * kSlabs; ++r) largest[r] = softmax::larger(largest[r], others[r]);
    }
}

// Has a row of the warp a large shift?
template <int kRows>
__device__ __forceinline__ bool any_large(const LazyRow (&rows)[kRows], float factor) {
    bool large = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) large |= rows[r].is_large(factor);
    return __any_sync(0xffffffffu, large);
}

// Makes the maxima of their first scores the references of rows, which are empty. Returns whether a
// row of the warp has a large shift.
template <int kSlabs, int kKeys8>
__device__ __forceinline__ bool begin(LazyRow (&rows)[2 * kSlabs],
                                      const float (&s)[kSlabs][kKeys8][4],
                                      float factor) {
    float largest[2 * kSlabs];
    row_maxima(largest, s);
#pragma unroll
    for (int r = 0; r < 2 * kSlabs; ++r) rows[r] = LazyRow::starting_at(largest[r]);
    return any_large(rows, factor);
}

// Moves the references of rows to their maxima. What was summed up before is to be rescaled by
// `scales`. Returns whether a row of the warp has a large shift.
template <int kSlabs, int kKeys8>
__device__ __forceinline__ bool raise(LazyRow (&rows)[2 * kSlabs],
                                      float (&scales)[2 * kSlabs],
                                      const float (&s)[kSlabs][kKeys8][4],
                                      float factor) {
    float largest[2 * kSlabs];
    row_maxima(largest, s);
#pragma unroll
    for (int r = 0; r < 2 * kSlabs; ++r) scales[r] = rows[r].raise(largest[r], factor);
    return any_large(rows, factor);
}

template <int kSlabs, int kCols8>
__device__ __forceinline__ void rescale(float (&out)[kSlabs][kCols8][4],
                                        const float (&scales)[2 * kSlabs]) {
#pragma unroll
    for (int r = 0; r < 2 * kSlabs; ++r) {
#pragma unroll
        for (int n = 0; n < kCols8; ++n) {
            out[r / 2][n][r % 2 * 2] *= scales[r];
            out[r / 2][n][r % 2 * 2 + 1] *= scales[r];
        }
    }
}

// Where the warp has a large shift: scores are compared with their references now, and not in the
// exponentials.
template <int kSlabs, int kKeys8>
__device__ __forceinline__ void compare_first(float (&s)[kSlabs][kKeys8][4],
                                              const LazyRow (&rows)[2 * kSlabs],
                                              float (&shifts)[2 * kSlabs]) {
#pragma unroll
    for (int r = 0; r < 2 * kSlabs; ++r) {
#pragma unroll
        for (int n = 0; n < kKeys8; ++n) {
            s[r / 2][n][r % 2 * 2] -= rows[r].base();
            s[r / 2][n][r % 2 * 2 + 1] -= rows[r].base();
        }
        shifts[r] = 0.0f;
    }
}

// Scores become probabilities, up to a factor of the row.
template <int kSlabs, int kKeys8>
__device__ __forceinline__ void exponentials(float (&s)[kSlabs][kKeys8][4],
                                             LazyRow (&rows)[2 * kSlabs],
                                             const float (&shifts)[2 * kSlabs],
                                             const Scores& score,
                                             const Scores::Row (&randoms)[2 * kSlabs],
                                             int32 key,
                                             float factor) {
#pragma unroll
    for (int r = 0; r < 2 * kSlabs; ++r) {
#pragma unroll
        for (int n = 0; n < kKeys8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& x = s[r / 2][n][r % 2 * 2 + i];
                x = hw::exp2_approx(fmaf(x, factor, -shifts[r]));
                rows[r].sum += x;
                if constexpr (plan::kDropout) {
                    x = score.survives(x, randoms[r], key + 8 * n + fragment::col_of(i));
                }
            }
        }
    }
}

// What the results of rows are multiplied by in the end; `query` is the first of the slabs. Writes
// their log-sum-exps, each by one lane, if they are wanted. All of it waits for one number after
// the other, so the rows go through it together.
template <int kRows>
__device__ __forceinline__ void conclude(float (&factors)[kRows],
                                         const Params& p,
                                         const Entry& entry,
                                         int32 head,
                                         const Scores& score,
                                         const LazyRow (&rows)[kRows],
                                         int32 query) {
    const float unit = kScored ? 1.0f : score.unit();
    float totals[kRows], references[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        totals[r] = softmax::row_sum<4>(rows[r].sum);
        // In natural units. Rounded here: whether the compiler would multiply and add at once
        // depends on where this is inlined, and the last bit must not.
        references[r] = softmax::scaled(unit, rows[r].base());
        factors[r] = 1.0f;
        if constexpr (plan::kSinks) {
            if (p.sinks.data && !entry.slack) {
                const float sink = hw::load(head_value(p.sinks, 0, head));
                factors[r] = softmax::add_sink(sink, totals[r], references[r]);
            }
        }
    }
    if (p.lse.data && fragment::lane() % 4 == 0) {
        const Vector lse = vector(p.lse, entry, head);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int32 row = row_at(query, r);
            const float value = softmax::log_sum_exp(references[r], totals[r]);
            if (row < entry.seqlen_q) hw::store(lse.at(row), value);
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        factors[r] = softmax::inverse(totals[r]) * factors[r] * score.kept_factor();
    }
}

}  // namespace online
