// SPDX-License-Identifier: Apache-2.0
// out = a b, 64 x 64 and 64 x 128, by wgmma; with faults. a goes through registers into shared
// memory by stmatrix, K-major; b comes by TMA, MN-major in two boxes of 64 columns. 128 threads.
#include "hw/ldmatrix.cuh"
#include "hw/sync.cuh"
#include "hw/tma.cuh"
#include "hw/wgmma.cuh"
#include "planted.cuh"

using Element = hw::bfloat16;
constexpr int kRows = 64, kDepth = 64, kColumns = 128, kRowBytes = 128;
constexpr int kBoxBytes = kDepth * kRowBytes;

struct Params {
    hw::TensorMap b;
    const unsigned int* a;  // (kRows, kDepth) of Element
    float* out;             // (kRows, kColumns)
    unsigned int fault;
};

struct Smem {
    alignas(1024) unsigned char a[kRows * kRowBytes];
    alignas(1024) hw::MBarrier full;
    alignas(1024) unsigned char b[2][kBoxBytes];
};

// Each warp writes the 16 rows that the next one multiplies.
__device__ void write_a(const Params& p, Smem& smem) {
    const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32 + 1) % 4;
    for (int step = 0; step < kDepth / 16; ++step) {
        unsigned int r[4];
        for (int i = 0; i < 4; ++i) {
            const int row = 16 * warp + lane / 4 + i % 2 * 8, col = 16 * step + i / 2 * 8;
            r[i] = hw::load(p.a + (row * kDepth + col) / 2 + lane % 4);
        }
        const int offset = (16 * warp + lane % 16) * kRowBytes + 32 * step + lane / 16 * 16;
        hw::stmatrix(smem.a + (offset ^ (offset >> 3 & 0x70)), r);
    }
}

extern "C" __global__ void planted_operands(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    if (threadIdx.x == 0) {
        hw::mbarrier_init(smem.full, 1);
        hw::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        hw::mbarrier_arrive_expect_tx(smem.full, 2 * kBoxBytes);
        for (int i = 0; i < 2; ++i) hw::tma_load(smem.b[i], p.b, smem.full, 64 * i, 0);
    }
    write_a(p, smem);
    if (!PLANTED("no-fence-before-wgmma")) hw::fence_proxy_async();
    if (!PLANTED("no-barrier-after-stmatrix")) __syncthreads();
    hw::mbarrier_wait(smem.full, 0);

    const int stride = PLANTED("wrong-stride-bytes") ? 512 : 1024;
    const int leading = PLANTED("wrong-leading-bytes") ? kBoxBytes / 2 : kBoxBytes;
    const auto swizzle =
        PLANTED("wrong-swizzle-in-a-descriptor") ? hw::Swizzle::k64 : hw::Swizzle::k128;
    const int step_of_b = PLANTED("wrong-step-of-a-transposed-operand") ? 32 : 16 * kRowBytes;
    float d[kColumns / 2];
    hw::wgmma_fence();
    for (int step = 0; step < kDepth / 16; ++step) {
        const auto a = hw::wgmma_descriptor(smem.a + 32 * step, 16, stride, swizzle);
        const auto b =
            hw::wgmma_descriptor(smem.b[0] + step_of_b * step, leading, 1024, hw::Swizzle::k128);
        const bool accumulate = step > 0 && !PLANTED("sum-forgotten");
        if (PLANTED("wrong-transpose-bit")) {
            hw::wgmma<Element, kColumns, false, false>(d, a, b, accumulate);
        } else {
            hw::wgmma<Element, kColumns, false, true>(d, a, b, accumulate);
        }
    }
    hw::wgmma_commit();
    hw::wgmma_wait<0>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = 0; i < kColumns / 2; ++i) {
        const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8;
        int col = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (PLANTED("wrong-columns-of-accumulators")) col = i / 4 * 8 + lane % 4 + i % 2 * 4;
        hw::store(p.out + row * kColumns + col, d[i]);
    }
}
