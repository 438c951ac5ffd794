// SPDX-License-Identifier: Apache-2.0
// The row sums that the backward pass subtracts:
//
//     delta[i] = sum_d dout[i][d] * out[i][d] - dlse[i]
//
// which equals sum_j P[i][j] dP[i][j] minus the gradient that arrives through lse, so that
// dscore = P * (dP - delta). One warp a row; a block of kThreads takes kThreads / 32 rows.
// A row that sees no key has lse = -inf, whose gradient goes nowhere: its dlse counts as 0.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "parts/operand.cuh"
#include "parts/softmax.cuh"

extern "C" __global__ void __launch_bounds__(plan::kThreads) delta(
    const __grid_constant__ Params p) {
    constexpr int kWarps = plan::kThreads / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64 rows = p.batch * p.heads_q * p.seqlen_q;
    const int64 step = static_cast<int64>(gridDim.x) * kWarps;
    for (int64 index = static_cast<int64>(blockIdx.x) * kWarps + warp; index < rows;
         index += step) {
        const int32 row = static_cast<int32>(index % p.seqlen_q);
        const int64 slice = index / p.seqlen_q;
        const int32 head = static_cast<int32>(slice % p.heads_q);
        const int64 batch = slice / p.heads_q;
        const Matrix out = matrix(p.out, batch, head, p.seqlen_q, p.head_dim_v);
        const Matrix dout = matrix(p.dout, batch, head, p.seqlen_q, p.head_dim_v);
        Accum sum = 0;
        for (int32 d = lane; d < p.head_dim_v; d += 32) {
            sum += widen(hw::load(out.data + row * out.stride_row + d * out.stride_col)) *
                   widen(hw::load(dout.data + row * dout.stride_row + d * dout.stride_col));
        }
        sum = softmax::row_sum<32>(sum);
        if (lane == 0) {
            const Accum lse = hw::load(vector(p.lse, batch, head).at(row));
            if (p.dlse.data && lse != -softmax::infinity<Accum>()) {
                sum -= hw::load(vector(p.dlse, batch, head).at(row));
            }
            hw::store(vector(p.delta, batch, head).at(row), sum);
        }
    }
}
