// SPDX-License-Identifier: Apache-2.0
// out = transposed x, both n x n with n a multiple of kTile, a tile at a time through shared
// memory. A block walks a column of tiles: one barrier says that the tile is filled, one that it is
// free.
#include "hw/memory.cuh"

struct Params {
    const double* x;
    double* out;
    int n;
};

struct Smem {
    double tile[plan::kTile][plan::kTile + 1];
};

extern "C" __global__ void transpose(const __grid_constant__ Params p) {
    using Pair = hw::Vec<double, 2>;
    Smem& smem = hw::shared_memory<Smem>();
    const int row = threadIdx.x / (plan::kTile / 2);
    const int col = threadIdx.x % (plan::kTile / 2) * 2;
    const int left = blockIdx.x * plan::kTile;
    for (int top = 0; top < p.n; top += plan::kTile) {
        const double* from = p.x + static_cast<long long>(top + row) * p.n + left + col;
        const Pair pair = hw::load(reinterpret_cast<const Pair*>(from));
        smem.tile[row][col] = pair.v[0];
        smem.tile[row][col + 1] = pair.v[1];
        if (plan::kBarriers >= 1) __syncthreads();
        const Pair turned = {smem.tile[col][row], smem.tile[col + 1][row]};
        double* to = p.out + static_cast<long long>(left + row) * p.n + top + col;
        hw::store(reinterpret_cast<Pair*>(to), turned);
        if (plan::kBarriers >= 2) __syncthreads();
    }
}
