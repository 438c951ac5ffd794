// SPDX-License-Identifier: Apache-2.0
// Tiles of 16-bit elements in shared memory as the TMA unit fills them and wgmma reads them.
//
// A tile is a sequence of chunks of columns, each with all rows, one close behind the other; the
// 16-byte pieces of a row are permuted within it, by the number of the row, so that neither a
// column of pieces nor a row meets a bank twice.
#pragma once
#include "hw/ldmatrix.cuh"
#include "hw/sync.cuh"
#include "hw/tma.cuh"
#include "hw/wgmma.cuh"
#include "parts/fragment.cuh"
#include "parts/operand.cuh"

namespace swizzled {

template <int kRowsOfTile, int kColsOfTile>
struct alignas(1024) Tile {
    static constexpr int kRows = kRowsOfTile, kCols = kColsOfTile;
    static constexpr int kChunk = kCols % 64 == 0 ? 64 : kCols % 32 == 0 ? 32 : 16;  // columns
    static constexpr int kChunks = kCols / kChunk;
    static constexpr int kRowBytes = 2 * kChunk;
    static constexpr int kChunkBytes = kRows * kRowBytes;
    static constexpr int kBytes = kChunks * kChunkBytes;
    static constexpr hw::Swizzle kSwizzle = kChunk == 64   ? hw::Swizzle::k128
                                            : kChunk == 32 ? hw::Swizzle::k64
                                                           : hw::Swizzle::k32;
    static_assert(kCols % 16 == 0 && kRows % 8 == 0, "whole operands of wgmma");

    Element at[kBytes / 2];

    // The piece of 8 columns from `col` on of a row; `col` is a multiple of 8.
    __device__ __forceinline__ Element* piece(uint32 row, uint32 col) {
        constexpr uint32 kPieces = kChunk / 8;
        const uint32 turned = (col % kChunk / 8) ^ (row / (8 / kPieces) % kPieces);
        return &at[col / kChunk * (kChunkBytes / 2) + row * kChunk + turned * 8];
    }
    __device__ __forceinline__ const Element* piece(uint32 row, uint32 col) const {
        return const_cast<Tile*>(this)->piece(row, col);
    }
};

// Starts to bring a tile: its rows from `row` on of a head. What lies outside of the array becomes
// zeros. The barrier receives Tile::kBytes. One thread.
template <class Tile>
__device__ __forceinline__ void load(
    Tile& tile, const hw::TensorMap& map, hw::MBarrier& full, int row, int head, int batch) {
#pragma unroll
    for (int c = 0; c < Tile::kChunks; ++c) {
        hw::tma_load(&tile.at[c * (Tile::kChunkBytes / 2)], map, full, c * Tile::kChunk, row, head,
                     batch);
    }
}

// Starts to write rows [row, row + 16) of a tile to a head, as far as the array has them, from row
// `to_row` and column `to_col` on; they are not to be written over before bulk_wait_read(). All
// lanes of the warp that made these rows.
template <class Tile>
__device__ __forceinline__ void store(const hw::TensorMap& map,
                                      int to_row,
                                      int head,
                                      int batch,
                                      const Tile& tile,
                                      int row,
                                      int to_col) {
    hw::fence_proxy_async();
    __syncwarp();
    if (!hw::elect_one()) return;
#pragma unroll
    for (int c = 0; c < Tile::kChunks; ++c) {
        hw::tma_store(map, &tile.at[c * (Tile::kChunkBytes / 2) + row * Tile::kChunk],
                      to_col + c * Tile::kChunk, to_row, head, batch);
    }
    hw::bulk_commit();
}

// Is any element of a tile infinite or NaN? For all lanes of a warp.
template <int kAtOnce = 4, class Tile>
__device__ __forceinline__ bool has_special(const Tile& tile) {
    using Piece = hw::Vec<uint32, 4>;
    const auto* const pieces = reinterpret_cast<const Piece*>(tile.at);
    uint32 bits = 0;
#pragma unroll kAtOnce
    for (int i = hw::forget(fragment::lane()); i < Tile::kBytes / 16; i += 32) {
        const Piece piece = pieces[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) bits |= fragment::special_bits(piece.v[j]);
    }
    return __any_sync(0xffffffffu, (bits & fragment::kSpecialBits) != 0);
}

// Makes 0 of them, for wgmma and the TMA unit too behind a barrier. For each of so many threads.
template <int kThreads, class Tile>
__device__ __forceinline__ void remove_special(Tile& tile, int thread) {
    auto* const words = reinterpret_cast<uint32*>(tile.at);
#pragma unroll 1
    for (int i = thread; i < Tile::kBytes / 4; i += kThreads) {
        words[i] &= ~fragment::special(words[i]);
    }
    hw::fence_proxy_async();
}

// --- Products by a warpgroup ---------------------------------------------------------------------

// A tile, from row `row` on, as an operand whose rows are those of the product (a, or b^T); from
// step(j) on 16 columns.
template <class Tile>
struct Along {
    unsigned long long descriptor;

    __device__ explicit __forceinline__ Along(const Tile& tile, int row = 0)
        : descriptor(hw::wgmma_descriptor(
              &tile.at[row * Tile::kChunk], 0, 8 * Tile::kRowBytes, Tile::kSwizzle)) {}
    __device__ __forceinline__ unsigned long long step(int j) const {
        constexpr int kSteps = Tile::kChunk / 16;  // of a chunk
        return descriptor + (j / kSteps * Tile::kChunkBytes + j % kSteps * 32) / 16;
    }
};

// A tile, from column `col` on, which begins a chunk, as the right operand b, whose rows are summed
// over; from step(j) on 16 rows.
template <class Tile>
struct Down {
    unsigned long long descriptor;

    __device__ explicit __forceinline__ Down(const Tile& tile, int col = 0)
        : descriptor(hw::wgmma_descriptor(&tile.at[col / Tile::kChunk * (Tile::kChunkBytes / 2)],
                                          Tile::kChunkBytes,
                                          8 * Tile::kRowBytes,
                                          Tile::kSwizzle)) {}
    __device__ __forceinline__ unsigned long long step(int j) const {
        return descriptor + j * Tile::kRowBytes;  // of 16 rows, in units of 16 bytes
    }
};

// The accumulators of 64 rows as wgmma lists them.
template <int kColumns8>
__device__ __forceinline__ float (&listed(float (&x)[1][kColumns8][4]))[4 * kColumns8] {
    return reinterpret_cast<float (&)[4 * kColumns8]>(x);
}

// Starts sums = a b^T, of a the 64 rows from `row` on.
template <int kColumns8, class TileA, class TileB>
__device__ __forceinline__ void start_a_bt(float (&sums)[1][kColumns8][4],
                                           const TileA& a,
                                           int row,
                                           const TileB& b) {
    static_assert(TileA::kCols == TileB::kCols && TileB::kRows == 8 * kColumns8, "a product");
    const Along<TileA> from_a(a, row);
    const Along<TileB> from_b(b);
    hw::pin(listed(sums));
    hw::wgmma_fence();
#pragma unroll
    for (int j = 0; j < TileA::kCols / 16; ++j) {
        hw::wgmma<Element, TileB::kRows>(listed(sums), from_a.step(j), from_b.step(j), j != 0);
    }
    hw::wgmma_commit();
}

// Starts sums = a b, of a the 64 rows from `row` on, of b the columns from `col` on.
template <int kColumns8, class TileA, class TileB>
__device__ __forceinline__ void start_a_b(
    float (&sums)[1][kColumns8][4], const TileA& a, int row, const TileB& b, int col) {
    static_assert(TileA::kCols == TileB::kRows, "a product");
    const Along<TileA> from_a(a, row);
    const Down<TileB> from_b(b, col);
    hw::pin(listed(sums));
    hw::wgmma_fence();
#pragma unroll
    for (int j = 0; j < TileA::kCols / 16; ++j) {
        hw::wgmma<Element, 8 * kColumns8, false, true>(listed(sums), from_a.step(j), from_b.step(j),
                                                       j != 0);
    }
    hw::wgmma_commit();
}

// Starts sums += x b, or sums = x b; x are left operands in registers, of 16 columns each, and of b
// it is the columns from `col` on.
template <int kColumns8, int kSteps, class TileB>
__device__ __forceinline__ void start_x_b(float (&sums)[1][kColumns8][4],
                                          uint32 (&x)[kSteps][4],
                                          const TileB& b,
                                          bool adds,
                                          int col = 0) {
    static_assert(TileB::kRows == 16 * kSteps, "a product");
    const Down<TileB> from_b(b, col);
    hw::pin(listed(sums));
#pragma unroll
    for (int j = 0; j < kSteps; ++j) hw::pin(x[j]);
    hw::wgmma_fence();
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
        hw::wgmma<Element, 8 * kColumns8, true>(listed(sums), x[j], from_b.step(j), adds || j != 0);
    }
    hw::wgmma_commit();
}

// --- By single warps -----------------------------------------------------------------------------

// The block of 16 rows and columns at (row, col) as two right operands of mma.sync, as in
// fragment.cuh.
template <int kRows, int kCols>
__device__ __forceinline__ void right(uint32 (&b)[2][2],
                                      const Tile<kRows, kCols>& t,
                                      int row,
                                      int col) {
    uint32 r[4];
    const uint32 lane = hw::forget(static_cast<uint32>(fragment::lane()));
    hw::ldmatrix<true>(r, t.piece(row + lane % 16, col + lane / 16 * 8));
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// Rounds a warp's 16 rows of results, 8 kCount columns from 8 kFirst on, and puts them into rows
// [row, row + 16) of a tile; `factors` are those of a lane's two rows.
template <int kFirst, int kCount, int kColumns8, class Tile>
__device__ __forceinline__ void put(Tile& tile,
                                    const float (&x)[1][kColumns8][4],
                                    const float (&factors)[2],
                                    int row) {
    const uint32 lane = hw::forget(static_cast<uint32>(fragment::lane()));
    const Element* const first = tile.piece(row + lane % 16, lane / 16 * 8);
    const auto start = static_cast<uint32>(first - tile.at);
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {
        const float (&left)[4] = x[0][kFirst + n];
        const float (&right)[4] = x[0][kFirst + n + 1];
        const uint32 r[4] = {hw::pack2<Element>(left[0] * factors[0], left[1] * factors[0]),
                             hw::pack2<Element>(left[2] * factors[1], left[3] * factors[1]),
                             hw::pack2<Element>(right[0] * factors[0], right[1] * factors[0]),
                             hw::pack2<Element>(right[2] * factors[1], right[3] * factors[1])};
        // The piece 8 n columns further on: as n is even, it changes bits of the first one's number
        // that lanes do not.
        const uint32 turned = start ^ (8 * n % Tile::kChunk);
        hw::stmatrix(&tile.at[turned + 8 * n / Tile::kChunk * (Tile::kChunkBytes / 2)], r);
    }
}

// Writes a tile to a matrix, as far as that has them from row `row` and column `col` on; `col` is a
// multiple of 8. All lanes of a warp.
template <int kRows, int kCols>
__device__ __forceinline__ void write(const Matrix& to,
                                      const Tile<kRows, kCols>& tile,
                                      int32 row,
                                      int32 col) {
    constexpr int kPieces = kCols / 8, kStep = 32 / kPieces;  // of a row; rows at a time
    static_assert(kPieces <= 32 && kRows % kStep == 0, "a piece for each lane");
    using Piece = hw::Vec<uint32, 4>;
    const uint32 lane = hw::forget(static_cast<uint32>(fragment::lane()));
    const int32 first = lane / kPieces, own = lane % kPieces * 8;
    const int32 rows = to.rows - row - first, cols = to.cols - col - own;
    if (cols <= 0) return;
    Element* const at = to.data + (row + first) * to.stride_row + (col + own) * to.stride_col;
    if (to.aligned == 16) {
#pragma unroll
        for (int r = 0; r < kRows; r += kStep) {
            if (r >= rows) continue;
            hw::store(reinterpret_cast<Piece*>(at + r * to.stride_row),
                      *reinterpret_cast<const Piece*>(tile.piece(first + r, own)));
        }
    } else {
#pragma unroll 1
        for (int r = 0; r < min(kRows, rows); r += kStep) {
            const Element* const from = tile.piece(first + r, own);
#pragma unroll 1
            for (int c = 0; c < min(8, cols); ++c) {
                hw::store(at + r * to.stride_row + c * to.stride_col, from[c]);
            }
        }
    }
}

// Puts the transpose of a block of 16 rows and columns, a left operand, at (row, col) of a tile.
template <class Tile>
__device__ __forceinline__ void put_transposed(Tile& tile, const uint32 (&x)[4], int row, int col) {
    const uint32 lane = hw::forget(static_cast<uint32>(fragment::lane()));
    hw::stmatrix<true>(tile.piece(row + lane / 16 * 8 + lane % 8, col + lane / 8 % 2 * 8), x);
}

}  // namespace swizzled
