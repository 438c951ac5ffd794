// SPDX-License-Identifier: Apache-2.0
// The pairs of a visit of backward_sm90.cu: which they are, and where a warp holds what bias and
// mask have for them.
#pragma once
#include "attention/backward_sm90_smem.cuh"
#include "parts/pair_blocks.cuh"
#include "parts/pipeline.cuh"
#include "parts/score.cuh"
#include "parts/swizzled.cuh"
#include "parts/work.cuh"

// A warp's scores at a visit, and its first query and key.
struct VisitedPairs {
    Scores score;
    int32 query, key;
};
__device__ __forceinline__ VisitedPairs pairs_at(const Params& p,
                                                 const Smem& smem,
                                                 Stages stage,
                                                 int row) {
    const Step& step = smem.steps[stage.at()];
    const int32 query = step.query, key = smem.job.work.tile * plan::kTileKv + row;
    return {Scores::of(p, smem.job.work.entry, step.head), query, key};
}

// Where a warp holds what bias and mask have for a visit: where it will put ds itself. Of warps
// with the same keys each puts its share of the blocks; the same of the visit before has been read,
// so that there is room for as many blocks again.
struct PlaceOfPairs {
    Smem& smem;
    uint32 visit;
    int group;

    __device__ __forceinline__ Element* at(uint32 block, uint32 row, uint32 piece) const {
        constexpr uint32 kSharers = plan::kColumnGroups;
        ScoreTile& tile = smem.ds[(visit + block % kSharers) % 2];
        return tile.piece(16 * (block / kSharers * kSharers + column_group(group)) + row,
                          row_of_warp(group) + 8 * piece);
    }
};
using HeldPairs = pair_blocks::Blocks<plan::kTileQ, PlaceOfPairs>;

static_assert(plan::kColumnGroups == 1 || plan::kSplits > 1,
              "all have read ds of the visit before at the end of a visit: see turn()");
