// SPDX-License-Identifier: Apache-2.0
// The gradient of q without tensor cores, for every element type and head size, on any GPU.
//
//     dq[i] = scale * sum_j dscore[i][j] k[j],   dscore[i][j] = P[i][j] (dP[i][j] - delta[i]),
//     P[i][j] = exp(score[i][j] - lse[i]),       dP[i][j] = <dout[i], v[j]>
//
// A block computes kTileQ rows of one head, and like the forward walks the key tiles they see, in
// steps of one chunk of kChunk columns each. P is recomputed from lse; nothing of size
// seqlen_q x seqlen_kv is stored. The last K chunk of the scores is the first of the third product,
// which therefore walks the chunks backwards:
//
//     step:   V0 .. Vm        K0 .. Kn          (Kn)  Kn-1 .. K0
//             dP += dout V^T  scores += Q K^T   dscore; dq += dscore K
//
// The order of all sums is fixed, so the result is deterministic. Shapes: cuflash/arch/simt.py.
#include "attention/params.cuh"
#include "hw/memory.cuh"
#include "parts/mask.cuh"
#include "parts/operand.cuh"
#include "parts/softmax.cuh"
#include "parts/tile.cuh"
#include "parts/work.cuh"

using tile::Lane;

constexpr int kRowsPerLane = plan::kTileQ / plan::kThreadsY;
constexpr int kKeysPerLane = plan::kTileKv / plan::kThreadsX;
constexpr int kColsPerLane = plan::kChunk / plan::kThreadsX;
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
    const Band band = Band::of(p);
    const int32 head_kv = work.head / (p.heads_q / p.heads_kv);
    const Matrix q = matrix(p.q, work.batch, work.head, p.seqlen_q, p.head_dim);
    const Matrix dout = matrix(p.dout, work.batch, work.head, p.seqlen_q, p.head_dim_v);
    const Matrix k = matrix(p.k, work.batch, head_kv, p.seqlen_kv, p.head_dim);
    const Matrix v = matrix(p.v, work.batch, head_kv, p.seqlen_kv, p.head_dim_v);
    const int32 first_query = work.tile * plan::kTileQ;
    const int32 k_steps = tiles_of(p.head_dim, plan::kChunk);
    const int32 v_steps = tiles_of(p.head_dim_v, plan::kChunk);
    const int32 steps = v_steps + 2 * k_steps - 1;
    const TileRange keys = band.key_tiles(first_query, plan::kTileQ, plan::kTileKv);
    const Accum scale = static_cast<Accum>(p.scale);

    Accum result[plan::kChunks][kRowsPerLane][kColsPerLane];
    Accum lse[kRowsPerLane], delta[kRowsPerLane];
#pragma unroll
    for (int c = 0; c < plan::kChunks; ++c) tile::clear(result[c]);
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
        const int32 row = first_query + lane.y + i * plan::kThreadsY;
        lse[i] = softmax::infinity<Accum>();
        delta[i] = 0;
        if (row < p.seqlen_q) {
            lse[i] = softmax::exponent_reference(
                hw::load(vector(p.lse, work.batch, work.head).at(row)));
            delta[i] = hw::load(vector(p.delta, work.batch, work.head).at(row));
        }
    }

    tile::Transfer<plan::kTileQ, plan::kChunk> row_transfer;  // of Q or dout
    tile::Transfer<plan::kTileKv, plan::kChunk> transfer;     // of K or V

    auto load = [&](int32 key_tile, int32 step) {
        const bool of_v = step < v_steps, of_scores = !of_v && step < v_steps + k_steps;
        const int32 chunk = of_v ? step : of_scores ? step - v_steps : steps - 1 - step;
        transfer.load(either(of_v, v, k), key_tile * plan::kTileKv, chunk * plan::kChunk);
        if (!kResident && (of_v || of_scores)) {
            row_transfer.load(either(of_v, dout, q), first_query, chunk * plan::kChunk);
        }
    };
    // As in forward_simt.cu; careful: a K chunk with infinities or NaNs, in a tile with hidden pairs.
    auto begin_step = [&](int32 key_tile, int32 step, bool hidden_pairs) -> bool {
        if (!plan::kPrefetch) load(key_tile, step);
        __syncthreads();
        transfer.store(smem.chunk);
        if (!kResident && step < v_steps + k_steps) {
            row_transfer.store(step < v_steps ? smem.dout[0] : smem.q[0]);
        }
        const bool careful = hidden_pairs && step >= v_steps && transfer.nonfinite();
        const bool any_careful = __syncthreads_or(careful);
        const bool last = step + 1 == steps;
        if (plan::kPrefetch && !(last && key_tile + 1 == keys.last)) {
            load(last ? key_tile + 1 : key_tile, last ? 0 : step + 1);
        }
        return any_careful;
    };

    if (kResident) {
        __syncthreads();  // the block's previous part may still be reading these
        for (int c = 0; c < k_steps; ++c) {
            row_transfer.load(q, first_query, c * plan::kChunk);
            row_transfer.store(smem.q[c]);
        }
        for (int c = 0; c < v_steps; ++c) {
            row_transfer.load(dout, first_query, c * plan::kChunk);
            row_transfer.store(smem.dout[c]);
        }
    }
    if (plan::kPrefetch && keys.first < keys.last) load(keys.first, 0);

    for (int32 key_tile = keys.first; key_tile < keys.last; ++key_tile) {
        const int32 first_key = key_tile * plan::kTileKv;
        const bool full = band.full(first_query, plan::kTileQ, first_key, plan::kTileKv);

        Accum scores[kRowsPerLane][kKeysPerLane], dprobabilities[kRowsPerLane][kKeysPerLane];
        tile::clear(scores);
        tile::clear(dprobabilities);
#pragma unroll 1
        for (int32 step = 0; step < v_steps; ++step) {
            begin_step(key_tile, step, false);
            tile::add_a_bt(dprobabilities, smem.dout[kResident ? step : 0], smem.chunk, lane);
        }
        bool careful = false;
#pragma unroll 1
        for (int32 step = 0; step < k_steps; ++step) {
            careful = begin_step(key_tile, v_steps + step, !full);
            tile::add_a_bt(scores, smem.q[kResident ? step : 0], smem.chunk, lane);
        }

#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
            const int row = lane.y + i * plan::kThreadsY;
#pragma unroll
            for (int j = 0; j < kKeysPerLane; ++j) {
                const int col = lane.x + j * plan::kThreadsX;
                const Accum score = softmax::scaled(scale, scores[i][j]);
                const Accum probability = softmax::exponential(score - lse[i]);
                const bool seen = full || band.visible(first_query + row, first_key + col);
                smem.dscores.at[row][col] =
                    seen ? probability * (dprobabilities[i][j] - delta[i]) : Accum(0);
            }
        }
        __syncwarp();

#pragma unroll
        for (int c = plan::kChunks - 1; c >= 0; --c) {
            if (c >= k_steps) continue;
            if (c < k_steps - 1) careful = begin_step(key_tile, steps - 1 - c, !full);
            if (careful) {
                auto visible = [&](int row, int key) {
                    return band.visible(first_query + row, first_key + key);
                };
                tile::add_a_b_where(result[c], smem.dscores, smem.chunk, lane, visible);
            } else {
                tile::add_a_b(result[c], smem.dscores, smem.chunk, lane);
            }
        }
        __syncwarp();  // the next tile's dscores overwrite these
    }

    const Matrix dq = matrix(p.dq, work.batch, work.head, p.seqlen_q, p.head_dim);
    Accum factor[kRowsPerLane];
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) factor[i] = scale;
#pragma unroll
    for (int c = 0; c < plan::kChunks; ++c) {
        tile::write<plan::kChunk>(dq, result[c], factor, first_query, c * plan::kChunk, lane);
    }
}

extern "C" __global__ void __launch_bounds__(plan::kThreads, plan::kBlocksPerSm)
    backward_dq_simt(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int32 tiles = tiles_of(p.seqlen_q, plan::kTileQ);
    const int64 parts = p.batch * p.heads_q * tiles;
    for (int64 index = blockIdx.x; index < parts; index += gridDim.x) {
        Work work = work_at(index, p.heads_q, tiles);
        work.tile = tiles - 1 - work.tile;  // causal: the last rows see most keys, so they go first
        backward_dq_tile(p, work, smem);
    }
}
