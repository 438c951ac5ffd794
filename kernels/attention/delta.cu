// SPDX-License-Identifier: Apache-2.0
// The row sums that the backward pass subtracts:
//
//     delta[i] = sum_d dout[i][d] * out[i][d]
//
// which equals sum_j P[i][j] dP[i][j].
//
// A thread sums a row, in the order of d, exactly as dP = <dout, v> is summed (tile::add_a_bt). A
// row with all its weight on one key then has out = v, dP = delta to the last bit, and a gradient
// of zero instead of rounding noise; a tree of lanes would be faster and lose that. The kernel
// reads each element once.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "parts/operand.cuh"

__device__ __forceinline__ Accum dot(const Matrix& a, const Matrix& b, int32 row) {
    using Group = hw::Vec<Element, kGroup>;
    const Element* from_a = a.data + row * a.stride_row;
    const Element* from_b = b.data + row * b.stride_row;
    Accum sum = 0;
    if (a.aligned && b.aligned) {
        for (int32 d = 0; d < a.cols; d += kGroup) {
            const Group group_a = hw::load(reinterpret_cast<const Group*>(from_a + d));
            const Group group_b = hw::load(reinterpret_cast<const Group*>(from_b + d));
#pragma unroll
            for (int e = 0; e < kGroup; ++e) sum += widen(group_a.v[e]) * widen(group_b.v[e]);
        }
    } else {
        for (int32 d = 0; d < a.cols; ++d) {
            sum += widen(hw::load(from_a + d * a.stride_col)) *
                   widen(hw::load(from_b + d * b.stride_col));
        }
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(plan::kThreads)
    delta(const __grid_constant__ Params p) {
    const int64 rows = array_batch(p) * p.heads_q * p.seqlen_q;
    const int64 step = static_cast<int64>(gridDim.x) * plan::kThreads;
    for (int64 index = static_cast<int64>(blockIdx.x) * plan::kThreads + threadIdx.x; index < rows;
         index += step) {
        const int32 row = static_cast<int32>(index % p.seqlen_q);
        const int64 slice = index / p.seqlen_q;
        const int32 head = static_cast<int32>(slice % p.heads_q);
        const Entry entry = all_rows(p, slice / p.heads_q);
        const Matrix out = query_matrix(p.out, entry, head, p.head_dim_v);
        const Matrix dout = query_matrix(p.dout, entry, head, p.head_dim_v);
        hw::store(vector(p.delta, entry, head).at(row), dot(dout, out, row));
    }
}
