// SPDX-License-Identifier: Apache-2.0
// What backward_mma.cu needs of each row of scores:
//
//     delta[i] = sum_d dout[i][d] * out[i][d],   which equals sum_j P[i][j] dP[i][j]
//
// less dlse[i], beside lse[i]; and the counters of turns are set to zero.
//
// A block has a tile of queries, and each of its warps a slab of 16 rows. Their sums are the
// diagonal of out dout^T, by the same instructions in the same order as dP = v dout^T: a row with
// all its weight on one key has out = v, and dP - delta is then 0 to the last bit.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "parts/fragment.cuh"
#include "parts/gradient_mma.cuh"
#include "parts/operand.cuh"

struct Smem {
    fragment::Tile<plan::kTileQ, plan::kDimV> out;
    fragment::Tile<plan::kTileQ, plan::kDimV> dout;
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");
static_assert(plan::kThreads == 32 * plan::kTileQ / fragment::kSlab, "a warp for each slab");

__device__ __forceinline__ void rows_of_tile(const Params& p, const Work& work, Smem& smem) {
    const Entry& entry = work.entry;
    const int32 first = work.tile * plan::kTileQ;
    fragment::copy<plan::kAligned, plan::kThreads>(
        smem.out, query_matrix(p.out, entry, work.head, p.head_dim_v), first);
    fragment::copy<plan::kAligned, plan::kThreads>(
        smem.dout, query_matrix(p.dout, entry, work.head, p.head_dim_v), first);
    hw::cp_async_commit();
    hw::cp_async_wait<0>();
    __syncthreads();
    const int slab = static_cast<int>(threadIdx.x) / 32 * fragment::kSlab;
    float sums[1][2][4];
    fragment::clear(sums);
    fragment::add_a_bt(sums, smem.out, slab, smem.dout, slab);

    RowStats* const rows = row_stats(p, query_slot<plan::kTileQ>(p, entry, work.head, work.tile));
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // rows below 8 meet columns below 8
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
            const int row = fragment::row_of(i);
            if (row != 8 * half + fragment::col_of(i)) continue;
            const int32 at = first + slab + row;
            hw::store(rows + slab + row, RowStats::of(p, entry, work.head, at, sums[0][half][i]));
        }
    }
    clear_turns(p, work);
}

extern "C" __global__ void __launch_bounds__(plan::kThreads)
    backward_rows_mma(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int64 parts = work_parts<Queries, plan::kTileQ>(p);
    for (int64 index = blockIdx.x; index < parts; index += gridDim.x) {
        if (index != blockIdx.x) __syncthreads();  // all have finished the previous part
        Work work;
        if (work_at<Queries, plan::kTileQ>(p, index, work) && !work.entry.slack) {
            rows_of_tile(p, work, smem);
        }
    }
}
