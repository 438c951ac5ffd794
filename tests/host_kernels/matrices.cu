// SPDX-License-Identifier: Apache-2.0
// One ldmatrix or stmatrix by a warp, on an image of shared memory.
#include "hw/ldmatrix.cuh"

struct Params {
    const unsigned int* image;  // (512), shared memory before
    const int* offsets;         // (32), the lanes' addresses in bytes
    unsigned int* registers;    // (32, count)
    unsigned int* result;       // (512), shared memory after
    int store, count, transposed;
};

constexpr int kWords = 512;

struct Smem {
    alignas(16) unsigned int words[kWords];
};

template <int Count, bool Trans>
__device__ void move(const Params& p, unsigned char* row) {
    unsigned int* const registers = p.registers + threadIdx.x * Count;
    unsigned int r[Count];
    if (p.store) {
        for (int i = 0; i < Count; ++i) r[i] = hw::load(registers + i);
        hw::stmatrix<Trans>(row, r);
    } else {
        hw::ldmatrix<Trans>(r, row);
        for (int i = 0; i < Count; ++i) hw::store(registers + i, r[i]);
    }
}

template <int Count>
__device__ void move(const Params& p, unsigned char* row) {
    if (p.transposed) {
        move<Count, true>(p, row);
    } else {
        move<Count, false>(p, row);
    }
}

extern "C" __global__ void matrices(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    for (int i = threadIdx.x; i < kWords; i += 32) smem.words[i] = hw::load(p.image + i);
    __syncwarp();
    unsigned char* const row =
        reinterpret_cast<unsigned char*>(smem.words) + hw::load(p.offsets + threadIdx.x);
    if (p.count == 1) move<1>(p, row);
    if (p.count == 2) move<2>(p, row);
    if (p.count == 4) move<4>(p, row);
    __syncwarp();
    for (int i = threadIdx.x; i < kWords; i += 32) hw::store(p.result + i, smem.words[i]);
}
