// SPDX-License-Identifier: Apache-2.0
// Sums: out[block] = the sum of the block's part of x, by shuffles and shared memory.
#include "hw/memory.cuh"

struct Params {
    const float* x;
    float* out;
    int n;
};

struct Smem {
    float partial[plan::kThreads / 32];
};

extern "C" __global__ void __launch_bounds__(plan::kThreads)
    reduce(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = index < p.n ? hw::load(p.x + index) : 0.0f;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    if (threadIdx.x % 32 == 0) smem.partial[threadIdx.x / 32] = sum;
    if (!plan::kForgetBarrier) __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0.0f;
        for (int warp = 0; warp < plan::kThreads / 32; ++warp) total += smem.partial[warp];
        hw::store(p.out + blockIdx.x, total);
    }
}
