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

// The state of one row, of which several lanes have some columns each.
struct LazyRow {
    float maximum;  // that the reference comes from
    float limit;    // scores up to here leave it as it is
    float shift;    // reference * factor
    float sum;      // of the columns that the calling lane has seen

    __device__ static __forceinline__ LazyRow empty() {
        return {-infinity<float>(), -infinity<float>(), 0.0f, 0.0f};
    }

    // A row whose denominator begins with exp(sink); one of its lanes counts it.
    __device__ static __forceinline__ LazyRow with_sink(float sink, float factor, bool counts) {
        LazyRow row = empty();
        row.move(sink, factor);
        if (counts) row.sum = hw::exp2_approx(fmaf(sink, factor, -row.shift));
        return row;
    }

    // Make `candidate`, the largest score of the row so far unless it is smaller than that, the
    // reference; returns the factor for all that was accumulated before. Infinite scores as in Row.
    __device__ __forceinline__ float raise(float candidate, float factor) {
        const float before = maximum, old_shift = shift;
        move(larger(maximum, candidate), factor);
        float scale = hw::exp2_approx(old_shift - shift);
        if (before == -infinity<float>()) scale = 0.0f;
        if (maximum == infinity<float>()) scale = static_cast<float>(before == maximum);
        sum *= scale;
        return scale;
    }

    __device__ __forceinline__ float exponential(float score, float factor) const {
        return hw::exp2_approx(fmaf(score, factor, -shift));
    }

    // log(sum of exp(score)), -inf for a row that has seen no key. `total` is over all lanes.
    __device__ __forceinline__ float log_sum_exp(float total) const {
        return total == 0.0f ? -infinity<float>() : (shift + log2f(total)) * kLn2;
    }

  private:
    __device__ __forceinline__ void move(float to, float factor) {
        maximum = to;
        const bool finite = to - to == 0.0f;
        shift = finite ? to * factor : 0.0f;
        limit = to + kHeadroom / factor;
    }
};

}  // namespace softmax
