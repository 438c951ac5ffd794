// SPDX-License-Identifier: Apache-2.0
// Tiles and their products without tensor cores: global memory -> registers -> shared memory, and
// two matrix products of shared tiles with the result spread over the registers of the block.
//
// The block is a grid of kThreadsY x kThreadsX lanes. Of a result with kY * kThreadsY rows, lane
// (y, x) holds rows y + i * kThreadsY; all lanes of a row are neighbours in one warp.
#pragma once
#include "hw/memory.cuh"
#include "parts/operand.cuh"

namespace tile {

constexpr int kThreads = plan::kThreadsY * plan::kThreadsX;
static_assert(plan::kThreadsX <= 32 && 32 % plan::kThreadsX == 0, "a row must not leave its warp");
static_assert(kThreads % 32 == 0, "row_max and row_sum name all lanes of a warp");

// How many rows or columns of a tile each lane holds.
template <int kLength, int kLanes>
__device__ constexpr int per_lane() {
    static_assert(kLength % kLanes == 0, "some rows or columns would be nobody's");
    return kLength / kLanes;
}

using Group = hw::Vec<Accum, kGroup>;

struct Lane {
    int y, x;
};
__device__ __forceinline__ Lane this_lane() {
    return {static_cast<int>(threadIdx.x) / plan::kThreadsX,
            static_cast<int>(threadIdx.x) % plan::kThreadsX};
}

// A tile in shared memory. One group of padding shifts each row by 16 bytes, so that the same
// column of eight consecutive rows lies in different banks.
template <int kRows, int kCols>
struct Shared {
    alignas(16) Accum at[kRows][kCols + kGroup];

    __device__ __forceinline__ Group group(int row, int col) const {
        return *reinterpret_cast<const Group*>(&at[row][col]);
    }
};

// This thread's share of a tile on its way from global to shared memory. What lies outside the
// matrix is zero.
template <int kRows, int kCols>
struct Transfer {
    static constexpr int kGroupsX = kCols / kGroup;
    static constexpr int kGroups = kRows * kGroupsX;
    static constexpr int kSlots = (kGroups + kThreads - 1) / kThreads;
    static_assert(kThreads % kGroupsX == 0, "a thread keeps its columns from slot to slot");
    static constexpr int kRowStep = kThreads / kGroupsX;

    hw::Vec<Element, kGroup> held[kSlots];

    __device__ __forceinline__ void load(const Matrix& m, int32 first_row, int32 first_col) {
        const int32 col = first_col + static_cast<int>(threadIdx.x) % kGroupsX * kGroup;
        int32 row = first_row + static_cast<int>(threadIdx.x) / kGroupsX;
        const Element* from = m.data + row * m.stride_row + col * m.stride_col;
        const int32 end_row = min(m.rows, first_row + kRows);
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            held[slot] = {};
            if (row < end_row && col < m.cols) {
                if (m.vectors) {
                    held[slot] = hw::load(reinterpret_cast<const hw::Vec<Element, kGroup>*>(from));
                } else {
#pragma unroll
                    for (int e = 0; e < kGroup; ++e) {
                        if (col + e < m.cols) held[slot].v[e] = hw::load(from + e * m.stride_col);
                    }
                }
            }
            row += kRowStep;
            from += kRowStep * m.stride_row;
        }
    }

    __device__ __forceinline__ void store(Shared<kRows, kCols>& to) const {
        const int col = static_cast<int>(threadIdx.x) % kGroupsX * kGroup;
        int row = static_cast<int>(threadIdx.x) / kGroupsX;
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            if (kGroups % kThreads == 0 || row < kRows) {
                Group wide;
#pragma unroll
                for (int e = 0; e < kGroup; ++e) wide.v[e] = widen(held[slot].v[e]);
                *reinterpret_cast<Group*>(&to.at[row][col]) = wide;
            }
            row += kRowStep;
        }
    }

    // Does this thread hold an infinity or a NaN?
    __device__ __forceinline__ bool nonfinite() const {
        bool found = false;
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
            for (int e = 0; e < kGroup; ++e) {
                const Accum x = widen(held[slot].v[e]);
                found |= x - x != Accum(0);
            }
        }
        return found;
    }
};

// Replace a tile that the whole block has used by another. The load is issued before the block
// meets, so that it waits for memory and for the slowest warp at once. Returns, if `look`, whether
// the tile holds infinities or NaNs.
template <int kRows, int kCols>
__device__ __forceinline__ bool stage(
    Shared<kRows, kCols>& to, const Matrix& m, int32 first_row, int32 first_col, bool look) {
    Transfer<kRows, kCols> transfer;
    transfer.load(m, first_row, first_col);
    __syncthreads();
    transfer.store(to);
    return __syncthreads_or(look && transfer.nonfinite());
}

// Load the operand that stays for the whole part of a block, a tile for each chunk of columns. No
// barrier: none may be reading the tiles any more, and the next stage() makes them visible.
template <int kRows, int kCols, int kChunks>
__device__ __forceinline__ void stage_all(Shared<kRows, kCols> (&to)[kChunks],
                                          const Matrix& m,
                                          int32 first_row) {
    for (int c = 0; c * kCols < m.cols; ++c) {
        Transfer<kRows, kCols> transfer;
        transfer.load(m, first_row, c * kCols);
        transfer.store(to[c]);
    }
}

// result[i][j] += sum_d a[y + i * kThreadsY][d] * b[x + j * kThreadsX][d]
template <int kY, int kX, int kRowsA, int kRowsB, int kCols>
__device__ __forceinline__ void add_a_bt(Accum (&result)[kY][kX],
                                         const Shared<kRowsA, kCols>& a,
                                         const Shared<kRowsB, kCols>& b,
                                         Lane lane) {
#pragma unroll plan::kUnroll
    for (int d = 0; d < kCols; d += kGroup) {
        Group ra[kY], rb[kX];
#pragma unroll
        for (int i = 0; i < kY; ++i) ra[i] = a.group(lane.y + i * plan::kThreadsY, d);
#pragma unroll
        for (int j = 0; j < kX; ++j) rb[j] = b.group(lane.x + j * plan::kThreadsX, d);
#pragma unroll
        for (int e = 0; e < kGroup; ++e) {
#pragma unroll
            for (int i = 0; i < kY; ++i) {
#pragma unroll
                for (int j = 0; j < kX; ++j) result[i][j] += ra[i].v[e] * rb[j].v[e];
            }
        }
    }
}

// Where the columns of a result of add_a_b() lie: each lane holds runs of kRun consecutive ones.
template <int kCols>
struct Columns {
    static constexpr int kX = kCols / plan::kThreadsX;
    static constexpr int kRun = kX < kGroup ? kX : kGroup;
    static_assert(kCols % plan::kThreadsX == 0 && kX % kRun == 0);

    __device__ static __forceinline__ int run(Lane lane, int j) {
        return (lane.x + j / kRun * plan::kThreadsX) * kRun;
    }
};

// result[i][j] += sum_k a[y + i * kThreadsY][k] * b[k][column j of the lane]
template <int kY, int kX, int kRowsA, int kDepth, int kCols>
__device__ __forceinline__ void add_a_b(Accum (&result)[kY][kX],
                                        const Shared<kRowsA, kDepth>& a,
                                        const Shared<kDepth, kCols>& b,
                                        Lane lane) {
    using C = Columns<kCols>;
    static_assert(kX == C::kX);
#pragma unroll plan::kUnroll
    for (int k = 0; k < kDepth; k += kGroup) {
        Group ra[kY];
#pragma unroll
        for (int i = 0; i < kY; ++i) ra[i] = a.group(lane.y + i * plan::kThreadsY, k);
#pragma unroll
        for (int e = 0; e < kGroup; ++e) {
            Accum rb[kX];
#pragma unroll
            for (int j = 0; j < kX; j += C::kRun) {
                const auto run = *reinterpret_cast<const hw::Vec<Accum, C::kRun>*>(
                    &b.at[k + e][C::run(lane, j)]);
#pragma unroll
                for (int r = 0; r < C::kRun; ++r) rb[j + r] = run.v[r];
            }
#pragma unroll
            for (int i = 0; i < kY; ++i) {
#pragma unroll
                for (int j = 0; j < kX; ++j) result[i][j] += ra[i].v[e] * rb[j];
            }
        }
    }
}

// The same for a tile that is partly hidden and holds infinities or NaNs: a hidden pair (row, k)
// contributes nothing, where the product above would add 0 * NaN. Rare, so short instead of fast.
template <int kY, int kX, int kRowsA, int kDepth, int kCols, class Visible>
__device__ __forceinline__ void add_a_b_where(Accum (&result)[kY][kX],
                                              const Shared<kRowsA, kDepth>& a,
                                              const Shared<kDepth, kCols>& b,
                                              Lane lane,
                                              Visible visible) {
    using C = Columns<kCols>;
#pragma unroll 1
    for (int k = 0; k < kDepth; ++k) {
#pragma unroll
        for (int i = 0; i < kY; ++i) {
            const int row = lane.y + i * plan::kThreadsY;
            if (!visible(row, k)) continue;
#pragma unroll
            for (int j = 0; j < kX; ++j) {
                result[i][j] += a.at[row][k] * b.at[k][C::run(lane, j) + j % C::kRun];
            }
        }
    }
}

// Round and write one chunk of kCols columns of a result, scaled row by row.
template <int kCols, int kY, int kX>
__device__ __forceinline__ void write(const Matrix& m,
                                      const Accum (&result)[kY][kX],
                                      const Accum (&factor)[kY],
                                      int32 first_row,
                                      int32 first_col,
                                      Lane lane) {
    using C = Columns<kCols>;
#pragma unroll
    for (int i = 0; i < kY; ++i) {
        const int32 row = first_row + lane.y + i * plan::kThreadsY;
        if (row >= m.rows) continue;
#pragma unroll
        for (int j = 0; j < kX; j += C::kRun) {
            const int32 col = first_col + C::run(lane, j);
            Element* to = m.data + row * m.stride_row + col * m.stride_col;
            hw::Vec<Element, C::kRun> rounded;
#pragma unroll
            for (int r = 0; r < C::kRun; ++r) {
                rounded.v[r] = narrow<Element>(result[i][j + r] * factor[i]);
            }
            if (m.vectors) {
                if (col < m.cols) {
                    hw::store(reinterpret_cast<hw::Vec<Element, C::kRun>*>(to), rounded);
                }
            } else {
#pragma unroll
                for (int r = 0; r < C::kRun; ++r) {
                    if (col + r < m.cols) hw::store(to + r * m.stride_col, rounded.v[r]);
                }
            }
        }
    }
}

template <int kY, int kX>
__device__ __forceinline__ void clear(Accum (&result)[kY][kX]) {
#pragma unroll
    for (int i = 0; i < kY; ++i) {
#pragma unroll
        for (int j = 0; j < kX; ++j) result[i][j] = 0;
    }
}

}  // namespace tile
