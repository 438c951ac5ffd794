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
constexpr float kLargeShift = 4096.0f;
constexpr float kHeadroom = 8.0f;  // powers of two between reference and the largest exponential

// The state of one row, of which several lanes have some columns each. All that can be had from the
// reference in an instruction or two is had anew for each tile: registers are dear.
struct LazyRow {
    float reference;
    float sum;  // of the columns that the calling lane has seen

    __device__ static __forceinline__ LazyRow empty() { return {-infinity<float>(), 0.0f}; }

    // A row whose denominator begins with exp(sink); one of its lanes counts it.
    __device__ static __forceinline__ LazyRow with_sink(float sink, float factor, bool counts) {
        LazyRow row = {sink, 0.0f};
        if (counts) row.sum = row.exponential(sink, factor);
        return row;
    }

    // The reference, or 0 where the row has seen no key, or an infinite score: there would be
    // inf - inf.
    __device__ __forceinline__ float base() const {
        return reference - reference == 0.0f ? reference : 0.0f;
    }
    __device__ __forceinline__ float shift(float factor) const { return base() * factor; }
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
        const float steps = before.is_large(factor) || is_large(factor)
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

    // log(sum of exp(score)) in natural units, of which a score's unit is `unit`; -inf for a row
    // that has seen no key. `total` is the sum over all lanes.
    __device__ __forceinline__ float log_sum_exp(float total, float unit) const {
        return total == 0.0f ? -infinity<float>() : base() * unit + logf(total);
    }
};

}  // namespace softmax
