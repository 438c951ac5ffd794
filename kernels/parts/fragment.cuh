// SPDX-License-Identifier: Apache-2.0
// Tiles of 16-bit elements in shared memory, and their products by mma.sync.
//
// A row of a tile has its columns, a multiple of 16, and 8 more of padding: rows are then an odd
// number of 16-byte pieces apart, so that the 8 rows that ldmatrix reads at once lie in different
// banks, whatever the head size.
//
// A warp works on slabs of 16 rows. Of the 8 columns from 8 n on, a lane holds in fragment[n]
//     [0], [1]: row lane / 4, columns 2 (lane % 4) and the next;   [2], [3]: the row 8 below.
#pragma once
#include "hw/cp_async.cuh"
#include "hw/ldmatrix.cuh"
#include "hw/mma.cuh"
#include "hw/sync.cuh"
#include "parts/operand.cuh"

namespace fragment {

constexpr int kSlab = 16;

template <int kRowsOfTile, int kColsOfTile>
struct Tile {
    static constexpr int kRows = kRowsOfTile, kCols = kColsOfTile;
    static_assert(kCols % 16 == 0, "whole steps of mma.sync");
    static constexpr int kPitch = kCols + 8;

    Element at[kRows][kPitch];

    // How many bytes row `row`, column `col` lies behind the first element.
    __host__ __device__ static constexpr int offset(int row, int col) {
        return (row * kPitch + col) * static_cast<int>(sizeof(Element));
    }
};

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

// Where the element i of a lane's fragment of 8 columns is, in a slab.
__device__ __forceinline__ int row_of(int i) { return lane() / 4 + i / 2 * 8; }
__device__ __forceinline__ int col_of(int i) { return lane() % 4 * 2 + i % 2; }

// Calls change(x) for each number that a lane has of some fragments.
template <int kSlabs, int kColumns8, class Change>
__device__ __forceinline__ void for_each(float (&s)[kSlabs][kColumns8][4], Change change) {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
        for (int n = 0; n < kColumns8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) change(s[slab][n][i]);
        }
    }
}

// --- Infinities and NaN: see special.cuh --------------------------------------------------------

// Halves of a word that are not zero, as masks of 16 bits.
__device__ __forceinline__ uint32 halves(uint32 word) {
    return (word & 0xffffu ? 0xffffu : 0u) | (word & 0xffff0000u ? 0xffff0000u : 0u);
}

// Halves that are infinite or NaN: their exponent is all ones.
__device__ __forceinline__ uint32 special(uint32 word) {
    constexpr uint32 kExponents = hw::kIsBfloat16<Element> ? 0x7f807f80u : 0x7c007c00u;
    return ~halves(~word & kExponents);
}

// The same at less cost: some of kSpecialBits of the result are set if a half is infinite or NaN.
// Adding the lowest bit of the exponent carries over if all of its bits are set.
constexpr uint32 kSpecialBits = 0x80008000u;
__device__ __forceinline__ uint32 special_bits(uint32 word) {
    constexpr uint32 kExponents = hw::kIsBfloat16<Element> ? 0x7f807f80u : 0x7c007c00u;
    constexpr uint32 kLowest = hw::kIsBfloat16<Element> ? 0x00800080u : 0x04000400u;
    return (word & kExponents) + kLowest;
}

// Makes 0 of what is infinite or NaN.
__device__ __forceinline__ void remove_special(uint32 (&operand)[2][2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) operand[i / 2][i % 2] &= ~special(operand[i / 2][i % 2]);
}

// --- From global to shared memory ----------------------------------------------------------------

// The largest divisor of n that is at most 8.
__host__ __device__ constexpr int divisor_to_8(int n) {
    int d = 8;
    while (n % d != 0) --d;
    return d;
}

// Copies kBytes at once, by cp.async. Up to 8 neighbouring threads share a row; each copies every
// so-manieth piece of it, at constant distances, and goes down to the next row of its own.
template <int kBytes, int kThreads, int kRows, int kCols>
__device__ __forceinline__ void copy_pieces(Tile<kRows, kCols>& tile,
                                            const Matrix& m,
                                            int32 first) {
    constexpr int kElements = kBytes / static_cast<int>(sizeof(Element));
    constexpr int kPieces = kCols / kElements;  // of a row
    constexpr int kSharers = divisor_to_8(kPieces);
    constexpr int kStep = kThreads / kSharers;  // rows that all threads make at once
    const int thread = hw::forget(static_cast<int>(threadIdx.x));
    const int row = thread / kSharers, col = thread % kSharers * kElements;
    if (kThreads % kSharers != 0 && row >= kStep) return;
    const Element* from = m.data + (first + row) * m.stride_row + col;
    const int64 step = kStep * m.stride_row;
    const int rows = m.rows - first;
#pragma unroll
    for (int i = 0; i < kRows; i += kStep, from += step) {
        if (kRows % kStep != 0 && i + row >= kRows) break;
        const int cols = i + row < rows ? m.cols - col : 0;
#pragma unroll
        for (int c = 0; c < kCols; c += kSharers * kElements) {
            hw::cp_async<kBytes>(&tile.at[i + row][col + c], from + c, c < cols);
        }
    }
}

// The same for any strides and addresses, one element at a time.
template <int kThreads, int kRows, int kCols>
__device__ __forceinline__ void copy_elements(Tile<kRows, kCols>& tile,
                                              const Matrix& m,
                                              int32 first) {
#pragma unroll 4
    for (int index = static_cast<int>(threadIdx.x); index < kRows * kCols; index += kThreads) {
        const int row = index / kCols, col = index % kCols;
        Element x = {};
        if (first + row < m.rows && col < m.cols) {
            x = hw::load(m.data + (first + row) * m.stride_row + col * m.stride_col);
        }
        tile.at[row][col] = x;
    }
}

// Starts to bring rows [first, first + kRows) of a head; what does not exist becomes zeros. They
// are there for the thread that copied after cp_async_wait, for the others after a barrier behind
// it.
//
// kAligned: bytes of a row that can be moved at once, 16 or 8; 0 for any strides.
template <int kAligned, int kThreads, int kRows, int kCols>
__device__ __forceinline__ void copy(Tile<kRows, kCols>& tile, const Matrix& m, int32 first) {
    if constexpr (kAligned != 0) {
        copy_pieces<kAligned, kThreads>(tile, m, first);
    } else {
        copy_elements<kThreads>(tile, m, first);
    }
}

// Is anything infinite or NaN of what the calling thread has brought by copy()? Behind
// cp_async_wait; no barrier is needed. See special.cuh.
template <int kAligned, int kThreads, int kRows, int kCols>
__device__ __forceinline__ bool copied_special(const Tile<kRows, kCols>& tile) {
    uint32 found = 0;
    if constexpr (kAligned != 0) {
        constexpr int kElements = kAligned / static_cast<int>(sizeof(Element));
        constexpr int kSharers = divisor_to_8(kCols / kElements);
        constexpr int kStep = kThreads / kSharers;
        const int thread = hw::forget(static_cast<int>(threadIdx.x));
        const int row = thread / kSharers, col = thread % kSharers * kElements;
        if (kThreads % kSharers != 0 && row >= kStep) return false;
        using Piece = hw::Vec<uint32, kAligned / 4>;
#pragma unroll
        for (int i = 0; i < kRows; i += kStep) {
            if (kRows % kStep != 0 && i + row >= kRows) break;
#pragma unroll
            for (int c = 0; c < kCols; c += kSharers * kElements) {
                const Piece piece = *reinterpret_cast<const Piece*>(&tile.at[i + row][col + c]);
#pragma unroll
                for (int w = 0; w < kAligned / 4; ++w) found |= special_bits(piece.v[w]);
            }
        }
        return (found & kSpecialBits) != 0;
    } else {
#pragma unroll 4
        for (int index = static_cast<int>(threadIdx.x); index < kRows * kCols; index += kThreads) {
            const Element& x = tile.at[index / kCols][index % kCols];
            found |= special(*reinterpret_cast<const unsigned short*>(&x));
        }
        return (found & 0xffffu) != 0;
    }
}

// Rounds and writes two neighbours of a row, the first in an even column, as far as the matrix has
// them.
__device__ __forceinline__ void write_two(
    const Matrix& to, float x, float y, int32 row, int32 col) {
    if (row >= to.rows) return;
    Element* const at = to.data + row * to.stride_row;
    if (to.aligned) {  // rows have whole words
        if (col < to.cols) hw::store(reinterpret_cast<uint32*>(at + col), hw::pack2<Element>(x, y));
    } else {
        if (col < to.cols) hw::store(at + col * to.stride_col, narrow<Element>(x));
        if (col + 1 < to.cols) hw::store(at + (col + 1) * to.stride_col, narrow<Element>(y));
    }
}

// The same for a fragment, whose first row and column are given.
__device__ __forceinline__ void write(const Matrix& to, const float (&x)[4], int32 row, int32 col) {
    write_two(to, x[0], x[1], row + row_of(0), col + col_of(0));
    write_two(to, x[2], x[3], row + row_of(2), col + col_of(0));
}

// Rounds a warp's 16 rows, whose first is given, and writes them, in pieces of 8 columns: four
// neighbouring lanes exchange words until each has a fragment's columns of one row.
template <int kColumns8>
__device__ __forceinline__ void write_rows(const Matrix& to,
                                           const float (&x)[1][kColumns8][4],
                                           float factor,
                                           int32 row) {
    static_assert(kColumns8 % 4 == 0, "a fragment for each of four lanes");
    using Piece = hw::Vec<uint32, 4>;
    const auto swap = [](uint32& a, uint32& b, int distance) {
        const bool upper = lane() & distance;
        const uint32 given = __shfl_xor_sync(0xffffffffu, upper ? a : b, distance);
        (upper ? a : b) = given;
    };
#pragma unroll
    for (int n = 0; n < kColumns8; n += 4) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            Piece piece;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float (&one)[4] = x[0][n + k];
                piece.v[k] = hw::pack2<Element>(one[i] * factor, one[i + 1] * factor);
            }
            swap(piece.v[0], piece.v[1], 1);
            swap(piece.v[2], piece.v[3], 1);
            swap(piece.v[0], piece.v[2], 2);
            swap(piece.v[1], piece.v[3], 2);
            const int32 at_row = row + row_of(i), col = 8 * (n + lane() % 4);
            if (at_row >= to.rows || col >= to.cols) continue;
            Element* const at = to.data + at_row * to.stride_row + col * to.stride_col;
            if (to.aligned == 16) {
                hw::store(reinterpret_cast<Piece*>(at), piece);
            } else {
                // A short loop: what the piece holds moves down, 16 bits an element.
                uint64 low = piece.v[0] | uint64{piece.v[1]} << 32;
                uint64 high = piece.v[2] | uint64{piece.v[3]} << 32;
#pragma unroll 1
                for (int c = 0; c < min(8, to.cols - col); ++c) {
                    hw::store(reinterpret_cast<unsigned short*>(at + c * to.stride_col),
                              static_cast<unsigned short>(low));
                    low = low >> 16 | high << 48, high >>= 16;
                }
            }
        }
    }
}

// --- Operands ------------------------------------------------------------------------------------

// All operands are blocks of 16 rows and columns of a tile. A lane reads all blocks of a tile from
// one place, at constant distances: Tile::offset(row, col). In which order the four quarters of a
// block come is where lanes point to, since mma.sync wants neighbouring registers: down the columns
// for left() and right(), along the rows for their transposes.
template <int kRows, int kCols>
__device__ __forceinline__ const Element* place_down(const Tile<kRows, kCols>& t, int row = 0) {
    return &t.at[row + lane() % 16][lane() / 16 * 8];
}
template <int kRows, int kCols>
__device__ __forceinline__ const Element* place_along(const Tile<kRows, kCols>& t, int row = 0) {
    return &t.at[row + lane() / 16 * 8 + lane() % 8][lane() / 8 % 2 * 8];
}

// A block as a left operand.
__device__ __forceinline__ void left(uint32 (&a)[4], const Element* down, int offset) {
    hw::ldmatrix(a, down, offset);
}

// The transpose of a block as a left operand.
__device__ __forceinline__ void left_transposed(uint32 (&a)[4], const Element* along, int offset) {
    hw::ldmatrix<true>(a, along, offset);
}

// A block as two right operands: b[0] is its first 8 columns, b[1] the others.
__device__ __forceinline__ void right(uint32 (&b)[2][2], const Element* down, int offset) {
    uint32 r[4];
    hw::ldmatrix<true>(r, down, offset);
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// The block at (row, col).
template <int kRows, int kCols>
__device__ __forceinline__ void right(uint32 (&b)[2][2],
                                      const Tile<kRows, kCols>& t,
                                      int row,
                                      int col) {
    right(b, place_down(t) + col, t.offset(row, 0));
}

// The transpose of a block as two right operands: b[0] is its first 8 rows, b[1] the others.
__device__ __forceinline__ void right_transposed(uint32 (&b)[2][2],
                                                 const Element* along,
                                                 int offset) {
    uint32 r[4];
    hw::ldmatrix(r, along, offset);
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// Columns [16 j, 16 j + 16) of a fragment as the left operand, rounded to elements.
template <int kColumns8>
__device__ __forceinline__ void left(uint32 (&a)[4], const float (&x)[kColumns8][4], int j) {
    a[0] = hw::pack2<Element>(x[2 * j][0], x[2 * j][1]);
    a[1] = hw::pack2<Element>(x[2 * j][2], x[2 * j][3]);
    a[2] = hw::pack2<Element>(x[2 * j + 1][0], x[2 * j + 1][1]);
    a[3] = hw::pack2<Element>(x[2 * j + 1][2], x[2 * j + 1][3]);
}

template <int kSlabs, int kColumns8>
__device__ __forceinline__ void clear(float (&x)[kSlabs][kColumns8][4]) {
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
#pragma unroll
        for (int n = 0; n < kColumns8; ++n) x[s][n][0] = x[s][n][1] = x[s][n][2] = x[s][n][3] = 0;
    }
}

// --- Products ------------------------------------------------------------------------------------

// sums[s] += a[rows of slab s] b^T, of b the rows from `row_b` on; slab s begins at row `row` + 16
// s.
template <int kSlabs, int kColumns8, int kRowsA, int kRowsB, int kCols>
__device__ __forceinline__ void add_a_bt(float (&sums)[kSlabs][kColumns8][4],
                                         const Tile<kRowsA, kCols>& a,
                                         int row,
                                         const Tile<kRowsB, kCols>& b,
                                         int row_b = 0) {
    static_assert(kRowsB >= 8 * kColumns8, "a column of sums for each row of b");
    const Element* const from_a = place_down(a, row);
    const Element* const from_b = place_along(b, row_b);
#pragma unroll
    for (int k = 0; k < kCols; k += 16) {
        uint32 left_operand[kSlabs][4];
#pragma unroll
        for (int s = 0; s < kSlabs; ++s) left(left_operand[s], from_a, a.offset(kSlab * s, k));
#pragma unroll
        for (int n = 0; n < kColumns8; n += 2) {
            uint32 right_operand[2][2];
            right_transposed(right_operand, from_b, b.offset(8 * n, k));
#pragma unroll
            for (int s = 0; s < kSlabs; ++s) {
                hw::mma_m16n8k16<Element>(sums[s][n], left_operand[s], right_operand[0]);
                hw::mma_m16n8k16<Element>(sums[s][n + 1], left_operand[s], right_operand[1]);
            }
        }
    }
}

// sums[s] += x[s] b, with x rounded to elements, and of b the columns from `col` on.
template <int kSlabs, int kColumns8, int kRows8, int kRowsB, int kCols>
__device__ __forceinline__ void add_x_b(float (&sums)[kSlabs][kColumns8][4],
                                        const float (&x)[kSlabs][kRows8][4],
                                        const Tile<kRowsB, kCols>& b,
                                        int col = 0) {
    static_assert(kRowsB == 8 * kRows8 && kCols >= 8 * kColumns8, "a product of tiles");
    const Element* const from_b = place_down(b) + col;
#pragma unroll
    for (int j = 0; j < kRows8 / 2; ++j) {
        uint32 left_operand[kSlabs][4];
#pragma unroll
        for (int s = 0; s < kSlabs; ++s) left(left_operand[s], x[s], j);
#pragma unroll
        for (int n = 0; n < kColumns8; n += 2) {
            uint32 right_operand[2][2];
            right(right_operand, from_b, b.offset(16 * j, 8 * n));
#pragma unroll
            for (int s = 0; s < kSlabs; ++s) {
                hw::mma_m16n8k16<Element>(sums[s][n], left_operand[s], right_operand[0]);
                hw::mma_m16n8k16<Element>(sums[s][n + 1], left_operand[s], right_operand[1]);
            }
        }
    }
}

// sums[s] += a[rows of slab s] b, of b the columns from `col` on; slab s begins at row `row` + 16
// s.
template <int kSlabs, int kColumns8, int kRowsA, int kRowsB, int kCols>
__device__ __forceinline__ void add_a_b(float (&sums)[kSlabs][kColumns8][4],
                                        const Tile<kRowsA, kRowsB>& a,
                                        int row,
                                        const Tile<kRowsB, kCols>& b,
                                        int col) {
    const Element* const from_a = place_down(a, row);
    const Element* const from_b = place_down(b) + col;
#pragma unroll
    for (int k = 0; k < kRowsB; k += 16) {
        uint32 left_operand[kSlabs][4];
#pragma unroll
        for (int s = 0; s < kSlabs; ++s) left(left_operand[s], from_a, a.offset(kSlab * s, k));
#pragma unroll
        for (int n = 0; n < kColumns8; n += 2) {
            uint32 right_operand[2][2];
            right(right_operand, from_b, b.offset(k, 8 * n));
#pragma unroll
            for (int s = 0; s < kSlabs; ++s) {
                hw::mma_m16n8k16<Element>(sums[s][n], left_operand[s], right_operand[0]);
                hw::mma_m16n8k16<Element>(sums[s][n + 1], left_operand[s], right_operand[1]);
            }
        }
    }
}

// sums[s] += a^T b, where row 0 of slab s is column `col_a` + 16 s of a. The sums are of the blocks
// of 16 columns first, first + kStep .. of b, as far as there are kBlocks of them from `col_b` on.
// kFinite: with 0 for what is infinite or NaN in b.
template <bool kFinite,
          int kStep,
          int kBlocks,
          int kSlabs,
          int kColumns8,
          int kRows,
          int kColsA,
          int kCols>
__device__ __forceinline__ void add_at_b(float (&sums)[kSlabs][kColumns8][4],
                                         const Tile<kRows, kColsA>& a,
                                         int col_a,
                                         const Tile<kRows, kCols>& b,
                                         int col_b,
                                         int first) {
    const Element* const from_a = place_along(a) + col_a;
    const Element* const from_b = place_down(b) + col_b + 16 * first;
#pragma unroll
    for (int k = 0; k < kRows; k += 16) {
        uint32 left_operand[kSlabs][4];
#pragma unroll
        for (int s = 0; s < kSlabs; ++s) {
            left_transposed(left_operand[s], from_a, a.offset(k, kSlab * s));
        }
#pragma unroll
        for (int n = 0; n < kColumns8; n += 2) {
            if (kBlocks % kStep != 0 && first + n / 2 * kStep >= kBlocks) break;
            uint32 right_operand[2][2];
            right(right_operand, from_b, b.offset(k, 8 * n * kStep));
            if (kFinite) remove_special(right_operand);
#pragma unroll
            for (int s = 0; s < kSlabs; ++s) {
                hw::mma_m16n8k16<Element>(sums[s][n], left_operand[s], right_operand[0]);
                hw::mma_m16n8k16<Element>(sums[s][n + 1], left_operand[s], right_operand[1]);
            }
        }
    }
}

// Rounds fragments and puts them into a tile, from (row, col) on.
template <int kSlabs, int kColumns8, int kRows, int kCols>
__device__ __forceinline__ void store_rounded(Tile<kRows, kCols>& to,
                                              const float (&x)[kSlabs][kColumns8][4],
                                              int row,
                                              int col) {
    const int here = hw::forget(lane());
    uint32* const first = reinterpret_cast<uint32*>(&to.at[row + here / 4][col + here % 4 * 2]);
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
#pragma unroll
        for (int n = 0; n < kColumns8; ++n) {
            first[to.offset(kSlab * s, 8 * n) / 4] = hw::pack2<Element>(x[s][n][0], x[s][n][1]);
            first[to.offset(kSlab * s + 8, 8 * n) / 4] = hw::pack2<Element>(x[s][n][2], x[s][n][3]);
        }
    }
}

// Changes the sign of the calling thread's share of a tile.
template <int kThreads, int kRows, int kCols>
__device__ __forceinline__ void negate(Tile<kRows, kCols>& tile) {
#pragma unroll 1
    for (int index = static_cast<int>(threadIdx.x); index < kRows * kCols / 2; index += kThreads) {
        const int row = index / (kCols / 2), col = index % (kCols / 2) * 2;
        *reinterpret_cast<uint32*>(&tile.at[row][col]) ^= 0x80008000u;
    }
}

}  // namespace fragment
