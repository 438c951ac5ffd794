// SPDX-License-Identifier: Apache-2.0
// The online softmax of the two small attention kernels: on accumulator fragments, in which a
// thread has the elements i % 4 < 2 of one row and the others of the row 8 below.
#pragma once
#include "hw/convert.cuh"
#include "hw/math.cuh"

namespace small {

constexpr float kInfinity = 1e30f;  // far beyond any score

struct Rows {
    float highest[2], sum[2];

    __device__ __forceinline__ void start() {
        highest[0] = highest[1] = -kInfinity;
        sum[0] = sum[1] = 0.0f;
    }
};

// The largest or the sum of the four lanes that share a row.
template <bool Max>
__device__ __forceinline__ float over_lanes(float x) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
        const float other = __shfl_xor_sync(0xffffffff, x, lanes);
        x = Max ? fmaxf(x, other) : x + other;
    }
    return x;
}

// Hides keys from `keys` on and, if causal, those after the query. `row` and `key` are those of the
// thread's first element.
template <int N>
__device__ __forceinline__ void hide(float (&s)[N], int row, int key, int keys, bool causal) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int at = key + i / 4 * 8 + i % 2;
        if (at >= keys || (causal && at > row + i % 4 / 2 * 8)) s[i] = -kInfinity;
    }
}

// Scores become exponentials relative to the row's highest score so far, and what was summed up
// before is rescaled to it. `scale` is in units of log 2.
template <int N, int M>
__device__ __forceinline__ void soften(float (&s)[N], Rows& rows, float (&out)[M], float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float highest = rows.highest[half];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (i % 4 / 2 == half) highest = fmaxf(highest, s[i]);
        }
        highest = over_lanes<true>(highest);
        const float rescale = hw::exp2_approx((rows.highest[half] - highest) * scale);
        rows.highest[half] = highest;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (i % 4 / 2 != half) continue;
            s[i] = hw::exp2_approx((s[i] - highest) * scale);
            sum += s[i];
        }
        rows.sum[half] = rows.sum[half] * rescale + sum;
#pragma unroll
        for (int i = 0; i < M; ++i) {
            if (i % 4 / 2 == half) out[i] *= rescale;
        }
    }
}

// Sixteen columns of probabilities from column 16 j on, as the left operand of a product.
template <class T, int N>
__device__ __forceinline__ void pack_operand(unsigned int (&a)[4], const float (&s)[N], int j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = hw::pack2<T>(s[8 * j + 2 * i], s[8 * j + 2 * i + 1]);
}

}  // namespace small
