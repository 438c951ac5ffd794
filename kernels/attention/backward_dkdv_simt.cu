// SPDX-License-Identifier: Apache-2.0
// The gradients of k and v without tensor cores, for every element type and head size, on any GPU.
//
//     dk[j] = scale * sum_i dscore[i][j] slope[i][j] q[i],   dv[j] = sum_i P[i][j] dout[i],
//     dscore[i][j] = P[i][j] (dP[i][j] - delta[i] + dlse[i]),   dP[i][j] = <dout[i], v[j]>,
//     score and its slope: parts/score.cuh
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
#include "parts/operand.cuh"
#include "parts/score.cuh"
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
    const Entry& entry = work.entry;
    const Band band = Band::of(p, entry);
    const int32 group = p.heads_q / p.heads_kv;
    const Matrix k = key_matrix(p.k, entry, work.head, p.head_dim);
    const Matrix v = key_matrix(p.v, entry, work.head, p.head_dim_v);
    const int32 first_key = work.tile * plan::kTileKv;
    const int32 k_chunks = ceil_div(p.head_dim, plan::kChunk);
    const int32 v_chunks = ceil_div(p.head_dim_v, plan::kChunk);
    const TileRange queries = band.query_tiles(first_key, plan::kTileKv, plan::kTileQ);

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
        const Scores score = Scores::of(p, entry, visit.head);
        const Matrix q = query_matrix(p.q, entry, visit.head, p.head_dim);
        const Matrix dout = query_matrix(p.dout, entry, visit.head, p.head_dim_v);
        const bool hides = score.hides(first_query, plan::kTileQ, first_key, plan::kTileKv);
        auto visible = [&](int row, int query) {
            return score.visible(first_query + query, first_key + row);
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
            careful = tile::stage(smem.chunk, dout, first_query, c * plan::kChunk, /*look=*/hides);
            tile::add_a_bt(dscores, smem.v[kResident ? c : 0], smem.chunk, lane);
        }

#pragma unroll
        for (int j = 0; j < kQueriesPerLane; ++j) {
            const int col = lane.x + j * plan::kThreadsX;
            const int32 query = first_query + col;
            const RowGradient gradient = RowGradient::load(p, entry, visit.head, query);
            const Scores::Row row_scores = score.row(query);
#pragma unroll
            for (int i = 0; i < kRowsPerLane; ++i) {
                const int row = lane.y + i * plan::kThreadsY;
                const int32 key = first_key + row;
                const Score x = score.at(probabilities[i][j], query, key, hides);
                const Accum probability = gradient.probability(x.value);
                const Accum dprobability =
                    score.survives(dscores[i][j], row_scores, key) * score.kept_factor();
                const Accum dscore = gradient.dscore(probability, dprobability);
                const Accum weight = score.survives(probability, row_scores, key);
                smem.factor.at[row][col] = x.seen ? weight : Accum(0);
                dscores[i][j] = x.seen ? dscore * x.slope : Accum(0);
            }
        }
        __syncwarp();  // a row of smem.factor is written and read by the lanes of one warp

#pragma unroll
        for (int c = plan::kChunksV - 1; c >= 0; --c) {
            if (c >= v_chunks) continue;
            if (c < v_chunks - 1) {
                careful = tile::stage(smem.chunk, dout, first_query, c * plan::kChunk, hides);
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
            if (tile::stage(smem.chunk, q, first_query, c * plan::kChunk, hides)) {
                tile::add_a_b_where(dk[c], smem.factor, smem.chunk, lane, visible);
            } else {
                tile::add_a_b(dk[c], smem.factor, smem.chunk, lane);
            }
        }
    }

    const Scores any = Scores::of(p, entry, 0);
    Accum kept[kRowsPerLane], scale[kRowsPerLane];
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) kept[i] = any.kept_factor(), scale[i] = any.scale;
    const Matrix to_dk = key_matrix(p.dk, entry, work.head, p.head_dim);
    const Matrix to_dv = key_matrix(p.dv, entry, work.head, p.head_dim_v);
#pragma unroll
    for (int c = 0; c < plan::kChunks; ++c) {
        tile::write<plan::kChunk>(to_dk, dk[c], scale, first_key, c * plan::kChunk, lane);
    }
#pragma unroll
    for (int c = 0; c < plan::kChunksV; ++c) {
        tile::write<plan::kChunk>(to_dv, dv[c], kept, first_key, c * plan::kChunk, lane);
    }
}

extern "C" __global__ void __launch_bounds__(plan::kThreads, plan::kBlocksPerSm)
    backward_dkdv_simt(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int64 parts = work_parts<Keys, plan::kTileKv>(p);
    for (int64 index = blockIdx.x; index < parts; index += gridDim.x) {
        if (index != blockIdx.x) __syncthreads();  // all have finished the previous part
        Work work;
        if (work_at<Keys, plan::kTileKv>(p, index, work)) backward_dkdv_tile(p, work, smem);
    }
}
