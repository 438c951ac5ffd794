// SPDX-License-Identifier: Apache-2.0
// The online softmax with a lazy reference, in base 2. A row's exponentials are taken relative to a
// reference that need not be its maximum: it moves only when a score exceeds it by 2^8, for sums and
// results stay far from overflow until then. Mostly no tile but the first moves it, so the maximum
// over lanes and the rescaling of results are rare.
//
// Scores come in units of the caller's: exp2(score * factor) is what is summed. `factor` is positive.
#pragma once
#include "hw/math.cuh"
#include "parts/softmax.cuh"

namespace softmax {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
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
        if (counts) row.sum = hw::exp2_approx(fmaf(sink, factor, -row.shift(factor)));
        return row;
    }

    // What exponents are shifted by: 0 where the row has seen no key, or an infinite score, for
    // there would be inf - inf.
    __device__ __forceinline__ float shift(float factor) const {
        const bool finite = reference - reference == 0.0f;
        return finite ? reference * factor : 0.0f;
    }

    // Scores up to here leave the reference where it is. `headroom` is kHeadroom / factor.
    __device__ __forceinline__ float limit(float headroom) const { return reference + headroom; }

    // Make `candidate` the reference if it is larger; returns the factor for all that was
    // accumulated before. Infinite scores as in Row.
    __device__ __forceinline__ float raise(float candidate, float factor) {
        const float before = reference, old_shift = shift(factor);
        reference = larger(reference, candidate);
        float scale = hw::exp2_approx(old_shift - shift(factor));
        if (before == -infinity<float>()) scale = 0.0f;
        if (reference == infinity<float>()) scale = static_cast<float>(before == reference);
        sum *= scale;
        return scale;
    }

    // log(sum of exp(score)), -inf for a row that has seen no key. `total` is over all lanes.
    __device__ __forceinline__ float log_sum_exp(float total, float factor) const {
        return total == 0.0f ? -infinity<float>() : (shift(factor) + log2f(total)) * kLn2;
    }
};

}  // namespace softmax
