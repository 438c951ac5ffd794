// SPDX-License-Identifier: Apache-2.0
// Attention forward without tensor cores, for every element type and head size, on any GPU.
//
//     out[i] = sum_j P[i][j] v[j],   P[i][j] = exp(score[i][j] - lse[i]),
//     score[i][j] = scale * <q[i], k[j]>,   lse[i] = log(sum_j exp(score[i][j]))
//
// A block computes kTileQ rows of one head. It walks the key tiles that these rows see; the score
// tile lives in registers, its probabilities pass through shared memory to become the left factor
// of the second product, and the output tile stays in registers to the end. The head dimension is
// cut into chunks of kChunk columns, so any head size fits; each chunk of K or V is one `step`:
//
//     step:     K0   K1 .. Kn | softmax |  V0   V1 .. Vm  |  next tile: K0 ...
//     load:   (K1) (K2)   (V0)           (V1) (V2)  (K0)      global memory -> registers
//     store:    K0   K1 .. Kn              V0   V1 .. Vm      registers -> smem.chunk
//
// A step begins with two block barriers: everybody has finished with the previous chunk; the new
// chunk is stored. P needs no block barrier: a row is written and read by the lanes of one warp.
//
// Budget: registers hold kTileQ * (kTileKv + padded head_dim_v) / threads accumulators; the tile
// shapes in cuflash/arch/simt.py keep that below the spill limit.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "parts/mask.cuh"
#include "parts/operand.cuh"
#include "parts/softmax.cuh"
#include "parts/tile.cuh"
#include "parts/types.cuh"
#include "parts/work.cuh"

using tile::Lane;

constexpr int kRowsPerLane = plan::kTileQ / plan::kThreadsY;
constexpr int kKeysPerLane = plan::kTileKv / plan::kThreadsX;
constexpr int kColsPerLane = plan::kChunk / plan::kThreadsX;

struct Smem {
    // All of Q where it fits, else the chunk that belongs to smem.chunk.
    tile::Shared<plan::kTileQ, plan::kChunk> q[plan::kResidentChunks ? plan::kResidentChunks : 1];
    tile::Shared<plan::kTileKv, plan::kChunk> chunk;  // of K, then of V
    tile::Shared<plan::kTileQ, plan::kTileKv> probabilities;
};
static_assert(sizeof(Smem) == plan::kSmemBytes, "the plan and Smem disagree");

__device__ __forceinline__ void forward_tile(const Params& p, const Work& work, Smem& smem) {
    const Lane lane = tile::this_lane();
    const Band band = Band::of(p);
    const int32 head_kv = work.head / (p.heads_q / p.heads_kv);
    const Matrix q = matrix(p.q, work.batch, work.head, p.seqlen_q, p.head_dim);
    const Matrix k = matrix(p.k, work.batch, head_kv, p.seqlen_kv, p.head_dim);
    const Matrix v = matrix(p.v, work.batch, head_kv, p.seqlen_kv, p.head_dim_v);
    const int32 first_query = work.tile * plan::kTileQ;
    const int32 k_steps = tiles_of(p.head_dim, plan::kChunk);
    const int32 v_steps = tiles_of(p.head_dim_v, plan::kChunk);
    const TileRange keys = band.key_tiles(first_query, plan::kTileQ, plan::kTileKv);
    const Accum scale = static_cast<Accum>(p.scale);

    Accum result[plan::kChunks][kRowsPerLane][kColsPerLane];
    softmax::Row<Accum> rows[kRowsPerLane];
#pragma unroll
    for (int c = 0; c < plan::kChunks; ++c) tile::clear(result[c]);
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) rows[i] = softmax::Row<Accum>::empty();

    tile::Transfer<plan::kTileQ, plan::kChunk> q_transfer;
    tile::Transfer<plan::kTileKv, plan::kChunk> transfer;

    // Start the load of a step's chunk: steps [0, k_steps) are K, the rest V.
    auto load = [&](int32 key_tile, int32 step) {
        const bool of_k = step < k_steps;
        const int32 first_col = (of_k ? step : step - k_steps) * plan::kChunk;
        transfer.load(either(of_k, k, v), key_tile * plan::kTileKv, first_col);
        if (!plan::kResidentChunks && of_k) q_transfer.load(q, first_query, first_col);
    };
    // Put a step's chunk into shared memory and start the next load. Returns, for a V chunk of a
    // tile with hidden pairs, whether the chunk holds infinities or NaNs.
    auto begin_step = [&](int32 key_tile, int32 step, bool hidden_pairs) -> bool {
        if (!plan::kPrefetch) load(key_tile, step);
        __syncthreads();
        transfer.store(smem.chunk);
        if (!plan::kResidentChunks && step < k_steps) q_transfer.store(smem.q[0]);
        const bool careful = hidden_pairs && step >= k_steps && transfer.nonfinite();
        const bool any_careful = __syncthreads_or(careful);
        const bool last = step + 1 == k_steps + v_steps;
        if (plan::kPrefetch && !(last && key_tile + 1 == keys.last)) {
            load(last ? key_tile + 1 : key_tile, last ? 0 : step + 1);
        }
        return any_careful;
    };

    if (plan::kResidentChunks) {
        __syncthreads();  // the block's previous part may still be reading Q
        for (int c = 0; c < k_steps; ++c) {
            q_transfer.load(q, first_query, c * plan::kChunk);
            q_transfer.store(smem.q[c]);
        }
    }
    if (plan::kPrefetch && keys.first < keys.last) load(keys.first, 0);

    for (int32 key_tile = keys.first; key_tile < keys.last; ++key_tile) {
        const int32 first_key = key_tile * plan::kTileKv;
        const bool full = band.full(first_query, plan::kTileQ, first_key, plan::kTileKv);

        Accum scores[kRowsPerLane][kKeysPerLane];
        tile::clear(scores);
#pragma unroll 1
        for (int32 step = 0; step < k_steps; ++step) {
            begin_step(key_tile, step, false);
            tile::add_a_bt(scores, smem.q[plan::kResidentChunks ? step : 0], smem.chunk, lane);
        }

        Accum factor[kRowsPerLane];
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
            const int row = lane.y + i * plan::kThreadsY;
            Accum largest = -softmax::infinity<Accum>();
#pragma unroll
            for (int j = 0; j < kKeysPerLane; ++j) {
                const int32 key = first_key + lane.x + j * plan::kThreadsX;
                scores[i][j] = softmax::scaled(scale, scores[i][j]);
                if (!full && !band.visible(first_query + row, key)) {
                    scores[i][j] = -softmax::infinity<Accum>();
                }
                largest = softmax::larger(largest, scores[i][j]);
            }
            factor[i] = rows[i].raise(softmax::row_max<plan::kThreadsX>(largest));
            const Accum reference = rows[i].reference();
#pragma unroll
            for (int j = 0; j < kKeysPerLane; ++j) {
                const Accum probability = softmax::exponential(scores[i][j] - reference);
                rows[i].sum += probability;
                smem.probabilities.at[row][lane.x + j * plan::kThreadsX] = probability;
            }
        }
        __syncwarp();

#pragma unroll
        for (int c = 0; c < plan::kChunks; ++c) {
            if (c >= v_steps) break;
            const bool careful = begin_step(key_tile, k_steps + c, !full);
#pragma unroll
            for (int i = 0; i < kRowsPerLane; ++i) {
#pragma unroll
                for (int j = 0; j < kColsPerLane; ++j) result[c][i][j] *= factor[i];
            }
            if (careful) {
                auto visible = [&](int row, int key) {
                    return band.visible(first_query + row, first_key + key);
                };
                tile::add_a_b_where(result[c], smem.probabilities, smem.chunk, lane, visible);
            } else {
                tile::add_a_b(result[c], smem.probabilities, smem.chunk, lane);
            }
        }
        __syncwarp();  // the next tile's probabilities overwrite these
    }

    const Matrix out = matrix(p.out, work.batch, work.head, p.seqlen_q, p.head_dim_v);
    Accum inverse[kRowsPerLane];
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
        const Accum total = softmax::row_sum<plan::kThreadsX>(rows[i].sum);
        inverse[i] = softmax::Row<Accum>::inverse(total);
        const int32 row = first_query + lane.y + i * plan::kThreadsY;
        if (p.lse.data && lane.x == 0 && row < p.seqlen_q) {
            const Vector lse = vector(p.lse, work.batch, work.head);
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
    const int32 tiles = tiles_of(p.seqlen_q, plan::kTileQ);
    const int64 parts = p.batch * p.heads_q * tiles;
    for (int64 index = blockIdx.x; index < parts; index += gridDim.x) {
        Work work = work_at(index, p.heads_q, tiles);
        work.tile = tiles - 1 - work.tile;  // causal: the last rows see most keys, so they go first
        forward_tile(p, work, smem);
    }
}
