// SPDX-License-Identifier: Apache-2.0
// What every lane gets from the functions that let threads exchange values.
#include "hw/memory.cuh"

struct Params {
    const long long* x;  // (threads)
    long long* out;      // (kResults, threads)
};

constexpr int kResults = 14;
constexpr unsigned int kAll = 0xffffffff;
constexpr unsigned int kEven = 0x55555555;

extern "C" __global__ void lanes(const __grid_constant__ Params p) {
    const int thread = threadIdx.x, lane = thread % warpSize;
    const long long x = hw::load(p.x + thread);
    const int odd = static_cast<int>(x & 1);
    long long result[kResults] = {};
    result[0] = __shfl_sync(kAll, x, static_cast<int>(x & 63), 8);
    result[1] = __shfl_xor_sync(kAll, x, 5);
    result[2] = __shfl_xor_sync(kAll, x, 12, 8);
    result[3] = __shfl_up_sync(kAll, x, 3u, 16);
    result[4] = __shfl_down_sync(kAll, x, 3u, 16);
    result[5] = __ballot_sync(kAll, odd);
    if (lane % 2 == 0) {  // the others wait at the barrier meanwhile
        result[6] = __any_sync(kEven, odd) + 2 * __all_sync(kEven, odd);
        result[7] = __shfl_sync(kEven, static_cast<int>(x), lane + (lane == 2));  // 3 is not there
        result[8] = __float_as_int(__shfl_down_sync(kEven, static_cast<float>(x), 2u));
    }
    result[9] = __syncthreads_count(odd);
    result[10] = __syncthreads_or(thread == 40 && odd) + 2 * __syncthreads_and(x > 0);
    result[11] = __popc(static_cast<unsigned int>(x)) + 100 * __ffs(static_cast<int>(x)) +
                 10000 * __clz(static_cast<int>(x));
    __syncwarp();
    result[12] = min(x, 50ll) + max(thread, 10);
    const unsigned int bytes = static_cast<unsigned int>(x) * 0x01030201u;
    result[13] = __dp4a(bytes, 0x80402001u, static_cast<unsigned int>(thread));
    for (int i = 0; i < kResults; ++i) {
        hw::store(p.out + i * static_cast<int>(blockDim.x) + thread, result[i]);
    }
}
