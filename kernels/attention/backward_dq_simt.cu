// SPDX-License-Identifier: Apache-2.0
// The gradient of q without tensor cores, for every element type and head size, on any GPU.
//
//     dq[i] = scale * sum_j dscore[i][j] slope[i][j] k[j],
//     dscore[i][j] = P[i][j] (dP[i][j] - delta[i] + dlse[i]),
//     P[i][j] = exp(score[i][j] - lse[i]),   dP[i][j] = <dout[i], v[j]>,
//     score and its slope: parts/score.cuh
//
// A block computes kTileQ rows of one head, and like the forward walks the key tiles they see, in
// chunks of kChunk columns. P is recomputed from lse; nothing of size seqlen_q x seqlen_kv is
// stored. The last K chunk of the scores is the first of the third product, which therefore takes
// the chunks backwards:
//
//     smem.chunk:   V0 .. Vm        K0 .. Kn          (Kn)  Kn-1 .. K0
//     registers:    dP += dout V^T  scores += Q K^T   result += dscore K
//
// The order of all sums is fixed, so the result is deterministic. Shapes: cuflash/arch/simt.py.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "parts/gradient.cuh"
#include "parts/operand.cuh"
#include "parts/score.cuh"
#include "parts/softmax.cuh"
#include "parts/tile.cuh"
#include "parts/work.cuh"

using tile::Lane;

constexpr int kRowsPerLane = tile::per_lane<plan::kTileQ, plan::kThreadsY>();
constexpr int kKeysPerLane = tile::per_lane<plan::kTileKv, plan::kThreadsX>();
constexpr int kColsPerLane = tile::per_lane<plan::kChunk, plan::kThreadsX>();
constexpr int kResident = plan::kResidentChunks;  // 0: Q and dout pass by in chunks too

struct Smem {
    tile::Shared<plan::kTileQ, plan::kChunk> q[kResident ? kResident : 1];
    tile::Shared<plan::kTileQ, plan::kChunk> dout[kResident ? plan::kResidentChunksV : 1];
    tile::Shared<plan::kTileKv, plan::kChunk> chunk;  // of V, then of K
    tile::Shared<plan::kTileQ, plan::kTileKv> dscores;
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

__device__ __forceinline__ void backward_dq_tile(const Params& p, const Work& work, Smem& smem) {
    const Lane lane = tile::this_lane();
    const Entry& entry = work.entry;
    const Scores score = Scores::of(p, entry, work.head);
    const int32 head_kv = work.head / (p.heads_q / p.heads_kv);
    const Matrix q = query_matrix(p.q, entry, work.head, p.head_dim);
    const Matrix dout = query_matrix(p.dout, entry, work.head, p.head_dim_v);
    const Matrix k = key_matrix(p.k, entry, head_kv, p.head_dim);
    const Matrix v = key_matrix(p.v, entry, head_kv, p.head_dim_v);
    const int32 first_query = work.tile * plan::kTileQ;
    const int32 k_chunks = ceil_div(p.head_dim, plan::kChunk);
    const int32 v_chunks = ceil_div(p.head_dim_v, plan::kChunk);
    const TileRange keys = score.band.key_tiles(first_query, plan::kTileQ, plan::kTileKv);

    Accum result[plan::kChunks][kRowsPerLane][kColsPerLane];
    RowGradient rows[kRowsPerLane];
    Scores::Row row_scores[kRowsPerLane];
#pragma unroll
    for (int c = 0; c < plan::kChunks; ++c) tile::clear(result[c]);
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
        const int32 row = first_query + lane.y + i * plan::kThreadsY;
        rows[i] = RowGradient::load(p, entry, work.head, row);
        row_scores[i] = score.row(row);
    }

    if (kResident) {
        tile::stage_all(smem.q, q, first_query);
        tile::stage_all(smem.dout, dout, first_query);
    }

    for (int32 key_tile = keys.first; key_tile < keys.last; ++key_tile) {
        const int32 first_key = key_tile * plan::kTileKv;
        const bool hides = score.hides(first_query, plan::kTileQ, first_key, plan::kTileKv);

        Accum scores[kRowsPerLane][kKeysPerLane], dprobabilities[kRowsPerLane][kKeysPerLane];
        tile::clear(scores);
        tile::clear(dprobabilities);
#pragma unroll 1
        for (int32 c = 0; c < v_chunks; ++c) {
            if (!kResident) tile::stage(smem.dout[0], dout, first_query, c * plan::kChunk, false);
            tile::stage(smem.chunk, v, first_key, c * plan::kChunk, false);
            tile::add_a_bt(dprobabilities, smem.dout[kResident ? c : 0], smem.chunk, lane);
        }
        bool careful = false;  // K holds infinities or NaNs, and some pairs are hidden
#pragma unroll 1
        for (int32 c = 0; c < k_chunks; ++c) {
            if (!kResident) tile::stage(smem.q[0], q, first_query, c * plan::kChunk, false);
            careful = tile::stage(smem.chunk, k, first_key, c * plan::kChunk, /*look=*/hides);
            tile::add_a_bt(scores, smem.q[kResident ? c : 0], smem.chunk, lane);
        }

#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
            const int row = lane.y + i * plan::kThreadsY;
#pragma unroll
            for (int j = 0; j < kKeysPerLane; ++j) {
                const int col = lane.x + j * plan::kThreadsX;
                const int32 key = first_key + col;
                const Score x = score.at(scores[i][j], first_query + row, key, hides);
                const Accum dprobability =
                    score.survives(dprobabilities[i][j], row_scores[i], key) * score.kept_factor();
                const Accum dscore = rows[i].dscore(rows[i].probability(x.value), dprobability);
                smem.dscores.at[row][col] = x.seen ? dscore * x.slope : Accum(0);
            }
        }
        __syncwarp();  // a row of dscores is written and read by the lanes of one warp

#pragma unroll
        for (int c = plan::kChunks - 1; c >= 0; --c) {
            if (c >= k_chunks) continue;
            if (c < k_chunks - 1) {
                careful = tile::stage(smem.chunk, k, first_key, c * plan::kChunk, hides);
            }
            if (careful) {
                auto visible = [&](int row, int key) {
                    return score.visible(first_query + row, first_key + key);
                };
                tile::add_a_b_where(result[c], smem.dscores, smem.chunk, lane, visible);
            } else {
                tile::add_a_b(result[c], smem.dscores, smem.chunk, lane);
            }
        }
    }

    const Matrix dq = query_matrix(p.dq, entry, work.head, p.head_dim);
    Accum factor[kRowsPerLane];
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) factor[i] = score.scale;
#pragma unroll
    for (int c = 0; c < plan::kChunks; ++c) {
        tile::write<plan::kChunk>(dq, result[c], factor, first_query, c * plan::kChunk, lane);
    }
}

extern "C" __global__ void __launch_bounds__(plan::kThreads, plan::kBlocksPerSm)
    backward_dq_simt(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int64 parts = work_parts<Queries, plan::kTileQ>(p);
    for (int64 index = blockIdx.x; index < parts; index += gridDim.x) {
        if (index != blockIdx.x) __syncthreads();  // all have finished the previous part
        Work work;
        if (work_at<Queries, plan::kTileQ>(p, index, work)) backward_dq_tile(p, work, smem);
    }
}
