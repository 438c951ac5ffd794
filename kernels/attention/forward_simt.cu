// SPDX-License-Identifier: Apache-2.0
// Attention forward without tensor cores, for every element type and head size, on any GPU.
//
//     out[i] = sum_j P[i][j] v[j],   P[i][j] = exp(score[i][j] - lse[i]),
//     lse[i] = log(sum_j exp(score[i][j])),   score[i][j]: parts/score.cuh
//
// A block computes kTileQ rows of one head. It walks the key tiles that these rows see; the score
// tile lives in registers, its probabilities pass through shared memory to become the left factor
// of the second product, and the output tile stays in registers to the end. The head dimension is
// cut into chunks of kChunk columns, so that any head size fits:
//
//     smem.chunk:   K0   K1 .. Kn              V0   V1 .. Vm     next tile: K0 ...
//     registers:    scores += Q K^T | softmax | result += P V
//
// A tile::stage costs two block barriers: everybody has finished with the previous chunk; the new
// one is stored. They order the uses of smem.probabilities as well. Other blocks of the
// same multiprocessor compute meanwhile; loading a chunk ahead into registers was measured, and is
// slower since it leaves room for fewer of them (docs/measured.md).
//
// Budget: registers hold kTileQ * (kTileKv + padded head_dim_v) / threads accumulators; the tile
// shapes in cuflash/arch/simt.py keep that below the spill limit.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "parts/operand.cuh"
#include "parts/score.cuh"
#include "parts/softmax.cuh"
#include "parts/tile.cuh"
#include "parts/types.cuh"
#include "parts/work.cuh"

using tile::Lane;

constexpr int kRowsPerLane = tile::per_lane<plan::kTileQ, plan::kThreadsY>();
constexpr int kKeysPerLane = tile::per_lane<plan::kTileKv, plan::kThreadsX>();
constexpr int kColsPerLane = tile::per_lane<plan::kChunk, plan::kThreadsX>();
constexpr int kResident = plan::kResidentChunks;  // all of Q; 0: Q passes by in chunks too

struct Smem {
    tile::Shared<plan::kTileQ, plan::kChunk> q[kResident ? kResident : 1];
    tile::Shared<plan::kTileKv, plan::kChunk> chunk;  // of K, then of V
    tile::Shared<plan::kTileQ, plan::kTileKv> probabilities;
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

__device__ __forceinline__ void forward_tile(const Params& p, const Work& work, Smem& smem) {
    const Lane lane = tile::this_lane();
    const Entry& entry = work.entry;
    const Scores score = Scores::of(p, entry, work.head);
    const int32 head_kv = work.head / (p.heads_q / p.heads_kv);
    const Matrix q = query_matrix(p.q, entry, work.head, p.head_dim);
    const Matrix k = key_matrix(p.k, entry, head_kv, p.head_dim);
    const Matrix v = key_matrix(p.v, entry, head_kv, p.head_dim_v);
    const int32 first_query = work.tile * plan::kTileQ;
    const int32 k_chunks = ceil_div(p.head_dim, plan::kChunk);
    const int32 v_chunks = ceil_div(p.head_dim_v, plan::kChunk);
    const TileRange keys = score.band.key_tiles(first_query, plan::kTileQ, plan::kTileKv);

    Accum result[plan::kChunks][kRowsPerLane][kColsPerLane];
    softmax::Row<Accum> rows[kRowsPerLane];
    Scores::Row row_scores[kRowsPerLane];
#pragma unroll
    for (int c = 0; c < plan::kChunks; ++c) tile::clear(result[c]);
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
        rows[i] = softmax::Row<Accum>::empty();
        if constexpr (plan::kSinks) {
            if (p.sinks.data && !entry.slack) {
                const Accum sink = hw::load(head_value(p.sinks, 0, work.head));
                rows[i] = softmax::Row<Accum>::with_sink(sink, lane.x == 0);
            }
        }
        row_scores[i] = score.row(first_query + lane.y + i * plan::kThreadsY);
    }

    if (kResident) tile::stage_all(smem.q, q, first_query);

    for (int32 key_tile = keys.first; key_tile < keys.last; ++key_tile) {
        const int32 first_key = key_tile * plan::kTileKv;
        const bool hides = score.hides(first_query, plan::kTileQ, first_key, plan::kTileKv);

        Accum scores[kRowsPerLane][kKeysPerLane];
        tile::clear(scores);
#pragma unroll 1
        for (int32 c = 0; c < k_chunks; ++c) {
            if (!kResident) tile::stage(smem.q[0], q, first_query, c * plan::kChunk, false);
            tile::stage(smem.chunk, k, first_key, c * plan::kChunk, false);
            tile::add_a_bt(scores, smem.q[kResident ? c : 0], smem.chunk, lane);
        }

        Accum factor[kRowsPerLane];
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
            const int row = lane.y + i * plan::kThreadsY;
            Accum largest = -softmax::infinity<Accum>();
#pragma unroll
            for (int j = 0; j < kKeysPerLane; ++j) {
                const int32 key = first_key + lane.x + j * plan::kThreadsX;
                scores[i][j] = score.at(scores[i][j], first_query + row, key, hides).value;
                largest = softmax::larger(largest, scores[i][j]);
            }
            factor[i] = rows[i].raise(softmax::row_max<plan::kThreadsX>(largest));
            const Accum reference = rows[i].reference();
#pragma unroll
            for (int j = 0; j < kKeysPerLane; ++j) {
                const int col = lane.x + j * plan::kThreadsX;
                const Accum probability = softmax::exponential(scores[i][j] - reference);
                rows[i].sum += probability;
                smem.probabilities.at[row][col] =
                    score.survives(probability, row_scores[i], first_key + col);
            }
        }

#pragma unroll
        for (int c = 0; c < plan::kChunks; ++c) {
            if (c >= v_chunks) break;
            const bool careful =
                tile::stage(smem.chunk, v, first_key, c * plan::kChunk, /*look=*/hides);
#pragma unroll
            for (int i = 0; i < kRowsPerLane; ++i) {
#pragma unroll
                for (int j = 0; j < kColsPerLane; ++j) result[c][i][j] *= factor[i];
            }
            if (careful) {
                auto visible = [&](int row, int key) {
                    return score.visible(first_query + row, first_key + key);
                };
                tile::add_a_b_where(result[c], smem.probabilities, smem.chunk, lane, visible);
            } else {
                tile::add_a_b(result[c], smem.probabilities, smem.chunk, lane);
            }
        }
    }

    const Matrix out = query_matrix(p.out, entry, work.head, p.head_dim_v);
    Accum inverse[kRowsPerLane];
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
        const Accum total = softmax::row_sum<plan::kThreadsX>(rows[i].sum);
        inverse[i] = softmax::Row<Accum>::inverse(total) * score.kept_factor();
        const int32 row = first_query + lane.y + i * plan::kThreadsY;
        if (p.lse.data && lane.x == 0 && row < entry.seqlen_q) {
            const Vector lse = vector(p.lse, entry, work.head);
            hw::store(lse.at(row), rows[i].log_sum_exp(total));
        }
    }
#pragma unroll
    for (int c = 0; c < plan::kChunks; ++c) {
        tile::write<plan::kChunk>(out, result[c], inverse, first_query, c * plan::kChunk, lane);
    }
}

extern "C" __global__ void __launch_bounds__(plan::kThreads, plan::kBlocksPerSm)
    forward_simt(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int64 parts = work_parts<Queries, plan::kTileQ>(p);
    for (int64 index = blockIdx.x; index < parts; index += gridDim.x) {
        if (index != blockIdx.x) __syncthreads();  // all have finished the previous part
        Work work;
        if (work_at<Queries, plan::kTileQ>(p, index, work)) forward_tile(p, work, smem);
    }
}
