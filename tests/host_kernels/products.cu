// SPDX-License-Identifier: Apache-2.0
// A chain of wgmma by a warpgroup, on an image of shared memory; plan::kN columns. The products
// take turns between two sets of accumulators, in groups of one product each, if `groups`; else
// they are one group that adds to the first set.
#include "hw/sync.cuh"
#include "hw/wgmma.cuh"

constexpr int kOperands = 9;

struct Params {
    const unsigned int* image;        // (words), a multiple of 512
    const unsigned int* a_registers;  // (count, 128, 4), if a is there
    const int* operands;  // (count, 9): of a, then of b: offset, leading, stride (bytes), swizzle
                          // (hw::Swizzle); then, whether to accumulate
    float* d;             // (2, 128, kN / 2), the accumulators before and after
    int words, count;
    int a_place;  // 0: shared memory, K-major; 1: MN-major; 2: registers
    int b_transposed, bfloat16, groups;
};

struct Smem {
    alignas(1024) unsigned int words[1];  // and as many more as the launch has room for
};

__device__ unsigned long long descriptor(const Smem& smem, const int* fields) {
    const unsigned char* const base = reinterpret_cast<const unsigned char*>(&smem);
    return hw::wgmma_descriptor(base + hw::load(fields), hw::load(fields + 1), hw::load(fields + 2),
                                static_cast<hw::Swizzle>(hw::load(fields + 3)));
}

template <class T>
__device__ void product(const Params& p,
                        float (&d)[plan::kN / 2],
                        const unsigned int (&registers)[4],
                        unsigned long long a,
                        unsigned long long b,
                        bool accumulate) {
    constexpr int kN = plan::kN;
    switch (p.a_place * 2 + p.b_transposed) {
        case 0:
            return hw::wgmma<T, kN, false, false>(d, a, b, accumulate);
        case 1:
            return hw::wgmma<T, kN, false, true>(d, a, b, accumulate);
        case 2:
            return hw::wgmma<T, kN, true, false>(d, a, b, accumulate);
        case 3:
            return hw::wgmma<T, kN, true, true>(d, a, b, accumulate);
        case 4:
            return hw::wgmma<T, kN, false>(d, registers, b, accumulate);
        default:
            return hw::wgmma<T, kN, true>(d, registers, b, accumulate);
    }
}

extern "C" __global__ void products(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    using Piece = hw::Vec<unsigned int, 4>;
    for (int i = threadIdx.x; i < p.words / 4; i += 128) {
        const Piece piece = hw::load(reinterpret_cast<const Piece*>(p.image) + i);
        *(reinterpret_cast<Piece*>(&smem) + i) = piece;
    }
    hw::fence_proxy_async();
    __syncthreads();

    float d[2][plan::kN / 2];
    float* const out = p.d + threadIdx.x * (plan::kN / 2);
    for (int i = 0; i < plan::kN; ++i) {
        const int set = i / (plan::kN / 2), j = i % (plan::kN / 2);
        d[set][j] = hw::load(out + set * 64 * plan::kN + j);
    }
    unsigned int a[16][4];  // of up to 16 products: they must live until the last one is done
    for (int i = 0; i < p.count && p.a_place == 2; ++i) {
        for (int j = 0; j < 4; ++j) {
            a[i][j] = hw::load(p.a_registers + (i * 128 + threadIdx.x) * 4 + j);
        }
    }
    hw::wgmma_fence();
    for (int i = 0; i < p.count; ++i) {
        const int* const operands = p.operands + i * kOperands;
        const unsigned long long b = descriptor(smem, operands + 4);
        const unsigned long long at = p.a_place == 2 ? 0 : descriptor(smem, operands);
        const bool accumulate = hw::load(operands + 8);
        float (&mine)[plan::kN / 2] = d[p.groups ? i % 2 : 0];
        if (p.groups) hw::wgmma_fence();
        if (p.bfloat16) {
            product<hw::bfloat16>(p, mine, a[i], at, b, accumulate);
        } else {
            product<hw::float16>(p, mine, a[i], at, b, accumulate);
        }
        if (p.groups) {
            hw::wgmma_commit();
            hw::wgmma_wait<1>();
            // The group before is done: its accumulators may be used while this one is under way.
            if (i > 0) {
                float (&other)[plan::kN / 2] = d[(i + 1) % 2];
                for (float& x : other) x += 1.0f;
            }
        }
    }
    if (!p.groups) hw::wgmma_commit();
    hw::wgmma_wait<0>();
    for (int i = 0; i < plan::kN; ++i) {
        const int set = i / (plan::kN / 2), j = i % (plan::kN / 2);
        hw::store(out + set * 64 * plan::kN + j, d[set][j]);
    }
}
