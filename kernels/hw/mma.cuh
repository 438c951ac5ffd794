// SPDX-License-Identifier: Apache-2.0
// Products of small matrices by one warp. With g = lane / 4 and q = lane % 4, the lane has of
//   d, 16 x 8:  d[0], d[1] = row g, columns 2q, 2q + 1;  d[2], d[3] = the same of row g + 8
//   a, 16 x 16: a[0] = row g, columns 2q, 2q + 1;  a[1] = row g + 8;  a[2], a[3] = columns + 8
//   b, 16 x 8:  b[0] = rows 2q, 2q + 1 of column g;  b[1] = rows + 8
#pragma once

#include "hw/convert.cuh"

namespace hw {

// d += a b, with sums in float. PTX ISA, mma.sync.m16n8k16, sm_80; a full warp.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4],
                                             const unsigned int (&a)[4],
                                             const unsigned int (&b)[2]) {
#define HW_MMA(type)                                                                    \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if constexpr (kIsBfloat16<T>) {
        HW_MMA("bf16");
    } else {
        HW_MMA("f16");
    }
#undef HW_MMA
}

}  // namespace hw
