// SPDX-License-Identifier: Apache-2.0
// dk and dv of backward_sm90.cu: from registers through shared memory to the arrays, and what is
// special in tiles that not all see, which is added to all three gradients afterwards.
#pragma once
#include "attention/backward_sm90_smem.cuh"
#include "attention/backward_sm90_tiles.cuh"
#include "attention/params_tma.cuh"
#include "hw/reduce.cuh"
#include "hw/semaphore.cuh"
#include "parts/fragment.cuh"
#include "parts/gradient_mma.cuh"
#include "parts/jobs.cuh"
#include "parts/operand.cuh"
#include "parts/score.cuh"
#include "parts/special.cuh"
#include "parts/work.cuh"

struct Sums {
    float dk[1][kCols / 8][4];
    float dv[1][kColsV / 8][4];
};

// What a warp's results go through on their way out: its share of a tile of gradients of scores
// that no product needs any more.
constexpr int kShare = ScoreTile::kBytes / kComputingWarps;
using OutTile = swizzled::Tile<16, (kShare < 2048 ? kShare / 32 : 64)>;

// Rounds a warp's sums and writes them, some columns after the other.
template <int kFirst = 0, int kCols8>
__device__ __forceinline__ void write(const Matrix& to,
                                      OutTile& through,
                                      const float (&sums)[1][kCols8][4],
                                      float factor,
                                      int32 row,
                                      int32 col) {
    if constexpr (kFirst < kCols8) {
        constexpr int kCount = OutTile::kCols / 8;
        static_assert(kCols8 % kCount == 0, "whole tiles");
        const float factors[2] = {factor, factor};
        __syncwarp();  // what went through it before has left
        swizzled::put<kFirst, kCount>(through, sums, factors, 0);
        __syncwarp();
        swizzled::write(to, through, row, col + 8 * kFirst);
        write<kFirst + kCount>(to, through, sums, factor, row, col);
    }
}

__device__ __forceinline__ void write_results(
    const Params& p, const Job& job, const Sums& sums, ScoreTile& unused, int group) {
    if (!p.dk.data) return;
    const Entry& entry = job.work.entry;
    const int32 head = job.work.head;
    const int32 row = job.work.tile * plan::kTileKv + row_of_warp(group);
    const Scores score = Scores::of(p, entry, 0);
    const uint32 warp = hw::forget(static_cast<uint32>(threadIdx.x)) / 32 - 4;
    auto& through = reinterpret_cast<OutTile&>(unused.at[warp * (kShare / 2)]);
    write(key_matrix(p.dk, entry, head, p.head_dim), through, sums.dk, score.scale, row,
          column_group(group) * kCols);
    write(key_matrix(p.dv, entry, head, p.head_dim_v), through, sums.dv, score.kept_factor(), row,
          column_group(group) * kColsV);
}

// Adds what is special in Q, dout and K, in query tiles from which something is hidden, to the
// results: see special.cuh. Q and dout come through the place of V, which no product needs any
// more; theirs have tiles of the next job.
__device__ __forceinline__ void add_special(const TmaParams& maps, Smem& smem, int group) {
    static_assert(sizeof(QueryTile) <= sizeof(ValueTile) && sizeof(DoutTile) <= sizeof(ValueTile),
                  "room for a tile");
    const Params& p = maps.call;
    const Job& job = smem.job;
    const Entry& entry = job.work.entry;
    const Matrix dk = key_matrix(p.dk, entry, job.work.head, p.head_dim);
    const Matrix dv = key_matrix(p.dv, entry, job.work.head, p.head_dim_v);
    const int32 first_key = job.work.tile * plan::kTileKv;
    const int32 key = first_key + row_of_warp(group);
    const int warp = static_cast<int>(threadIdx.x) / 32 - 4;
    QueryTile& q = reinterpret_cast<QueryTile&>(smem.v);
    DoutTile& dout = reinterpret_cast<DoutTile&>(smem.v);
    load_keys_again(maps, smem);
#pragma unroll 1
    for (Visit visit = Visit::first(job); visit.exists(job); visit.next(job)) {
        if (!visit.hides(job)) continue;
        const int32 query = visit.tile * plan::kTileQ;
        const Scores score = Scores::of(p, entry, visit.head);
        const auto sees = [&](int i, int k) {
            return score.visible(query + k, key + fragment::row_of(i));
        };
        load_again(smem, q, [&](QueryTile& to, hw::MBarrier& full) {
            load_queries(maps.q, to, full, job, visit);
        });
#pragma unroll 1
        for (int i = 0; p.dk.data && i < kCols; i += 16) {
            const int col = column_group(group) * kCols + i;
            special::add<false>(dk, key, col, q, col, sees);
        }
        load_again(smem, dout, [&](DoutTile& to, hw::MBarrier& full) {
            load_queries(maps.o, to, full, job, visit);
        });
#pragma unroll 1
        for (int i = 0; p.dk.data && i < kColsV; i += 16) {
            const int col = column_group(group) * kColsV + i;
            special::add<true>(dv, key, col, dout, col, sees);
        }
        if (!p.dq.data) continue;
        const int64 slot = query_slot<plan::kTileQ>(p, entry, visit.head, visit.tile);
        const int32 first = score.band.key_tiles(query, plan::kTileQ, plan::kTileKv).first;
        // Behind the job's own turn, or the first one's, which writes.
        for (int split = 0; split < plan::kSplits; ++split) {
            hw::semaphore_wait(dq_turn(p, entry, visit.head, visit.tile, split),
                               plan::kOrdered ? job.work.tile - first + 1 : 1);
        }
#pragma unroll 1
        for (int slab = 0; slab < plan::kTileQ / 16; ++slab) {
#pragma unroll 1
            for (int col = 16 * warp; col < plan::kDqDim; col += 16 * kComputingWarps) {
                float x[2][4];
                special::sums<false>(x, smem.k, col, [&](int i, int k) {
                    return score.visible(query + 16 * slab + fragment::row_of(i), first_key + k);
                });
                hw::reduce_add(dq_sums(p, slot, slab, col / 8), x[0]);
                hw::reduce_add(dq_sums(p, slot, slab, col / 8 + 1), x[1]);
            }
        }
    }
}
