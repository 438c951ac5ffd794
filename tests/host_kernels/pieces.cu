// SPDX-License-Identifier: Apache-2.0
// cp.async of pieces of plan::kBytes. Each thread copies one piece into each of kGroups rows of
// shared memory, and after each wait notes what its pieces hold.
#include "hw/cp_async.cuh"

constexpr int kGroups = 3, kThreads = 64, kBytes = plan::kBytes;

struct Params {
    const unsigned char* x;  // (kGroups, kThreads, kBytes)
    const int* valid;        // (kGroups, kThreads)
    unsigned char* out;      // (kGroups, kGroups, kThreads, kBytes): wait, group
};

struct Smem {
    alignas(16) unsigned char rows[kGroups][kThreads][kBytes];
};

template <int Wait>
__device__ void look(const Params& p, const Smem& smem) {
    hw::cp_async_wait<kGroups - 1 - Wait>();
    for (int group = 0; group < kGroups; ++group) {
        const int place = ((Wait * kGroups + group) * kThreads + threadIdx.x) * kBytes;
        for (int i = 0; i < kBytes; ++i) {
            hw::store(p.out + place + i, smem.rows[group][threadIdx.x][i]);
        }
    }
}

extern "C" __global__ void pieces(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    for (int group = 0; group < kGroups; ++group) {
        const int piece = group * kThreads + threadIdx.x;
        hw::cp_async<kBytes>(smem.rows[group][threadIdx.x], p.x + piece * kBytes,
                             hw::load(p.valid + piece) != 0);
        hw::cp_async_commit();
    }
    look<0>(p, smem);
    look<1>(p, smem);
    look<2>(p, smem);
}
