// SPDX-License-Identifier: Apache-2.0
// Matrices of 8 x 8 elements of 16 bits between shared memory and the registers of a warp. Register
// i of lane l holds elements 2 (l % 4) and the next of row l / 4 of matrix i; with Trans, of the
// matrix with rows and columns exchanged. Lane 8 i + j gives the address of row j of matrix i: 16
// bytes, aligned to as many. Addresses of lanes beyond the last matrix are not used.
#pragma once

#include "hw/memory.cuh"

namespace hw {

// Loads N matrices, from `offset` bytes behind `row`: a constant offset becomes a part of the
// instruction. PTX ISA, ldmatrix, sm_75; a full warp.
template <bool Trans = false, int N>
__device__ __forceinline__ void ldmatrix(unsigned int (&r)[N], const void* row, int offset = 0) {
    static_assert(N == 1 || N == 2 || N == 4, "ldmatrix loads 1, 2 or 4 matrices");
    const unsigned int from = shared_address(row) + offset;
    // clang-format off
#define HW_LDMATRIX(number, registers, ...)                                                  \
    if constexpr (Trans) {                                                                   \
        asm volatile("ldmatrix.sync.aligned.m8n8." number ".trans.shared.b16 " registers ";" \
                     : __VA_ARGS__ : "r"(from) : "memory");                                  \
    } else {                                                                                 \
        asm volatile("ldmatrix.sync.aligned.m8n8." number ".shared.b16 " registers ";"       \
                     : __VA_ARGS__ : "r"(from) : "memory");                                  \
    }
    // clang-format on
    if constexpr (N == 1) {
        HW_LDMATRIX("x1", "{%0}, [%1]", "=r"(r[0]))
    } else if constexpr (N == 2) {
        HW_LDMATRIX("x2", "{%0, %1}, [%2]", "=r"(r[0]), "=r"(r[1]))
    } else {
        HW_LDMATRIX("x4", "{%0, %1, %2, %3}, [%4]", "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]))
    }
#undef HW_LDMATRIX
}

// Stores N matrices. PTX ISA, stmatrix, sm_90; a full warp.
template <bool Trans = false, int N>
__device__ __forceinline__ void stmatrix(void* row, const unsigned int (&r)[N]) {
    static_assert(N == 1 || N == 2 || N == 4, "stmatrix stores 1, 2 or 4 matrices");
    const unsigned int to = shared_address(row);
    // clang-format off
#define HW_STMATRIX(number, registers, ...)                                                        \
    if constexpr (Trans) {                                                                         \
        asm volatile("stmatrix.sync.aligned.m8n8." number ".trans.shared.b16 [%0], " registers ";" \
                     : : "r"(to), __VA_ARGS__ : "memory");                                         \
    } else {                                                                                       \
        asm volatile("stmatrix.sync.aligned.m8n8." number ".shared.b16 [%0], " registers ";"       \
                     : : "r"(to), __VA_ARGS__ : "memory");                                         \
    }
    // clang-format on
    if constexpr (N == 1) {
        HW_STMATRIX("x1", "{%1}", "r"(r[0]))
    } else if constexpr (N == 2) {
        HW_STMATRIX("x2", "{%1, %2}", "r"(r[0]), "r"(r[1]))
    } else {
        HW_STMATRIX("x4", "{%1, %2, %3, %4}", "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]))
    }
#undef HW_STMATRIX
}

}  // namespace hw
