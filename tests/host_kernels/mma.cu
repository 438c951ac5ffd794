// SPDX-License-Identifier: Apache-2.0
// d = c + a b by a warp, all in the order of registers.
#include "hw/mma.cuh"
#include "hw/memory.cuh"

struct Params {
    const unsigned int *a, *b;  // (32, 4), (32, 2)
    const float* c;             // (32, 4)
    float* d;                   // (32, 4)
    int bfloat16;
};

extern "C" __global__ void mma(const __grid_constant__ Params p) {
    const int lane = threadIdx.x;
    unsigned int a[4], b[2];
    float d[4];
    for (int i = 0; i < 4; ++i) a[i] = hw::load(p.a + 4 * lane + i);
    for (int i = 0; i < 2; ++i) b[i] = hw::load(p.b + 2 * lane + i);
    for (int i = 0; i < 4; ++i) d[i] = hw::load(p.c + 4 * lane + i);
    if (p.bfloat16) {
        hw::mma_m16n8k16<hw::bfloat16>(d, a, b);
    } else {
        hw::mma_m16n8k16<hw::float16>(d, a, b);
    }
    for (int i = 0; i < 4; ++i) hw::store(p.d + 4 * lane + i, d[i]);
}
