// SPDX-License-Identifier: Apache-2.0
// What backward_mma.cu needs of each row of scores:
//
//     delta[i] = sum_d dout[i][d] * out[i][d],   which equals sum_j P[i][j] dP[i][j]
//
// less dlse[i], beside lse[i]; and the counters of turns are set to zero.
//
// A block has a tile of queries, and 16 lanes a row, so that reads are in one piece.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "parts/gradient_mma.cuh"
#include "parts/operand.cuh"

constexpr int kLanes = 16;  // of a row
constexpr int kRowsAtOnce = plan::kThreads / kLanes;

// The calling lane's share of <a[row], b[row]>.
__device__ __forceinline__ float dot(const Matrix& a, const Matrix& b, int32 row, int lane) {
    using Group = hw::Vec<Element, kGroup>;
    const Element* from_a = a.data + row * a.stride_row;
    const Element* from_b = b.data + row * b.stride_row;
    float sum = 0.0f;
    if (a.vectors && b.vectors) {
        for (int32 d = lane * kGroup; d < a.cols; d += kLanes * kGroup) {
            const Group group_a = hw::load(reinterpret_cast<const Group*>(from_a + d));
            const Group group_b = hw::load(reinterpret_cast<const Group*>(from_b + d));
#pragma unroll
            for (int e = 0; e < kGroup; ++e) sum += widen(group_a.v[e]) * widen(group_b.v[e]);
        }
    } else {
        for (int32 d = lane; d < a.cols; d += kLanes) {
            sum += widen(hw::load(from_a + d * a.stride_col)) *
                   widen(hw::load(from_b + d * b.stride_col));
        }
    }
    return sum;
}

__device__ __forceinline__ void rows_of_tile(const Params& p, const Work& work) {
    const Entry& entry = work.entry;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const Matrix out = query_matrix(p.out, entry, work.head, p.head_dim_v);
    const Matrix dout = query_matrix(p.dout, entry, work.head, p.head_dim_v);
    const int64 slot = query_slot<plan::kTileQ>(p, entry, work.head, work.tile);
    for (int i = static_cast<int>(threadIdx.x) / kLanes; i < plan::kTileQ; i += kRowsAtOnce) {
        const int32 row = work.tile * plan::kTileQ + i;
        float sum = row < entry.seqlen_q ? dot(dout, out, row, lane) : 0.0f;
#pragma unroll
        for (int other = kLanes / 2; other > 0; other /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, other);
        }
        if (lane != 0) continue;
        RowStats stats = RowStats::none();
        if (row < entry.seqlen_q) {
            const float lse = hw::load(vector(p.lse, entry, work.head).at(row));
            if (lse != -softmax::infinity<float>()) {
                stats = {lse * softmax::kLog2e, sum};
                if (p.dlse.data) {
                    stats.delta -= hw::load(vector(p.dlse, entry, work.head).at(row));
                }
            }
        }
        hw::store(row_stats(p, slot) + i, stats);
    }
    const int split = static_cast<int>(threadIdx.x);
    if (work.tile % plan::kTurn == 0 && split < plan::kSplits) {
        hw::store(dq_turn(p, entry, work.head, work.tile, split), 0);
    }
}

extern "C" __global__ void __launch_bounds__(plan::kThreads)
    backward_rows_mma(const __grid_constant__ Params p) {
    const int64 parts = work_parts<Queries, plan::kTileQ>(p);
    for (int64 index = blockIdx.x; index < parts; index += gridDim.x) {
        Work work;
        if (work_at<Queries, plan::kTileQ>(p, index, work) && !work.entry.slack) {
            rows_of_tile(p, work);
        }
    }
}
