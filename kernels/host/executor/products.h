// SPDX-License-Identifier: Apache-2.0
// What tensor cores multiply: 16 rows of A with n columns of B, over 16 values of k, in float32.
//
// Operands are first gathered into arrays of floats, from shared memory or from registers:
//     a[row][16], one row of A after the other;
//     b[n / 8][16][8], blocks of 8 columns, in them one k after the other.
// A product then comes in the order of accumulators: product[lane][n / 2] for a warp.
//
// The order of additions is fixed: for each element, products of two operands, which are exact
// (but for bfloat16 that underflow), are added from k = 0 on, and their sum to the accumulator. A
// tensor core cuts all summands off some bits below the largest exponent, and adds (the rule that
// an H200 keeps to is in tests/test_golden.py): results agree with it only up to rounding, except
// where nothing is rounded, as with integers.
#pragma once
#include <stdint.h>
#include <string.h>

#include "layouts.h"

namespace host {

constexpr int kDepth = 16;  // values of k of an instruction
constexpr int kSlab = 16;   // rows of A that a warp multiplies
constexpr int kMaxColumns = 256;

// Four numbers, wherever they lie. The compiler turns these into the vectors of any CPU. (clang
// does not heed the alignment in an alias made with `using`.)
typedef float Floats __attribute__((vector_size(16), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(16), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(16), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(8), aligned(2)));
static_assert(alignof(Floats) == 4 && alignof(Halves) == 2, "or unaligned access would fault");

struct Float16 {
    static Floats to_floats(Halves halves) {
        constexpr uint32_t kRebias = (127u - 15u) << 23;
        const Words bits = __builtin_convertvector(halves, Words);
        const Words rest = bits & 0x7fff;
        const Integers number = reinterpret_cast<Integers>(rest);
        // The highest exponent is that of infinity and NaN, here and there. The lowest is that of
        // zero and of subnormal numbers, multiples of 2^-24, which are normal as floats.
        const Words special = reinterpret_cast<Words>(number >= 0x7c00);
        const Words normal = (rest << 13) + kRebias + (special & kRebias);
        const Words small = reinterpret_cast<Words>(number < 0x0400);
        const Floats multiple = __builtin_convertvector(number, Floats) * 0x1p-24f;
        const Words magnitude = (small & reinterpret_cast<Words>(multiple)) | (~small & normal);
        return reinterpret_cast<Floats>((bits & 0x8000) << 16 | magnitude);
    }
};

struct Bfloat16 {
    static Floats to_floats(Halves halves) {
        return reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
    }
};

// --- Gathering -----------------------------------------------------------------------------------

// Eight numbers, into floats that are `stride` apart.
template <class Element, int stride>
inline void widen(const void* from, float* to) {
    Halves halves[2];
    memcpy(halves, from, sizeof halves);
    for (int i = 0; i < 8; i += 4) {
        const Floats floats = Element::to_floats(halves[i / 4]);
        if (stride == 1) {
            *reinterpret_cast<Floats*>(to + i) = floats;
        } else {
            for (int j = 0; j < 4; ++j) to[(i + j) * stride] = floats[j];
        }
    }
}

// An operand in shared memory, element (mn, k) into
// to[(mn - first) / 8 * 128 + mn % 8 * stride_mn + k * stride_k].
// fetch(address) returns where the 16 bytes of a shared address are; it is called once for each
// piece, and may check and record it.
template <class Element, int stride_mn, int stride_k, class Fetch>
inline void gather(const Descriptor& d, Major major, int first, int count, Fetch fetch, float* to) {
    for (int core = 0; core < count; core += 8, to += 8 * kDepth) {
        if (major == Major::kK) {
            for (int mn = 0; mn < 8; ++mn) {
                for (int k = 0; k < kDepth; k += 8) {
                    const void* const from = fetch(operand_address(d, major, first + core + mn, k));
                    widen<Element, stride_k>(from, to + mn * stride_mn + k * stride_k);
                }
            }
        } else {
            for (int k = 0; k < kDepth; ++k) {
                const void* const from = fetch(operand_address(d, major, first + core, k));
                widen<Element, stride_mn>(from, to + k * stride_k);
            }
        }
    }
}

// Rows `first` to `first + rows - 1` of A; the numbers are multiples of 8.
template <class Element, class Fetch>
void gather_a(const Descriptor& d, Major major, int first, int rows, Fetch fetch, float* a) {
    gather<Element, kDepth, 1>(d, major, first, rows, fetch, a);
}

// Columns 0 to n - 1 of B; n is a multiple of 8.
template <class Element, class Fetch>
void gather_b(const Descriptor& d, Major major, int n, Fetch fetch, float* b) {
    gather<Element, 1, 8>(d, major, 0, n, fetch, b);
}

// A slab of A from the registers of a warp: registers[lane][0 to 3], pairs along k.
template <class Element>
void gather_a(const uint32_t* const* registers, float* a) {
    uint16_t rows[kSlab][kDepth];
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) {
            const Cell at = a_cell(lane, i, 0);
            memcpy(&rows[at.row][at.column], &registers[lane][i], sizeof(uint32_t));
        }
    }
    for (int m = 0; m < kSlab; ++m, a += kDepth) {
        for (int k = 0; k < kDepth; k += 8) widen<Element, 1>(&rows[m][k], a + k);
    }
}

// Eight columns of B from the registers of a warp: registers[lane][0 and 1], pairs along k.
template <class Element>
void gather_b(const uint32_t* const* registers, float* b) {
    uint16_t columns[8][kDepth];
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 2; ++i) {
            const Cell at = b_cell(lane, i, 0);
            memcpy(&columns[at.column][at.row], &registers[lane][i], sizeof(uint32_t));
        }
    }
    for (int n = 0; n < 8; ++n) {
        for (int k = 0; k < kDepth; k += 8) widen<Element, 8>(&columns[n][k], b + n + k * 8);
    }
}

// --- Multiplying ---------------------------------------------------------------------------------

// The product of a slab and n columns. The innermost loop makes the elements of 4 lanes in 4 rows,
// which are those of two accumulators each, in 8 vectors: as many as stay in registers.
inline void multiply(const float* a, const float* b, int n, float* product) {
    for (int block = 0; block < n / 8; ++block) {
        const float* const columns = b + block * kDepth * 8;
        for (int g = 0; g < 8; g += 2) {
            const float* const rows = a + g * kDepth;
            Floats low0 = {}, low1 = {}, low8 = {}, low9 = {};
            Floats high0 = {}, high1 = {}, high8 = {}, high9 = {};
            for (int k = 0; k < kDepth; ++k) {
                const Floats low = *reinterpret_cast<const Floats*>(columns + k * 8);
                const Floats high = *reinterpret_cast<const Floats*>(columns + k * 8 + 4);
                const float row0 = rows[k], row1 = rows[kDepth + k];
                const float row8 = rows[8 * kDepth + k], row9 = rows[9 * kDepth + k];
                low0 += row0 * low, high0 += row0 * high;
                low1 += row1 * low, high1 += row1 * high;
                low8 += row8 * low, high8 += row8 * high;
                low9 += row9 * low, high9 += row9 * high;
            }
            // Lane 4 g + q has columns 2 q and 2 q + 1 of row g, then those of row g + 8.
            const auto put = [=](int lane, float w, float x, float y, float z) {
                *reinterpret_cast<Floats*>(product + lane * (n / 2) + block * 4) =
                    Floats{w, x, y, z};
            };
            put(4 * g + 0, low0[0], low0[1], low8[0], low8[1]);
            put(4 * g + 1, low0[2], low0[3], low8[2], low8[3]);
            put(4 * g + 2, high0[0], high0[1], high8[0], high8[1]);
            put(4 * g + 3, high0[2], high0[3], high8[2], high8[3]);
            put(4 * g + 4, low1[0], low1[1], low9[0], low9[1]);
            put(4 * g + 5, low1[2], low1[3], low9[2], low9[3]);
            put(4 * g + 6, high1[0], high1[1], high9[0], high9[1]);
            put(4 * g + 7, high1[2], high1[3], high9[2], high9[3]);
        }
    }
}

// d = c + product for the lanes of a warp; d = product if c is null. c may be d.
//
// Lane by lane: accumulators lie on stacks, whose distance is a power of two, so that going from
// lane to lane in an inner loop would miss every cache.
inline void accumulate(const float* product, int n, const float* const* c, float* const* d) {
    for (int lane = 0; lane < 32; ++lane, product += n / 2) {
        for (int i = 0; i < n / 2; i += 4) {
            Floats sum = *reinterpret_cast<const Floats*>(product + i);
            if (c) sum = *reinterpret_cast<const Floats*>(c[lane] + i) + sum;
            *reinterpret_cast<Floats*>(d[lane] + i) = sum;
        }
    }
}

// --- Instructions --------------------------------------------------------------------------------

// mma.sync m16n8k16: for each lane 4 registers of A, 2 of B, 4 of C and of D.
template <class Element>
void mma(const uint32_t* const* a,
         const uint32_t* const* b,
         const float* const* c,
         float* const* d) {
    float rows[kSlab * kDepth], columns[8 * kDepth], product[kSlab * 8];
    gather_a<Element>(a, rows);
    gather_b<Element>(b, columns);
    multiply(rows, columns, 8, product);
    accumulate(product, 8, c, d);
}

// Room for one wgmma; too much for the stack of a fiber.
struct Workspace {
    float a[4 * kSlab * kDepth], b[kMaxColumns * kDepth], product[kSlab * kMaxColumns];
};

// wgmma m64nNk16 for the four warps, once `room` holds the operands: d[thread][0 to n / 2 - 1], to
// which the product is added, or which it replaces.
inline void wgmma(Workspace& room, int n, bool add, float* const* d) {
    for (int warp = 0; warp < 4; ++warp) {
        float* const* const mine = d + 32 * warp;
        multiply(room.a + warp * kSlab * kDepth, room.b, n, room.product);
        accumulate(room.product, n, add ? mine : nullptr, mine);
    }
}

}  // namespace host
