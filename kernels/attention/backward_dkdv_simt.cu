// SPDX-License-Identifier: Apache-2.0
// The gradients of k and v without tensor cores, for every element type and head size, on any GPU.
//
//     dk[j] = scale * sum_i dscore[i][j] q[i],   dv[j] = sum_i P[i][j] dout[i],
//     dscore[i][j] = P[i][j] (dP[i][j] - delta[i] + dlse[i]),   dP[i][j] = <dout[i], v[j]>
//
// A block computes kTileKv rows of one key head. It walks the query heads of the group and, in
// each, the query tiles that see these keys, so that the sum over a group happens in registers and
// in a fixed order. All tiles are transposed (rows are keys, columns queries): P^T and dscore^T are
// then left factors with the rows that this lane owns, as P is in the forward.
//
//     smem.chunk:  Q0 .. Qn           dO0 .. dOm        (dOm) dOm-1 .. dO0  Q0 .. Qn
//     registers:   scores += K Q^T    dP += V dO^T      dv += P^T dO        dk += dscore^T Q
//
// Shapes: cuflash/arch/simt.py.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "parts/gradient.cuh"
#include "parts/mask.cuh"
#include "parts/operand.cuh"
#include "parts/softmax.cuh"
#include "parts/tile.cuh"
#include "parts/work.cuh"

using tile::Lane;

constexpr int kRowsPerLane = tile::per_lane<plan::kTileKv, plan::kThreadsY>();
constexpr int kQueriesPerLane = tile::per_lane<plan::kTileQ, plan::kThreadsX>();
constexpr int kColsPerLane = tile::per_lane<plan::kChunk, plan::kThreadsX>();
constexpr int kResident = plan::kResidentChunks;  // 0: K and V pass by in chunks too

struct Smem {
    tile::Shared<plan::kTileKv, plan::kChunk> k[kResident ? kResident : 1];
    tile::Shared<plan::kTileKv, plan::kChunk> v[kResident ? plan::kResidentChunksV : 1];
    tile::Shared<plan::kTileQ, plan::kChunk> chunk;    // of Q or dout
    tile::Shared<plan::kTileKv, plan::kTileQ> factor;  // P^T, then dscore^T
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

// One turn of the main loop: a query tile of one query head of the group.
struct Visit {
    int32 head, query_tile;
};

__device__ __forceinline__ void backward_dkdv_tile(const Params& p, const Work& work, Smem& smem) {
    const Lane lane = tile::this_lane();
    const Band band = Band::of(p);
    const int32 group = p.heads_q / p.heads_kv;
    const Matrix k = matrix(p.k, work.batch, work.head, p.seqlen_kv, p.head_dim);
    const Matrix v = matrix(p.v, work.batch, work.head, p.seqlen_kv, p.head_dim_v);
    const int32 first_key = work.tile * plan::kTileKv;
    const int32 k_chunks = ceil_div(p.head_dim, plan::kChunk);
    const int32 v_chunks = ceil_div(p.head_dim_v, plan::kChunk);
    const TileRange queries = band.query_tiles(first_key, plan::kTileKv, plan::kTileQ);
    const Accum scale = static_cast<Accum>(p.scale);

    Accum dk[plan::kChunks][kRowsPerLane][kColsPerLane];
    Accum dv[plan::kChunksV][kRowsPerLane][kColsPerLane];
#pragma unroll
    for (int c = 0; c < plan::kChunks; ++c) tile::clear(dk[c]);
#pragma unroll
    for (int c = 0; c < plan::kChunksV; ++c) tile::clear(dv[c]);

    const Visit start = {work.head * group, queries.first};
    const int32 end_head = queries.first < queries.last ? start.head + group : start.head;
    auto next = [&](Visit visit) -> Visit {
        if (visit.query_tile + 1 < queries.last) return {visit.head, visit.query_tile + 1};
        return {visit.head + 1, queries.first};
    };

    if (kResident) {
        tile::stage_all(smem.k, k, first_key);
        tile::stage_all(smem.v, v, first_key);
    }

    for (Visit visit = start; visit.head < end_head; visit = next(visit)) {
        const int32 first_query = visit.query_tile * plan::kTileQ;
        const Matrix q = matrix(p.q, work.batch, visit.head, p.seqlen_q, p.head_dim);
        const Matrix dout = matrix(p.dout, work.batch, visit.head, p.seqlen_q, p.head_dim_v);
        const bool full = band.full(first_query, plan::kTileQ, first_key, plan::kTileKv);
        auto visible = [&](int row, int query) {
            return band.visible(first_query + query, first_key + row);
        };

        Accum probabilities[kRowsPerLane][kQueriesPerLane], dscores[kRowsPerLane][kQueriesPerLane];
        tile::clear(probabilities);
        tile::clear(dscores);
#pragma unroll 1
        for (int32 c = 0; c < k_chunks; ++c) {
            if (!kResident) tile::stage(smem.k[0], k, first_key, c * plan::kChunk, false);
            tile::stage(smem.chunk, q, first_query, c * plan::kChunk, false);
            tile::add_a_bt(probabilities, smem.k[kResident ? c : 0], smem.chunk, lane);
        }
        bool careful = false;  // dout holds infinities or NaNs, and some pairs are hidden
#pragma unroll 1
        for (int32 c = 0; c < v_chunks; ++c) {
            if (!kResident) tile::stage(smem.v[0], v, first_key, c * plan::kChunk, false);
            careful = tile::stage(smem.chunk, dout, first_query, c * plan::kChunk, /*look=*/!full);
            tile::add_a_bt(dscores, smem.v[kResident ? c : 0], smem.chunk, lane);
        }

#pragma unroll
        for (int j = 0; j < kQueriesPerLane; ++j) {
            const int col = lane.x + j * plan::kThreadsX;
            const RowGradient query =
                RowGradient::load(p, work.batch, visit.head, first_query + col);
#pragma unroll
            for (int i = 0; i < kRowsPerLane; ++i) {
                const int row = lane.y + i * plan::kThreadsY;
                const bool seen = full || visible(row, col);
                const Accum score = softmax::scaled(scale, probabilities[i][j]);
                const Accum probability = query.probability(score);
                smem.factor.at[row][col] = seen ? probability : Accum(0);
                dscores[i][j] = seen ? query.dscore(probability, dscores[i][j]) : Accum(0);
            }
        }
        __syncwarp();  // a row of smem.factor is written and read by the lanes of one warp

#pragma unroll
        for (int c = plan::kChunksV - 1; c >= 0; --c) {
            if (c >= v_chunks) continue;
            if (c < v_chunks - 1) {
                careful = tile::stage(smem.chunk, dout, first_query, c * plan::kChunk, !full);
            }
            if (careful) {
                tile::add_a_b_where(dv[c], smem.factor, smem.chunk, lane, visible);
            } else {
                tile::add_a_b(dv[c], smem.factor, smem.chunk, lane);
            }
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
#pragma unroll
            for (int j = 0; j < kQueriesPerLane; ++j) {
                smem.factor.at[lane.y + i * plan::kThreadsY][lane.x + j * plan::kThreadsX] =
                    dscores[i][j];
            }
        }
#pragma unroll
        for (int c = 0; c < plan::kChunks; ++c) {
            if (c >= k_chunks) break;
            if (tile::stage(smem.chunk, q, first_query, c * plan::kChunk, !full)) {
                tile::add_a_b_where(dk[c], smem.factor, smem.chunk, lane, visible);
            } else {
                tile::add_a_b(dk[c], smem.factor, smem.chunk, lane);
            }
        }
    }

    Accum one[kRowsPerLane], scaling[kRowsPerLane];
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) one[i] = 1, scaling[i] = scale;
    const Matrix to_dk = matrix(p.dk, work.batch, work.head, p.seqlen_kv, p.head_dim);
    const Matrix to_dv = matrix(p.dv, work.batch, work.head, p.seqlen_kv, p.head_dim_v);
#pragma unroll
    for (int c = 0; c < plan::kChunks; ++c) {
        tile::write<plan::kChunk>(to_dk, dk[c], scaling, first_key, c * plan::kChunk, lane);
    }
#pragma unroll
    for (int c = 0; c < plan::kChunksV; ++c) {
        tile::write<plan::kChunk>(to_dv, dv[c], one, first_key, c * plan::kChunk, lane);
    }
}

extern "C" __global__ void __launch_bounds__(plan::kThreads, plan::kBlocksPerSm)
    backward_dkdv_simt(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int32 tiles = ceil_div(p.seqlen_kv, plan::kTileKv);
    const int64 parts = p.batch * p.heads_kv * tiles;
    for (int64 index = blockIdx.x; index < parts; index += gridDim.x) {
        if (index != blockIdx.x) __syncthreads();  // all have finished the previous part
        // Causal: the first keys are seen by most rows, and they go first as they stand.
        backward_dkdv_tile(p, work_at(index, p.heads_kv, tiles), smem);
    }
}
