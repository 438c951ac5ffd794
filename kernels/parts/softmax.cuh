// SPDX-License-Identifier: Apache-2.0
// The online softmax (Milakov and Gimelshein, 2018): while tiles of scores go by, each row keeps
// its maximum and its sum of exponentials, and what was accumulated so far is rescaled whenever
// the maximum grows. Scores are in natural units: exp(score - maximum), rounded once each.
#pragma once
#include "parts/types.cuh"

namespace softmax {

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
__device__ __forceinline__ float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ __forceinline__ double hyperbolic_tangent(double x) { return tanh(x); }
__device__ __forceinline__ float magnitude(float x) { return fabsf(x); }
__device__ __forceinline__ double magnitude(double x) { return fabs(x); }
// Both ignore a NaN; it comes back through the exponential and the sum.
__device__ __forceinline__ float larger(float x, float y) { return fmaxf(x, y); }
__device__ __forceinline__ double larger(double x, double y) { return fmax(x, y); }

template <class Accum>
__device__ __forceinline__ Accum infinity() {
    return sizeof(Accum) == 4 ? Accum(__int_as_float(0x7f800000))
                              : Accum(__longlong_as_double(0x7ff0000000000000LL));
}

// scale * product, rounded before anything is subtracted from it. A fused multiply-add would round
// only after the subtraction, and the largest score minus itself would not be zero.
__device__ __forceinline__ float scaled(float scale, float product) {
    return __fmul_rn(scale, product);
}
__device__ __forceinline__ double scaled(double scale, double product) {
    return __dmul_rn(scale, product);
}

// The state of one row. `sum` holds the share of the columns that the calling lane has seen.
template <class Accum>
struct Row {
    Accum maximum, sum;

    __device__ static __forceinline__ Row empty() { return {-infinity<Accum>(), Accum(0)}; }

    // A row whose denominator begins with exp(sink); one of its lanes counts it.
    __device__ static __forceinline__ Row with_sink(Accum sink, bool counts) {
        Row row = {sink, Accum(0)};
        if (counts) row.sum = exponential(sink - row.reference());
        return row;
    }

    // What exponents are taken relative to. Without this, a row that has seen no key, or an
    // infinite score, would meet inf - inf.
    __device__ __forceinline__ Accum reference() const {
        const bool finite = maximum - maximum == Accum(0);
        return finite ? maximum : Accum(0);
    }

    // Raise the maximum to `candidate`; returns the factor for all that was accumulated before. An
    // infinite score drowns the rest: its row is NaN and lse is infinite, but not 0 * inf = NaN.
    __device__ __forceinline__ Accum raise(Accum candidate) {
        const Accum before = maximum;
        maximum = larger(maximum, candidate);
        const Accum factor = maximum == infinity<Accum>() ? Accum(before == maximum)
                                                          : exponential(before - reference());
        sum *= factor;
        return factor;
    }

    // 1 / sum, or 0 for a row that has seen no key. `total` is the sum over all lanes.
    __device__ static __forceinline__ Accum inverse(Accum total) {
        return total == Accum(0) ? Accum(0) : Accum(1) / total;
    }

    // log(sum of exp(score)), -inf for a row that has seen no key.
    __device__ __forceinline__ Accum log_sum_exp(Accum total) const {
        return total == Accum(0) ? -infinity<Accum>() : reference() + logarithm(total);
    }
};

// Over the kLanes neighbouring lanes of a row; every lane gets the result, in a fixed order.
template <int kLanes, class Accum>
__device__ __forceinline__ Accum row_max(Accum x) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
        x = larger(x, __shfl_xor_sync(0xffffffffu, x, step));
    }
    return x;
}
template <int kLanes, class Accum>
__device__ __forceinline__ Accum row_sum(Accum x) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, step);
    }
    return x;
}

}  // namespace softmax
