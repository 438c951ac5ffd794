// SPDX-License-Identifier: Apache-2.0
// Where elements lie: in shared memory as a wgmma descriptor says, and in the registers of a warp.
//
// Pure arithmetic. A shared address is a number of 32 bits, as in PTX; whoever calls knows which
// memory is behind it.
#pragma once
#include <stdint.h>
#include <string.h>

namespace host {

constexpr uint32_t kPieceBytes = 16;  // what swizzling moves as a whole

// Swizzling permutes the pieces within each row of `span` bytes (16: not at all) by the number of
// its row of 128 bytes. Those numbers are bits of the shared address itself, not of an offset into
// a tile: hardware does the same for a tile that begins anywhere.
constexpr uint32_t swizzle(uint32_t address, uint32_t span) {
    return address ^ (address >> 3 & (span - kPieceBytes));
}

// --- Shared-memory descriptors of wgmma ----------------------------------------------------------

// Along which axis 16-bit operands are contiguous: that of the sums, or the row of A or column of B
// (mn). The "transpose" bits of the instruction say which.
enum class Major { kK, kMn };

struct Descriptor {
    uint32_t start;       // shared address
    uint32_t leading;     // bytes between neighbours along one axis, see `operand_address`
    uint32_t stride;      // the same along the other
    uint32_t span;        // bytes of a swizzled row; 16: not swizzled
    const char* problem;  // why it must not be used, or null
};

inline Descriptor decode_descriptor(uint64_t bits) {
    constexpr uint32_t kSpans[] = {16, 128, 64, 32};
    const auto field = [bits](int from) {
        return static_cast<uint32_t>(bits >> from & 0x3fff) << 4;
    };
    Descriptor result = {field(0), field(16), field(32), kSpans[bits >> 62], nullptr};
    if (bits & 0x3ff1c000c000c000) {
        result.problem = "bits 14-15, 30-31, 46-48 and 52-61 of a descriptor must be zero";
    } else if (bits >> 49 & 7) {
        // Without it, tiles may begin anywhere (see `swizzle`), so nobody needs one.
        result.problem = "the base offset of a descriptor (bits 49-51) must be zero";
    }
    return result;
}

// The shared address of element (mn, k) of a 16-bit operand, 0 <= k < 16.
//
// An operand is made of cores, 8 rows of `span` bytes one behind the other. Without swizzling a row
// has 8 elements, so one instruction needs 2 cores along k: they are `leading` apart, and those
// along mn are `stride` apart. With swizzling, a K-major row holds all 16 elements and more, so
// `leading` means nothing, and steps along mn are still of `stride`; an MN-major core has 8 values
// of k, the next is `stride` away, and steps along mn are of `leading`.
//
// Where mn (MN-major) or k (K-major) is a multiple of 8, the 8 elements from there on are one
// piece.
inline uint32_t operand_address(const Descriptor& d, Major major, uint32_t mn, uint32_t k) {
    const uint32_t row_elements = d.span / 2;
    uint32_t offset;
    if (major == Major::kK) {
        offset = mn / 8 * d.stride + mn % 8 * d.span + k % row_elements * 2;
        offset += k / row_elements * d.leading;
    } else {
        const bool swizzled = d.span != kPieceBytes;
        offset = mn / row_elements * (swizzled ? d.leading : d.stride) + mn % row_elements * 2;
        offset += k / 8 * (swizzled ? d.stride : d.leading) + k % 8 * d.span;
    }
    return swizzle(d.start + offset, d.span);
}

// --- Fragments -----------------------------------------------------------------------------------

// Every fragment is made of 8 x 8 matrices that a warp holds two elements a lane: lane l has
// columns 2 (l % 4) and the next of row l / 4. What fragments differ in is the order of the
// matrices, and whether an element takes half of a register (16 bits) or all of it.
struct Cell {
    int row, column;
};

// The inverse: lane and which of its two elements.
struct Holder {
    int lane, half;
};

constexpr Cell cell_in_matrix(int lane, int half) { return {lane / 4, 2 * (lane % 4) + half}; }

constexpr Holder holder_of(int row, int column) { return {4 * row + column / 2, column % 2}; }

// Register i of the accumulators of wgmma m64nNk16, thread 0 to 127 of the warpgroup; for N = 8 and
// thread below 32 also of mma m16n8k16 (C and D). Warp w has rows 16 w to 16 w + 15.
constexpr Cell accumulator_cell(int thread, int i) {
    const Cell at = cell_in_matrix(thread % 32, i % 2);
    return {16 * (thread / 32) + 8 * (i / 2 % 2) + at.row, 8 * (i / 4) + at.column};
}

struct Register {
    int thread, index;
};

constexpr Register accumulator_register(int row, int column) {
    const Holder holder = holder_of(row % 8, column % 8);
    const int matrix = 2 * (column / 8) + row / 8 % 2;
    return {32 * (row / 16) + holder.lane, 2 * matrix + holder.half};
}

// Row m and column k of A: half of register i (0 to 3) of mma m16n8k16, and of wgmma m64nNk16 with
// A in registers.
constexpr Cell a_cell(int thread, int i, int half) {
    const Cell at = cell_in_matrix(thread % 32, half);
    return {16 * (thread / 32) + 8 * (i % 2) + at.row, 8 * (i / 2) + at.column};
}

// Row k and column n of B: half of register i (0 or 1) of mma m16n8k16. Lanes have pairs along k.
constexpr Cell b_cell(int lane, int i, int half) {
    const Cell at = cell_in_matrix(lane, half);
    return {8 * i + at.column, at.row};
}

// --- ldmatrix and stmatrix -----------------------------------------------------------------------

// The lane whose address is that of a row (8 elements, 16 bytes) of matrix 0 to `count - 1`. Lanes
// from 8 * count on supply none.
constexpr int lane_of_row(int matrix, int row) { return 8 * matrix + row; }

// Which element of a matrix in memory belongs to a half of register `matrix` of a lane.
constexpr Cell cell_in_memory(int lane, int half, bool transposed) {
    const Cell at = cell_in_matrix(lane, half);
    return transposed ? Cell{at.column, at.row} : at;
}

// ldmatrix.xCOUNT of 16-bit elements: rows[l] is what the address of lane l points to, and
// registers[l] has COUNT registers of lane l.
inline void load_matrices(int count,
                          bool transposed,
                          const void* const* rows,
                          uint32_t* const* registers) {
    for (int matrix = 0; matrix < count; ++matrix) {
        uint16_t elements[8][8];
        for (int row = 0; row < 8; ++row) {
            memcpy(elements[row], rows[lane_of_row(matrix, row)], kPieceBytes);
        }
        for (int lane = 0; lane < 32; ++lane) {
            const Cell low = cell_in_memory(lane, 0, transposed);
            const Cell high = cell_in_memory(lane, 1, transposed);
            registers[lane][matrix] = elements[low.row][low.column] |
                                      static_cast<uint32_t>(elements[high.row][high.column]) << 16;
        }
    }
}

// stmatrix.xCOUNT. Rows are written one after the other, so that of rows that overlap the last
// wins; hardware promises nothing.
inline void store_matrices(int count,
                           bool transposed,
                           void* const* rows,
                           const uint32_t* const* registers) {
    for (int matrix = 0; matrix < count; ++matrix) {
        uint16_t elements[8][8];
        for (int lane = 0; lane < 32; ++lane) {
            for (int half = 0; half < 2; ++half) {
                const Cell at = cell_in_memory(lane, half, transposed);
                elements[at.row][at.column] =
                    static_cast<uint16_t>(registers[lane][matrix] >> (16 * half));
            }
        }
        for (int row = 0; row < 8; ++row) {
            memcpy(rows[lane_of_row(matrix, row)], elements[row], kPieceBytes);
        }
    }
}

}  // namespace host
