// SPDX-License-Identifier: Apache-2.0
// Which part of the output a block computes. The grid has one dimension, since the others end at
// 65535; when even that one does not suffice, a block takes several parts.
#pragma once
#include "attention/params.cuh"

struct Work {
    int64 batch;
    int32 head, tile;
};

// Part `index` of batch x heads x tiles. Tiles of one head are neighbours: they read the same keys
// and values (or queries), which then come from the L2 cache.
__device__ __forceinline__ Work work_at(int64 index, int32 heads, int32 tiles) {
    const int64 row = index / tiles;
    return {row / heads, static_cast<int32>(row % heads), static_cast<int32>(index % tiles)};
}
