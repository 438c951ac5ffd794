// SPDX-License-Identifier: Apache-2.0
// A tile of products becomes probabilities at once, where softcap or ALiBi makes scores of them and
// nothing is hidden: what the options take is computed between the exponentials, which wait for
// their own unit most of the time. Layout and rows as in online.cuh.
//
//     exponent = x (a + b x^2 + c x^4) - slope |distance| - shift
//
// in base 2, x being the product. The polynomial is cap * tanh(scale x / cap) up to a quarter of
// the cap. That no product is beyond it, and that no score outgrows its row's reference, is asked
// of the products before: softcap never takes a score further from 0, and ALiBi takes at least what
// it takes from the nearest key.
#pragma once
#include "parts/online.cuh"

namespace online {

// Bias is read for each pair, which takes longer than what is saved here.
constexpr bool kFuses = (plan::kSoftcap || plan::kAlibi) && !plan::kBias;

// The factors of the formula above, of one head.
struct Exponent {
    float a, b, c;
    float largest;  // product; below 0: none
    float slope;

    __device__ static __forceinline__ Exponent of(const Scores& score) {
        Exponent e = {score.scale * softmax::kLog2e, 0.0f, 0.0f, 1e18f, 0.0f};
        if constexpr (plan::kSoftcap) {
            if (score.cap > 0.0f) {
                const float ratio = fabsf(score.scale) * hw::rcp_approx(score.cap);
                e.b = kCubic * e.a * (ratio * ratio);
                e.c = kQuintic * e.a * (ratio * ratio) * (ratio * ratio);
                e.largest = fminf(e.largest, kCapped * hw::rcp_approx(ratio));
            }
        }
        if constexpr (plan::kAlibi) {
            e.slope = score.slope * softmax::kLog2e;
        }
        // Not where factors overflow.
        if (!(fabsf(e.a) + fabsf(e.b) + fabsf(e.c) + fabsf(e.slope) < 1e30f)) e.largest = -1.0f;
        return e;
    }
};

// May the tile become probabilities by the formula? All lanes of a warp. No row has a large shift.
template <int kSlabs, int kKeys8>
__device__ __forceinline__ bool fuses(const LazyRow (&rows)[2 * kSlabs],
                                      const float (&s)[kSlabs][kKeys8][4],
                                      const Exponent& e,
                                      const Scores& score,
                                      int32 query,
                                      int32 key) {
    bool fits = true;
    const float inverse = hw::rcp_approx(fmaxf(fabsf(e.a), 1e-18f));
#pragma unroll
    for (int r = 0; r < 2 * kSlabs; ++r) {
        // Positive numbers in the order of their bits, and negative ones in that of their sizes.
        int positive = 0;
        uint32 any = 0;
#pragma unroll
        for (int n = 0; n < kKeys8; ++n) {
            const float (&x)[4] = s[r / 2][n];
            const int one = __float_as_int(x[r % 2 * 2]), other = __float_as_int(x[r % 2 * 2 + 1]);
            positive = hw::max3(positive, one, other);
            any = hw::max3(any, static_cast<uint32>(one), static_cast<uint32>(other));
        }
        float headroom = fmaf(rows[r].reference, softmax::kLog2e, softmax::kHeadroom);
        if constexpr (plan::kAlibi) {
            const float first = static_cast<float>(score.distance(row_at(query, r), key));
            const float last = first - static_cast<float>(8 * kKeys8 - 1);
            const float nearest = fminf(fabsf(first), fabsf(last));
            const float furthest = fmaxf(fabsf(first), fabsf(last));
            headroom = fmaf(e.slope, e.slope < 0.0f ? furthest : nearest, headroom);
            fits = fits && (last >= 0.0f || first <= 0.0f);  // all keys on one side
        }
        const float limit = fminf(headroom * inverse, e.largest);
        const int size = max(positive, static_cast<int>(any & 0x7fffffffu));
        fits = fits && size <= __float_as_int(limit);
    }
    return __all_sync(0xffffffffu, fits);
}

// Products become probabilities, up to a factor of the row.
template <int kSlabs, int kKeys8>
__device__ __forceinline__ void exponentials_of_products(float (&s)[kSlabs][kKeys8][4],
                                                         LazyRow (&rows)[2 * kSlabs],
                                                         const Exponent& e,
                                                         const Scores& score,
                                                         const Scores::Row (&randoms)[2 * kSlabs],
                                                         int32 query,
                                                         int32 key) {
#pragma unroll
    for (int r = 0; r < 2 * kSlabs; ++r) {
        float added = -rows[r].shift(softmax::kLog2e), step = 0.0f;
        if constexpr (plan::kAlibi) {
            const auto first =
                static_cast<float>(score.distance(row_at(query, r), key + fragment::col_of(0)));
            step = first > 0.0f ? e.slope : -e.slope;
            added = fmaf(-step, first, added);
        }
#pragma unroll
        for (int n = 0; n < kKeys8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& x = s[r / 2][n][r % 2 * 2 + i];
                float factor = e.a;
                if constexpr (plan::kSoftcap) {
                    const float z = x * x;
                    factor = fmaf(z, fmaf(z, e.c, e.b), e.a);
                }
                float rest = added;
                if constexpr (plan::kAlibi) rest = fmaf(step, static_cast<float>(8 * n + i), added);
                x = hw::exp2_approx(fmaf(x, factor, rest));
                rows[r].sum += x;
                if constexpr (plan::kDropout) {
                    x = score.survives(x, randoms[r], key + 8 * n + fragment::col_of(i));
                }
            }
        }
    }
}

}  // namespace online
