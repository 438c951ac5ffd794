// SPDX-License-Identifier: Apache-2.0
// Functions of one thread: approximations, packing, additions to global memory.
#include "hw/convert.cuh"
#include "hw/math.cuh"
#include "hw/memory.cuh"
#include "hw/reduce.cuh"

struct Params {
    const float *x, *y;     // (n)
    unsigned int* results;  // (5, n): exp2, log2, rcp of x; x and y packed as float16, as bfloat16
    const int* at;          // (n), places in sums
    float* sums;            // to which x is added: one, two or four neighbours of x by a thread
    int n, together;
};

extern "C" __global__ void scalars(const __grid_constant__ Params p) {
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
        const float x = hw::load(p.x + i), y = hw::load(p.y + i);
        const unsigned int results[] = {
            __float_as_uint(hw::exp2_approx(x)), __float_as_uint(hw::log2_approx(x)),
            __float_as_uint(hw::rcp_approx(x)), hw::pack2<hw::float16>(x, y),
            hw::pack2<hw::bfloat16>(x, y)};
        for (int row = 0; row < 5; ++row) hw::store(p.results + row * p.n + i, results[row]);
    }
    for (int i = threadIdx.x * p.together; i < p.n; i += blockDim.x * p.together) {
        float v[4];
        for (int j = 0; j < p.together; ++j) v[j] = hw::load(p.x + i + j);
        float* const to = p.sums + hw::load(p.at + i);
        if (p.together == 1) hw::reduce_add(to, v[0]);
        if (p.together == 2) {
            const float pair[2] = {v[0], v[1]};
            hw::reduce_add(to, pair);
        }
        if (p.together == 4) hw::reduce_add(to, v);
    }
}
