// SPDX-License-Identifier: Apache-2.0
// Additions to global memory that return nothing; the order of several to one address is open.
#pragma once

namespace hw {

// PTX ISA, red.global.add.f32; any thread.
__device__ __forceinline__ void reduce_add(float* global, float a) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(global), "f"(a) : "memory");
}

// To neighbours, aligned to 8 bytes; each is added by itself. PTX ISA, red.global.add.v2.f32,
// sm_90; any thread.
__device__ __forceinline__ void reduce_add(float* global, const float (&v)[2]) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(global), "f"(v[0]), "f"(v[1])
                 : "memory");
}

// The same of four, aligned to 16 bytes. PTX ISA, red.global.add.v4.f32 on sm_90, one by one
// before; any thread.
__device__ __forceinline__ void reduce_add(float* global, const float (&v)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(v[0]),
                 "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) reduce_add(global + i, v[i]);
#endif
}

}  // namespace hw
