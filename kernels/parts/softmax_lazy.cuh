// SPDX-License-Identifier: Apache-2.0
// The online softmax with a lazy reference, in base 2. A row's exponentials are taken relative to a
// reference that need not be its maximum: it moves only when a score exceeds it by 2^8, for sums
// and results stay far from overflow until then. Mostly no tile but the first moves it, so the
// maximum over lanes and the rescaling of results are rare.
//
// Scores come in units of the caller's: exp2(score * factor) is what is summed. `factor` is
// positive. A fused multiply-add, score * factor - shift, is exact but for the rounding of the
// shift, which all exponentials of a row share. That is of no account until shifts are large: then
// scores are compared first, (score - reference) * factor, at one instruction more.
#pragma once
#include "hw/math.cuh"
#include "parts/softmax.cuh"

namespace softmax {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLargeShift = 4096.0f;
constexpr float kHeadroom = 8.0f;  // powers of two between reference and the largest exponential

// The state of one row, of which several lanes have some columns each. All that can be had from the
// reference in an instruction or two is had anew for each tile: registers are dear.
struct LazyRow {
    float reference;
    float sum;  // of the columns that the calling lane has seen

    __device__ static __forceinline__ LazyRow empty() { return starting_at(-infinity<float>()); }

    // One whose first scores are no larger than that, or NaN.
    __device__ static __forceinline__ LazyRow starting_at(float largest) {
        return {larger(-infinity<float>(), largest), 0.0f};
    }

    // The reference, or 0 where the row has seen no key, or an infinite score: there would be
    // inf - inf.
    __device__ __forceinline__ float base() const {
        return reference - reference == 0.0f ? reference : 0.0f;
    }
    __device__ __forceinline__ float shift(float factor) const { return scaled(factor, base()); }
    __device__ __forceinline__ bool is_large(float factor) const {
        return fabsf(shift(factor)) > kLargeShift;
    }

    // Exact at the reference, however large it is.
    __device__ __forceinline__ float exponential(float score, float factor) const {
        return hw::exp2_approx((score - base()) * factor);
    }

    // Scores up to here leave the reference where it is. `headroom` is kHeadroom / factor.
    __device__ __forceinline__ float limit(float headroom) const { return reference + headroom; }

    // Make `candidate` the reference if it is larger; returns the factor for all that was
    // accumulated before. Infinite scores as in Row.
    __device__ __forceinline__ float raise(float candidate, float factor) {
        const LazyRow before = *this;
        reference = larger(reference, candidate);
        const float steps = static_cast<bool>(before.is_large(factor) | is_large(factor))
                                ? (before.base() - base()) * factor
                                : before.shift(factor) - shift(factor);
        float scale = hw::exp2_approx(steps);
        if (before.reference == -infinity<float>()) scale = 0.0f;
        if (reference == infinity<float>()) {
            scale = static_cast<float>(before.reference == reference);
        }
        sum *= scale;
        return scale;
    }
};

// log(sum of exp(score)); -inf for a row that has seen no key. `total` is the sum relative to
// `reference`; it is at least about 1 otherwise, and its logarithm is off by 2e-7, or 2e-7 of it.
__device__ __forceinline__ float log_sum_exp(float reference, float total) {
    return fmaf(hw::log2_approx(total), kLn2, reference);
}

// 1 / total, or 0 for a row that has seen no key.
__device__ __forceinline__ float inverse(float total) {
    return total == 0.0f ? 0.0f : hw::rcp_approx(total);
}

// Adds exp(sink) to `total`, which becomes relative to the larger of sink and reference; returns
// the factor for what was accumulated relative to the old one.
__device__ __forceinline__ float add_sink(float sink, float& total, float& reference) {
    const bool finite = sink - sink == 0.0f && total != infinity<float>();
    const float before = reference;
    if (finite && (sink > before || total == 0.0f)) reference = sink;
    const float scale = total == 0.0f ? 0.0f : hw::exp2_approx((before - reference) * kLog2e);
    total = fmaf(total, scale, hw::exp2_approx((sink - reference) * kLog2e));
    return scale;
}

// tanh for |x| <= kTinyTangent, with an error of at most 8e-8: the least for two factors.
constexpr float kTinyTangent = 0.25f, kCubic = -0.33322915f, kQuintic = 0.12846052f;
__device__ __forceinline__ float tanh_tiny(float x) {
    const float z = x * x;
    return fmaf(x * z, fmaf(z, kQuintic, kCubic), x);
}

// tanh for |x| <= 1, with an error of at most 1e-7: a polynomial whose largest error is the least.
__device__ __forceinline__ float tanh_small(float x) {
    const float z = x * x;
    float y = 0.0010059070f;
    y = fmaf(y, z, -0.0060955155f);
    y = fmaf(y, z, 0.0201659035f);
    y = fmaf(y, z, -0.0533919707f);
    y = fmaf(y, z, 0.1332373917f);
    y = fmaf(y, z, -0.3333275318f);
    return fmaf(x * z, y, x);
}

// The same for any x: 1 - 2 / (1 + exp(2 x)).
__device__ __forceinline__ float tanh_any(float x) {
    return fmaf(-2.0f, hw::rcp_approx(1.0f + hw::exp2_approx(x * (2.0f * kLog2e))), 1.0f);
}

// By the formula that x alone asks for. Tiles of which nothing is hidden choose one for all their
// numbers; in others the last bit of what is seen would depend on what is not.
__device__ __forceinline__ float tanh_by_size(float x) {
    const float size = fabsf(x);
    return size <= kTinyTangent ? tanh_tiny(x) : size <= 1.0f ? tanh_small(x) : tanh_any(x);
}

}  // namespace softmax
