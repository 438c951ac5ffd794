// SPDX-License-Identifier: Apache-2.0
// The results of forward_sm90.cu: from registers through shared memory to the array, or kept back,
// if something spoilt them.
#pragma once
#include "attention/forward_sm90_rows.cuh"
#include "attention/forward_sm90_smem.cuh"
#include "attention/params_tma.cuh"
#include "hw/memory.cuh"
#include "hw/tma.cuh"
#include "parts/fragment.cuh"
#include "parts/pipeline.cuh"
#include "parts/softmax.cuh"
#include "parts/swizzled.cuh"
#include "parts/work.cuh"

// Writes as many rows of a tile, as it holds those of the warp from column `col` on. The array has
// rows that TMA could write.
template <class Tile>
__device__ __forceinline__ void write_some(const Tensor& to,
                                           const Job& job,
                                           int32 query,
                                           int32 columns,
                                           const Tile& tile,
                                           int row,
                                           int col) {
    using Piece = hw::Vec<uint32, 4>;
    const Entry& entry = job.work.entry;
    Element* const data = static_cast<Element*>(to.data) + job.batch * to.stride_batch +
                          job.work.head * to.stride_head + (entry.first_q + query) * to.stride_seq +
                          col;
    const int rows = entry.seqlen_q - query;
#pragma unroll 1
    for (int i = fragment::lane(); i < rows * (Tile::kCols / 8); i += 32) {
        const int r = i / (Tile::kCols / 8), c = i % (Tile::kCols / 8) * 8;
        if (col + c >= columns) continue;
        hw::store(reinterpret_cast<Piece*>(data + r * to.stride_seq + c),
                  *reinterpret_cast<const Piece*>(tile.piece(row + r, c)));
    }
}

// Writes rows of results, or starts to, through a tile that holds those of the warp from column
// `col` on.
template <class Tile>
__device__ __forceinline__ void write(
    const TmaParams& maps, const Job& job, int32 query, const Tile& tile, int row, int col) {
    const Entry& entry = job.work.entry;
    if (plan::kPacked && query + 16 > entry.seqlen_q) {  // the next entry's rows are not to change
        __syncwarp();
        write_some(maps.call.out, job, query, maps.call.head_dim_v, tile, row, col);
    } else if (query < entry.seqlen_q) {
        swizzled::store(maps.o, entry.first_q + query, job.work.head, job.batch, tile, row, col);
    }
}

// Starts to write rows of results from chunk kFirst on, once the tile or a chunk has been left by
// what went through it before.
template <int kFirst = 0>
__device__ __forceinline__ void send(const TmaParams& maps,
                                     Way<true>& way,
                                     const State& state,
                                     const float (&inverse)[2],
                                     const Job& job,
                                     int32 query,
                                     int row) {
    hw::bulk_wait_read<0>();
    __syncwarp();
    swizzled::put<0, kCols8>(way.tile, state.out, inverse, row);
    write(maps, job, query, way.tile, row, 0);
}
template <int kFirst = 0>
__device__ __forceinline__ void send(const TmaParams& maps,
                                     Way<false>& way,
                                     const State& state,
                                     const float (&inverse)[2],
                                     const Job& job,
                                     int32 query,
                                     int row) {
    if constexpr (kFirst < OutTile::kChunks) {
        constexpr int kColumns8 = OutChunk::kCols / 8;
        OutChunk& chunk = way.chunks[kFirst % 2];
        // The first chunk waits for all of the last job, another one for the one before the last:
        // all chunks of a job are groups of stores, or none is.
        if (kFirst != 1) hw::bulk_wait_read<kFirst == 0 ? 0 : 1>();
        __syncwarp();
        swizzled::put<kFirst * kColumns8, kColumns8>(chunk, state.out, inverse, row);
        write(maps, job, query, chunk, row, kFirst * OutChunk::kCols);
        send<kFirst + 1>(maps, way, state, inverse, job, query, row);
    }
}

// Has 0 * inf spoilt the results of a warp's rows? It does so in a column of all of them, so that
// one of a lane's rows tells. Rows may also see what is infinite. All lanes.
__device__ __forceinline__ bool spoilt(const State& state) {
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < kCols8; ++n) {
        sums[0] += fabsf(state.out[0][n][0]);
        sums[1] += fabsf(state.out[0][n][1]);
    }
    return __any_sync(0xffffffffu, !(sums[0] + sums[1] < softmax::infinity<float>()));
}

// Starts to write the results of the job in a slot, which is free then.
__device__ __forceinline__ void store(const TmaParams& maps,
                                      Smem& smem,
                                      const State& state,
                                      const float (&inverse)[2],
                                      Slots slot,
                                      int group) {
    const Job& job = smem.jobs[slot.at()];
    const int row = uniform(thread_of_group() / 32 * 16);
    const int32 query = uniform(query_of(job));
    if (state.caution == Caution::kWaits) hw::bulk_wait<0>();
    if (state.caution == Caution::kLooks && spoilt(state)) {
        if (fragment::lane() == 0) smem.spoilt[slot.at()][4 * group + row / 16] = 1;
    } else {
        send(maps, smem.ways[group], state, inverse, job, query, row);
    }
    arrive(smem.job_empty[slot.at()]);
}
