// SPDX-License-Identifier: Apache-2.0
// The gradient of the sinks:
//
//     dsinks[h] = sum over b and i of exp(sink[h] - lse[b][h][i]) * (dlse[b][h][i] -
//     delta[b][h][i])
//
// A block sums one head: each thread the rows that are kThreads apart, then all threads by halves,
// always in the same order. A row with lse = -inf has no sink in it (all its scores, and the sink,
// are -inf, or it belongs to no entry) and counts nothing.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "parts/operand.cuh"
#include "parts/softmax.cuh"

struct Smem {
    Accum sum[plan::kThreads];
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

// Is a row of out 0?
__device__ bool is_zero(const Params& p, const Entry& entry, int32 head, int32 row) {
    const Matrix out = query_matrix(p.out, entry, head, p.head_dim_v);
    for (int32 d = 0; d < out.cols; ++d) {
        const Element* const at = out.data + row * out.stride_row + d * out.stride_col;
        if (widen(hw::load(at)) != Accum(0)) return false;
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(plan::kThreads)
    dsinks(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int thread = threadIdx.x;
    for (int32 head = blockIdx.x; head < p.heads_q; head += gridDim.x) {
        const Accum sink = hw::load(head_value(p.sinks, 0, head));
        Accum sum = 0;
        // (batch, row) advances by kThreads rows at a time.
        const int32 rows = max(p.seqlen_q, 1);
        const int64 batches = p.seqlen_q ? array_batch(p) : 0;
        int64 batch = thread / rows;
        int32 row = thread % rows;
        for (; batch < batches; batch += plan::kThreads / rows, row += plan::kThreads % rows) {
            if (row >= rows) {
                row -= rows;
                if (++batch >= batches) break;
            }
            const Entry entry = all_rows(p, batch);
            const Accum lse = hw::load(vector(p.lse, entry, head).at(row));
            if (lse == -softmax::infinity<Accum>()) continue;
            // Where no key counts, out is 0, and what dout holds does not matter, not even as NaN.
            const Accum delta = hw::load(vector(p.delta, entry, head).at(row));
            const bool no_key =
                lse == sink && delta - delta != Accum(0) && is_zero(p, entry, head, row);
            Accum gradient = no_key ? Accum(0) : -delta;
            if (p.dlse.data) gradient += hw::load(vector(p.dlse, entry, head).at(row));
            sum += softmax::exponential(sink - lse) * gradient;
        }
        smem.sum[thread] = sum;
        for (int half = plan::kThreads / 2; half > 0; half /= 2) {
            __syncthreads();
            if (thread < half) smem.sum[thread] += smem.sum[thread + half];
        }
        if (thread == 0) hw::store(head_value(p.dsinks, 0, head), smem.sum[0]);
        __syncthreads();
    }
}
