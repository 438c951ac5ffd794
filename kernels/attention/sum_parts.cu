// SPDX-License-Identifier: Apache-2.0
// dbias from its parts: what backward_dbias_simt.cu left in workspace, added in order.
//
//     dbias[b][h][i][j] = sum_s parts[s][b][h][i][j]
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "parts/operand.cuh"

extern "C" __global__ void __launch_bounds__(plan::kThreads)
    sum_parts(const __grid_constant__ Params p) {
    const PairTensor& t = p.dbias;
    const int64 size = static_cast<int64>(t.batch) * t.heads * t.queries * t.keys;
    const int64 step = static_cast<int64>(gridDim.x) * plan::kThreads;
    for (int64 index = static_cast<int64>(blockIdx.x) * plan::kThreads + threadIdx.x; index < size;
         index += step) {
        Accum sum = 0;
        for (int32 split = 0; split < p.dbias_splits; ++split) {
            sum += hw::load(static_cast<const Accum*>(p.dbias_parts) + split * size + index);
        }
        const int64 row = index / t.keys, matrix = row / t.queries;
        write_pair(t, matrix / t.heads, static_cast<int32>(matrix % t.heads),
                   static_cast<int32>(row % t.queries), static_cast<int32>(index % t.keys), sum);
    }
}
