// SPDX-License-Identifier: Apache-2.0
// Products of matrices by a warpgroup, four warps that begin at a multiple of four, on sm_90a. They
// run asynchronously: wgmma_fence, some wgmma, wgmma_commit; between that and wgmma_wait nobody may
// touch their registers or write to their shared memory.
//
// d is 64 x N; of its 8 columns from 8 j on, lane 4 g + q of warp w has, as in hw/mma.cuh,
//   d[4j], d[4j + 1] = row 16 w + g, columns 2q, 2q + 1;  d[4j + 2], d[4j + 3] = row 16 w + g + 8
// a is 64 x 16, of each warp the 16 rows of its part of d, in registers as in hw/mma.cuh or in
// shared memory; b is 16 x N in shared memory.
#pragma once

#include "hw/convert.cuh"
#include "hw/memory.cuh"

namespace hw {

// How 16-byte pieces of an operand are permuted in shared memory, as the TMA unit does it: by the
// number of bytes in which they change places. Numbered as the driver does for tensor maps.
enum class Swizzle { kNone, k32, k64, k128 };

// Where an operand is in shared memory, for wgmma. Its rows have the swizzle's number of bytes (16
// with kNone), and 8 of them follow each other closely. Elements of a row are neighbours in k, or,
// with Trans, in m or n. PTX ISA, "Matrix descriptor"; any thread, the same in all of a warpgroup.
//   stride_bytes: from 8 rows to the next 8
//   leading_bytes: with Trans, from the first row's elements to those that continue it; else only
//     with kNone, to its other 8 elements of k
// With kNone and Trans the two change their roles.
__device__ __forceinline__ unsigned long long wgmma_descriptor(const void* shared,
                                                               int leading_bytes,
                                                               int stride_bytes,
                                                               Swizzle swizzle) {
    const auto field = [](unsigned int bytes) -> unsigned long long {
        return (bytes & 0x3ffff) >> 4;  // an address has higher bits in a cluster
    };
    const unsigned long long kind = -static_cast<int>(swizzle) & 3;  // 0, 3, 2, 1
    return field(shared_address(shared)) | field(leading_bytes) << 16 | field(stride_bytes) << 32 |
           kind << 62;
}

// Registers and shared memory are as the thread left them when the wgmma after it begin. PTX ISA,
// wgmma.fence; a warpgroup.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// All wgmma since the last call are a group. PTX ISA, wgmma.commit_group; a warpgroup.
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the N latest groups are unfinished. PTX ISA, wgmma.wait_group; a warpgroup.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    static_assert(N >= 0 && N <= 7, "wgmma.wait_group takes 0 to 7");
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// The instruction names each register, so there is a text for each N, put together by macros:
// HW_LIST_N is first(0, 1, 2, 3) next(4, 5, 6, 7) ... up to N / 2 registers, and HW_ROWS has for
// each N the numbers of the seven operands that follow them.
// clang-format off
#define HW_LIST_8(first, next) first(0, 1, 2, 3)
#define HW_LIST_16(first, next) HW_LIST_8(first, next) next(4, 5, 6, 7)
#define HW_LIST_24(first, next) HW_LIST_16(first, next) next(8, 9, 10, 11)
#define HW_LIST_32(first, next) HW_LIST_24(first, next) next(12, 13, 14, 15)
#define HW_LIST_40(first, next) HW_LIST_32(first, next) next(16, 17, 18, 19)
#define HW_LIST_48(first, next) HW_LIST_40(first, next) next(20, 21, 22, 23)
#define HW_LIST_56(first, next) HW_LIST_48(first, next) next(24, 25, 26, 27)
#define HW_LIST_64(first, next) HW_LIST_56(first, next) next(28, 29, 30, 31)
#define HW_LIST_72(first, next) HW_LIST_64(first, next) next(32, 33, 34, 35)
#define HW_LIST_80(first, next) HW_LIST_72(first, next) next(36, 37, 38, 39)
#define HW_LIST_88(first, next) HW_LIST_80(first, next) next(40, 41, 42, 43)
#define HW_LIST_96(first, next) HW_LIST_88(first, next) next(44, 45, 46, 47)
#define HW_LIST_104(first, next) HW_LIST_96(first, next) next(48, 49, 50, 51)
#define HW_LIST_112(first, next) HW_LIST_104(first, next) next(52, 53, 54, 55)
#define HW_LIST_120(first, next) HW_LIST_112(first, next) next(56, 57, 58, 59)
#define HW_LIST_128(first, next) HW_LIST_120(first, next) next(60, 61, 62, 63)
#define HW_LIST_136(first, next) HW_LIST_128(first, next) next(64, 65, 66, 67)
#define HW_LIST_144(first, next) HW_LIST_136(first, next) next(68, 69, 70, 71)
#define HW_LIST_152(first, next) HW_LIST_144(first, next) next(72, 73, 74, 75)
#define HW_LIST_160(first, next) HW_LIST_152(first, next) next(76, 77, 78, 79)
#define HW_LIST_168(first, next) HW_LIST_160(first, next) next(80, 81, 82, 83)
#define HW_LIST_176(first, next) HW_LIST_168(first, next) next(84, 85, 86, 87)
#define HW_LIST_184(first, next) HW_LIST_176(first, next) next(88, 89, 90, 91)
#define HW_LIST_192(first, next) HW_LIST_184(first, next) next(92, 93, 94, 95)
#define HW_LIST_200(first, next) HW_LIST_192(first, next) next(96, 97, 98, 99)
#define HW_LIST_208(first, next) HW_LIST_200(first, next) next(100, 101, 102, 103)
#define HW_LIST_216(first, next) HW_LIST_208(first, next) next(104, 105, 106, 107)
#define HW_LIST_224(first, next) HW_LIST_216(first, next) next(108, 109, 110, 111)
#define HW_LIST_232(first, next) HW_LIST_224(first, next) next(112, 113, 114, 115)
#define HW_LIST_240(first, next) HW_LIST_232(first, next) next(116, 117, 118, 119)
#define HW_LIST_248(first, next) HW_LIST_240(first, next) next(120, 121, 122, 123)
#define HW_LIST_256(first, next) HW_LIST_248(first, next) next(124, 125, 126, 127)

#define HW_ROWS(ROW) \
    ROW(8, 4, 5, 6, 7, 8, 9, 10) \
    ROW(16, 8, 9, 10, 11, 12, 13, 14) \
    ROW(24, 12, 13, 14, 15, 16, 17, 18) \
    ROW(32, 16, 17, 18, 19, 20, 21, 22) \
    ROW(40, 20, 21, 22, 23, 24, 25, 26) \
    ROW(48, 24, 25, 26, 27, 28, 29, 30) \
    ROW(56, 28, 29, 30, 31, 32, 33, 34) \
    ROW(64, 32, 33, 34, 35, 36, 37, 38) \
    ROW(72, 36, 37, 38, 39, 40, 41, 42) \
    ROW(80, 40, 41, 42, 43, 44, 45, 46) \
    ROW(88, 44, 45, 46, 47, 48, 49, 50) \
    ROW(96, 48, 49, 50, 51, 52, 53, 54) \
    ROW(104, 52, 53, 54, 55, 56, 57, 58) \
    ROW(112, 56, 57, 58, 59, 60, 61, 62) \
    ROW(120, 60, 61, 62, 63, 64, 65, 66) \
    ROW(128, 64, 65, 66, 67, 68, 69, 70) \
    ROW(136, 68, 69, 70, 71, 72, 73, 74) \
    ROW(144, 72, 73, 74, 75, 76, 77, 78) \
    ROW(152, 76, 77, 78, 79, 80, 81, 82) \
    ROW(160, 80, 81, 82, 83, 84, 85, 86) \
    ROW(168, 84, 85, 86, 87, 88, 89, 90) \
    ROW(176, 88, 89, 90, 91, 92, 93, 94) \
    ROW(184, 92, 93, 94, 95, 96, 97, 98) \
    ROW(192, 96, 97, 98, 99, 100, 101, 102) \
    ROW(200, 100, 101, 102, 103, 104, 105, 106) \
    ROW(208, 104, 105, 106, 107, 108, 109, 110) \
    ROW(216, 108, 109, 110, 111, 112, 113, 114) \
    ROW(224, 112, 113, 114, 115, 116, 117, 118) \
    ROW(232, 116, 117, 118, 119, 120, 121, 122) \
    ROW(240, 120, 121, 122, 123, 124, 125, 126) \
    ROW(248, 124, 125, 126, 127, 128, 129, 130) \
    ROW(256, 128, 129, 130, 131, 132, 133, 134)
// clang-format on

#define HW_NAMES(i, j, k, l) "%" #i ", %" #j ", %" #k ", %" #l
#define HW_MORE_NAMES(i, j, k, l) ", " HW_NAMES(i, j, k, l)
#define HW_REGISTERS(i, j, k, l) "+f"(d[i]), "+f"(d[j]), "+f"(d[k]), "+f"(d[l])
#define HW_MORE_REGISTERS(i, j, k, l) , HW_REGISTERS(i, j, k, l)

// The instruction's accumulate is a predicate; if it is a constant, nothing is left of setp.
// clang-format off
#define HW_WGMMA(columns, type, a, b, accumulate, transposed, ...)             \
    asm volatile(                                                              \
        "{\n"                                                                  \
        ".reg .pred p;\n"                                                      \
        "setp.ne.b32 p, " accumulate ", 0;\n"                                  \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type  \
        " {" HW_LIST_##columns(HW_NAMES, HW_MORE_NAMES) "}, "                  \
        a ", " b ", p, 1, 1, " transposed ";\n"                                \
        "}"                                                                    \
        : HW_LIST_##columns(HW_REGISTERS, HW_MORE_REGISTERS)                   \
        : __VA_ARGS__                                                          \
        : "memory")
// clang-format on

// d = a b, added to d if accumulate. Trans: the operand is MN-major. PTX ISA, wgmma.mma_async; a
// warpgroup.
template <class T, int N, bool TransA = false, bool TransB = false>
__device__ __forceinline__ void wgmma(float (&d)[N / 2],
                                      unsigned long long a,
                                      unsigned long long b,
                                      bool accumulate) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma has 8, 16, ..., 256 columns");
    const int add = accumulate;
#define HW_OPERANDS "l"(a), "l"(b), "r"(add), "n"(TransA), "n"(TransB)
#define HW_ROW(columns, i, j, k, l, m, n, o)                                                 \
    if constexpr (N == columns) {                                                            \
        if constexpr (kIsBfloat16<T>) {                                                      \
            HW_WGMMA(columns, "bf16", "%" #i, "%" #j, "%" #k, "%" #l ", %" #m, HW_OPERANDS); \
        } else {                                                                             \
            HW_WGMMA(columns, "f16", "%" #i, "%" #j, "%" #k, "%" #l ", %" #m, HW_OPERANDS);  \
        }                                                                                    \
    }
    HW_ROWS(HW_ROW)
#undef HW_ROW
#undef HW_OPERANDS
}

// The same with a in registers.
template <class T, int N, bool TransB = false>
__device__ __forceinline__ void wgmma(float (&d)[N / 2],
                                      const unsigned int (&a)[4],
                                      unsigned long long b,
                                      bool accumulate) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma has 8, 16, ..., 256 columns");
    const int add = accumulate;
#define HW_FRAGMENT(i, j, k, l) "{%" #i ", %" #j ", %" #k ", %" #l "}"
#define HW_OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TransB)
#define HW_ROW(columns, i, j, k, l, m, n, o)                                           \
    if constexpr (N == columns) {                                                      \
        if constexpr (kIsBfloat16<T>) {                                                \
            HW_WGMMA(columns, "bf16", HW_FRAGMENT(i, j, k, l), "%" #m, "%" #n, "%" #o, \
                     HW_OPERANDS);                                                     \
        } else {                                                                       \
            HW_WGMMA(columns, "f16", HW_FRAGMENT(i, j, k, l), "%" #m, "%" #n, "%" #o,  \
                     HW_OPERANDS);                                                     \
        }                                                                              \
    }
    HW_ROWS(HW_ROW)
#undef HW_ROW
#undef HW_OPERANDS
#undef HW_FRAGMENT
}

#undef HW_WGMMA
#undef HW_ROWS
#undef HW_NAMES
#undef HW_MORE_NAMES
#undef HW_REGISTERS
#undef HW_MORE_REGISTERS

}  // namespace hw
