// SPDX-License-Identifier: Apache-2.0
// What backward_sm90.cu needs of each row of scores: as backward_rows_mma.cu, by wgmma.
//
// A block has a tile of queries, and each of its warpgroups 64 of them. Their sums are the diagonal
// of out dout^T, by the same instructions in the same order as dP = v dout^T: a row with all its
// weight on one key has out = v, and dP - delta is then 0 to the last bit.
#include "attention/params.cuh"
#include "hw/cp_async.cuh"
#include "hw/memory.cuh"
#include "hw/sync.cuh"
#include "parts/gradient_mma.cuh"
#include "parts/swizzled.cuh"

constexpr int kRows = 64, kGroups = plan::kTileQ / kRows;  // of a warpgroup
using Tile = swizzled::Tile<kRows, plan::kDimV>;
static_assert(plan::kThreads == 128 * kGroups, "a warpgroup for 64 queries");

struct Smem {
    Tile out[kGroups], dout[kGroups];
    float sums[plan::kTileQ];
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

// A warpgroup starts to copy 64 rows of a head, aligned to 16 bytes, from row `first` on.
__device__ __forceinline__ void copy(Tile& tile, const Matrix& from, int32 first) {
    constexpr int kPieces = plan::kDimV / 8;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x) % 128; i < kRows * kPieces; i += 128) {
        const int row = i / kPieces, col = i % kPieces * 8;
        const bool exists = first + row < from.rows && col < from.cols;
        const Element* const at = from.data + (first + row) * from.stride_row + col;
        hw::cp_async<16>(tile.piece(row, col), exists ? at : from.data, exists);
    }
}

__device__ __forceinline__ void sum_rows(const Params& p, const Work& work, Smem& smem) {
    const Entry& entry = work.entry;
    const int thread = static_cast<int>(threadIdx.x), group = thread / 128;
    const int warp = thread / 32 % 4;
    const int32 first = work.tile * plan::kTileQ;
    copy(smem.out[group], query_matrix(p.out, entry, work.head, p.head_dim_v),
         first + group * kRows);
    copy(smem.dout[group], query_matrix(p.dout, entry, work.head, p.head_dim_v),
         first + group * kRows);
    hw::cp_async_commit();
    RowInputs own;  // of the row that the thread ends, if it does
    if (thread < plan::kTileQ) own = RowInputs::load(p, entry, work.head, first + thread);
    hw::cp_async_wait<0>();
    hw::fence_proxy_async();
    __syncthreads();
    float sums[1][kRows / 8][4];
    swizzled::start_a_bt(sums, smem.out[group], 0, smem.dout[group]);
    hw::wgmma_wait<0>();
    hw::pin(swizzled::listed(sums));
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {  // rows [8 n, 8 n + 8) meet their own columns there
#pragma unroll
        for (int i = n % 2 * 2; i < n % 2 * 2 + 2; ++i) {
            const int row = 16 * warp + fragment::row_of(i);
            if (n / 2 != warp || row != 8 * n + fragment::col_of(i)) continue;
            smem.sums[group * kRows + row] = sums[0][n][i];
        }
    }
    __syncthreads();
    if (thread < plan::kTileQ) {
        RowStats* const rows =
            row_stats(p, query_slot<plan::kTileQ>(p, entry, work.head, work.tile));
        hw::store(rows + thread, own.with(smem.sums[thread]));
    }
    clear_turns(p, work);
}

extern "C" __global__ void __launch_bounds__(plan::kThreads)
    backward_rows_sm90(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int64 parts = work_parts<Queries, plan::kTileQ>(p);
    for (int64 index = blockIdx.x; index < parts; index += gridDim.x) {
        if (index != blockIdx.x) __syncthreads();  // all have finished the previous part
        Work work;
        if (work_at<Queries, plan::kTileQ>(p, index, work) && !work.entry.slack) {
            sum_rows(p, work, smem);
        }
    }
}
