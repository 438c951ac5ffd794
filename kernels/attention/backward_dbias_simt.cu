// SPDX-License-Identifier: Apache-2.0
// The gradient of the bias without tensor cores, for every element type and head size, on any GPU.
//
//     dbias[b][h][i][j] = dscore[b][h][i][j], summed over the axes that bias was broadcast along,
//     dscore[i][j] = P[i][j] (dP[i][j] - delta[i] + dlse[i]),   dP[i][j] = <dout[i], v[j]>
//
// A block owns a kTileQ x kTileKv tile of one matrix of dbias (fewer rows or columns where bias has
// only one) and visits, in a fixed order, all that is summed into it: entries of the batch, heads,
// query tiles and key tiles. Scores and dP are recomputed each time, which costs two more products
// than the backward has anyway, but no memory and no atomics:
//
//     smem.a, smem.b:   dO0 V0 .. dOm Vm     Q0 K0 .. Qn Kn
//     registers:        dP += dout V^T       scores += Q K^T       sum += dscore
//
// A small bias has few tiles and much to sum: it is cut into p.dbias_splits parts, each by its own
// block into workspace, which sum_parts.cu adds up. How many follows from the sizes alone, so the
// same call gives the same bits on any GPU.
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

struct Smem {
    tile::Shared<plan::kTileQ, plan::kChunk> a;   // of dout, then of Q
    tile::Shared<plan::kTileKv, plan::kChunk> b;  // of V, then of K
    tile::Shared<plan::kTileQ, plan::kTileKv> sum;
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

// What a block computes: a tile of a matrix of dbias, and which part of its sums.
struct Target {
    int32 batch, head;  // of dbias
    int32 tile_q, tile_kv;
    int32 split;
};

// result += a b^T over all columns of two matrices.
__device__ __forceinline__ void add_product(Accum (&result)[kRowsPerLane][kKeysPerLane],
                                            const Matrix& a,
                                            const Matrix& b,
                                            int32 first_a,
                                            int32 first_b,
                                            Smem& smem,
                                            Lane lane) {
    for (int32 col = 0; col < a.cols; col += plan::kChunk) {
        tile::stage(smem.a, a, first_a, col, false);
        tile::stage(smem.b, b, first_b, col, false);
        tile::add_a_bt(result, smem.a, smem.b, lane);
    }
}

__device__ __forceinline__ void add_tile(Accum (&sum)[kRowsPerLane][kKeysPerLane],
                                         const Params& p,
                                         const Entry& entry,
                                         const Scores& score,
                                         int32 head,
                                         int32 first_query,
                                         int32 first_key,
                                         Smem& smem,
                                         Lane lane) {
    const int32 head_kv = head / (p.heads_q / p.heads_kv);
    const Matrix q = query_matrix(p.q, entry, head, p.head_dim);
    const Matrix dout = query_matrix(p.dout, entry, head, p.head_dim_v);
    const Matrix k = key_matrix(p.k, entry, head_kv, p.head_dim);
    const Matrix v = key_matrix(p.v, entry, head_kv, p.head_dim_v);
    const bool hides = score.hides(first_query, plan::kTileQ, first_key, plan::kTileKv);
    Accum scores[kRowsPerLane][kKeysPerLane], dprobabilities[kRowsPerLane][kKeysPerLane];
    tile::clear(scores);
    tile::clear(dprobabilities);
    add_product(dprobabilities, dout, v, first_query, first_key, smem, lane);
    add_product(scores, q, k, first_query, first_key, smem, lane);
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
        const int32 query = first_query + lane.y + i * plan::kThreadsY;
        const RowGradient row = RowGradient::load(p, entry, head, query);
        const Scores::Row row_scores = score.row(query);
#pragma unroll
        for (int j = 0; j < kKeysPerLane; ++j) {
            const int32 key = first_key + lane.x + j * plan::kThreadsX;
            const Score x = score.at(scores[i][j], query, key, hides);
            const Accum dprobability =
                score.survives(dprobabilities[i][j], row_scores, key) * score.kept_factor();
            const Accum dscore = row.dscore(row.probability(x.value), dprobability);
            if (x.seen) sum[i][j] += dscore;
        }
    }
}

// Write the tile, summed over its rows or columns where bias has only one.
__device__ __forceinline__ void write_sum(const Accum (&sum)[kRowsPerLane][kKeysPerLane],
                                          const Params& p,
                                          const Target& target,
                                          Smem& smem,
                                          Lane lane) {
    const PairTensor& t = p.dbias;
    const int rows = t.queries == 1 ? 1 : plan::kTileQ, cols = t.keys == 1 ? 1 : plan::kTileKv;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
#pragma unroll
        for (int j = 0; j < kKeysPerLane; ++j) {
            smem.sum.at[lane.y + i * plan::kThreadsY][lane.x + j * plan::kThreadsX] = sum[i][j];
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < rows * cols; at += plan::kThreads) {
        const int32 query = target.tile_q * rows + at / cols,
                    key = target.tile_kv * cols + at % cols;
        if (query >= t.queries || key >= t.keys) continue;
        Accum total = 0;
        for (int i = at / cols; i < plan::kTileQ; i += rows) {
            for (int j = at % cols; j < plan::kTileKv; j += cols) total += smem.sum.at[i][j];
        }
        if (p.dbias_splits > 1) {
            const int64 matrix =
                (static_cast<int64>(target.split) * t.batch + target.batch) * t.heads + target.head;
            hw::store(
                static_cast<Accum*>(p.dbias_parts) + (matrix * t.queries + query) * t.keys + key,
                total);
        } else {
            write_pair(t, target.batch, target.head, query, key, total);
        }
    }
}

__device__ __forceinline__ void backward_dbias_tile(const Params& p,
                                                    const Target& target,
                                                    Smem& smem) {
    const Lane lane = tile::this_lane();
    const PairTensor& t = p.dbias;
    // Turns: every entry and head whose scores this matrix was added to, and in each the query
    // tiles that are dbias_strides apart, or the one that the tile belongs to.
    const int32 heads = t.heads == 1 ? p.heads_q : 1;
    const int64 turns = (t.batch == 1 ? p.batch : 1) * heads * p.dbias_strides;
    Accum sum[kRowsPerLane][kKeysPerLane];
    tile::clear(sum);

    for (int64 turn = target.split; turn < turns; turn += p.dbias_splits) {
        const int64 pair = turn / p.dbias_strides;
        const int32 stride = static_cast<int32>(turn % p.dbias_strides);
        const Entry entry = entry_at(p, t.batch == 1 ? pair / heads : target.batch);
        const int32 head = t.heads == 1 ? static_cast<int32>(pair % heads) : target.head;
        const Scores score = Scores::of(p, entry, head);
        const int32 query_tiles = ceil_div(entry.seqlen_q, plan::kTileQ);
        const bool all_q = t.queries == 1, all_kv = t.keys == 1;
        const int32 end_q = all_q ? query_tiles : min(target.tile_q + 1, query_tiles);
        const int32 step_q = all_q ? p.dbias_strides : 1;
        for (int32 tile_q = all_q ? stride : target.tile_q; tile_q < end_q; tile_q += step_q) {
            const int32 first_query = tile_q * plan::kTileQ;
            TileRange keys = score.band.key_tiles(first_query, plan::kTileQ, plan::kTileKv);
            if (!all_kv) {
                keys = {max(keys.first, target.tile_kv), min(keys.last, target.tile_kv + 1)};
            }
            for (int32 tile_kv = keys.first; tile_kv < keys.last; ++tile_kv) {
                add_tile(sum, p, entry, score, head, first_query, tile_kv * plan::kTileKv, smem,
                         lane);
            }
        }
    }
    write_sum(sum, p, target, smem, lane);
}

extern "C" __global__ void __launch_bounds__(plan::kThreads, plan::kBlocksPerSm)
    backward_dbias_simt(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const PairTensor& t = p.dbias;
    const int32 tiles_q = t.queries == 1 ? 1 : ceil_div(t.queries, plan::kTileQ);
    const int32 tiles_kv = t.keys == 1 ? 1 : ceil_div(t.keys, plan::kTileKv);
    const int64 parts = static_cast<int64>(t.batch) * t.heads * tiles_q * tiles_kv * p.dbias_splits;
    for (int64 index = blockIdx.x; index < parts; index += gridDim.x) {
        if (index != blockIdx.x) __syncthreads();  // all have finished the previous part
        Target target;
        int64 rest = index;
        target.split = static_cast<int32>(rest % p.dbias_splits), rest /= p.dbias_splits;
        target.tile_kv = static_cast<int32>(rest % tiles_kv), rest /= tiles_kv;
        target.tile_q = static_cast<int32>(rest % tiles_q), rest /= tiles_q;
        target.head = static_cast<int32>(rest % t.heads);
        target.batch = static_cast<int32>(rest / t.heads);
        backward_dbias_tile(p, target, smem);
    }
}
