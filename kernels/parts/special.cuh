// SPDX-License-Identifier: Apache-2.0
// Infinities and NaN in a factor of which a row sees only a part.
//
// Where a row does not see a row of the right factor b, its weight is 0, and 0 * NaN must not reach
// its sums. So in tiles that hide something, what is special in b is made 0 before the product, and
// added to the sums as far as it is seen: at once, or to the results in a second walk.
#pragma once
#include "hw/mma.cuh"
#include "parts/fragment.cuh"

namespace special {

using fragment::right;
using fragment::Tile;

// Is any element of a tile infinite or NaN? For all threads of a block, as a barrier.
template <int kThreads, int kRows, int kCols>
__device__ __forceinline__ bool any(const Tile<kRows, kCols>& tile) {
    uint32 found = 0;
#pragma unroll 4
    for (int index = static_cast<int>(threadIdx.x); index < kRows * kCols / 2; index += kThreads) {
        const int row = index / (kCols / 2), col = index % (kCols / 2) * 2;
        found |= fragment::special(*reinterpret_cast<const uint32*>(&tile.at[row][col]));
    }
    return __syncthreads_or(found != 0);
}

// Makes 0 of them; ends with a barrier.
template <int kThreads, int kRows, int kCols>
__device__ __forceinline__ void clear(Tile<kRows, kCols>& tile) {
#pragma unroll 1
    for (int index = static_cast<int>(threadIdx.x); index < kRows * kCols / 2; index += kThreads) {
        const int row = index / (kCols / 2), col = index % (kCols / 2) * 2;
        uint32& word = *reinterpret_cast<uint32*>(&tile.at[row][col]);
        word &= ~fragment::special(word);
    }
    __syncthreads();
}

// What is special in columns [col, col + 16) of b, summed over the rows that are seen, as two
// fragments of 16 rows of sums: inf, -inf, NaN, or 0 for none. `sees(i, k)`: is row k of b seen
// from row fragment::row_of(i)? kSigned: weights are not negative, so that inf adds inf; else it
// may add either, or 0 * inf, and counts as NaN.
//
// What rises and what falls is counted by products of ones; a NaN counts on both sides, so that it
// comes out as inf - inf.
template <bool kSigned, class Tile, class Sees>
__device__ __forceinline__ void sums(float (&x)[2][4], const Tile& b, int col, Sees sees) {
    constexpr uint32 kOne = hw::kIsBfloat16<Element> ? 0x3f80u : 0x3c00u;
    constexpr uint32 kFractions = hw::kIsBfloat16<Element> ? 0x007f007fu : 0x03ff03ffu;
    float rises[2][4] = {}, falls[2][4] = {};
#pragma unroll 1
    for (int k = 0; k < Tile::kRows; k += 16) {
        uint32 seen[4], words[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = k + i / 2 * 8 + fragment::col_of(0);
            seen[i] =
                (sees(2 * (i % 2), at) ? kOne : 0u) | (sees(2 * (i % 2), at + 1) ? kOne << 16 : 0u);
        }
        right(words, b, k, col);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32 up[2], down[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32 word = words[half][i];
                const uint32 odd = fragment::special(word) & (kOne << 16 | kOne);
                const uint32 nan = kSigned ? fragment::halves(word & kFractions) : ~0u;
                const uint32 negative = fragment::halves(word & 0x80008000u);
                up[i] = odd & (nan | ~negative);
                down[i] = odd & (nan | negative);
            }
            hw::mma_m16n8k16<Element>(rises[half], seen, up);
            hw::mma_m16n8k16<Element>(falls[half], seen, down);
        }
    }
    const float infinity = __int_as_float(0x7f800000);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float& sum = x[i / 4][i % 4];
        sum = 0.0f;
        if (rises[i / 4][i % 4] > 0.0f) sum += infinity;
        if (falls[i / 4][i % 4] > 0.0f) sum -= infinity;
    }
}

// Adds that to fragments of sums, of all columns of b: sees(slab, i, k). Rare, so that it is to be
// short: wide results have one loop for all columns, which finds its fragments by comparing their
// numbers. Narrow ones may leave no registers for that.
template <bool kSigned = true, int kSlabs, int kColumns8, class Tile, class Sees>
__device__ __forceinline__ void add(float (&to)[kSlabs][kColumns8][4], const Tile& b, Sees sees) {
    constexpr int kAtOnce = kColumns8 <= 8 ? kColumns8 : 1;
#pragma unroll kAtOnce
    for (int first = 0; first < kColumns8; first += 2) {
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
            float x[2][4];
            sums<kSigned>(x, b, 8 * first, [&](int i, int k) { return sees(slab, i, k); });
#pragma unroll
            for (int n = 0; n < kColumns8; ++n) {
                if (n - n % 2 != first) continue;
#pragma unroll
                for (int i = 0; i < 4; ++i) to[slab][n][i] += x[n % 2][i];
            }
        }
    }
}

// Adds that to columns [to_col, to_col + 16) of rows [row, row + 16) of a matrix, each lane to the
// elements that fragment::write() gave it; behind fragment::write_rows(), where other lanes of the
// warp wrote them, a barrier must be between.
template <bool kSigned, class Tile, class Sees>
__device__ __forceinline__ void add(
    const Matrix& to, int32 row, int32 to_col, const Tile& b, int col, Sees sees) {
    float x[2][4];
    sums<kSigned>(x, b, col, sees);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int32 at_row = row + fragment::row_of(i % 4);
        const int32 at_col = to_col + i / 4 * 8 + fragment::col_of(i % 4);
        const float sum = x[i / 4][i % 4];
        if (sum == 0.0f || at_row >= to.rows || at_col >= to.cols) continue;
        Element* const at = to.data + at_row * to.stride_row + at_col * to.stride_col;
        hw::store(at, narrow<Element>(widen(hw::load(at)) + sum));
    }
}

}  // namespace special
