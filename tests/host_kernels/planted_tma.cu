// SPDX-License-Identifier: Apache-2.0
// out = (q k^T) v for 128 queries, in float16; with faults. A producer loads tiles of 64 keys by
// TMA into two stages; two warpgroups multiply 64 queries each by wgmma, and store by TMA.
#include "hw/ldmatrix.cuh"
#include "hw/sync.cuh"
#include "hw/tma.cuh"
#include "hw/wgmma.cuh"
#include "planted.cuh"

using Element = hw::float16;
constexpr int kTile = 64, kWidth = 64, kStages = 2, kGroups = 2;
constexpr int kRowBytes = 128, kTileBytes = kTile * kRowBytes;
constexpr int kHalfRowBytes = 64;  // results are stored 32 columns at a time

struct Params {
    hw::TensorMap q, k, v, out;
    int keys;
    unsigned int fault;
};

struct Smem {
    alignas(1024) unsigned char q[kGroups][kTileBytes];
    alignas(1024) unsigned char k[kStages][kTileBytes];
    alignas(1024) unsigned char v[kStages][kTileBytes];
    alignas(1024) unsigned char out[kGroups][kTile * kHalfRowBytes + 512];
    hw::MBarrier full_q, full_k[kStages], full_v[kStages], empty_k[kStages], empty_v[kStages];
};

__device__ void start(const Params& p, Smem& smem) {
    if (threadIdx.x == 0) {
        const int consumers = kGroups * 128 + PLANTED("arrivals-counted-wrong");
        hw::mbarrier_init(smem.full_q, 1);
        for (int stage = 0; stage < kStages; ++stage) {
            hw::mbarrier_init(smem.full_k[stage], 1);
            if (!PLANTED("mbarrier-not-initialised")) hw::mbarrier_init(smem.full_v[stage], 1);
            hw::mbarrier_init(smem.empty_k[stage], consumers);
            hw::mbarrier_init(smem.empty_v[stage], consumers);
        }
        if (PLANTED("mbarrier-initialised-twice")) hw::mbarrier_init(smem.full_k[0], 1);
        if (!PLANTED("no-fence-mbarrier-init")) hw::fence_mbarrier_init();
        if (PLANTED("mbarrier-overwritten")) smem.empty_v[1].word = 0;
    }
    if (!PLANTED("no-barrier-after-mbarrier-init")) __syncthreads();
}

__device__ void produce(const Params& p, Smem& smem) {
    if (PLANTED("too-few-registers-given")) {
        hw::registers_decrease<56>();
    } else if (!PLANTED("no-registers-given")) {
        hw::registers_decrease<40>();
    }
    if (threadIdx.x >= 32 || !hw::elect_one()) return;
    hw::mbarrier_arrive_expect_tx(smem.full_q, kGroups * kTileBytes);
    for (int group = 0; group < kGroups; ++group) {
        hw::tma_load(smem.q[group], p.q, smem.full_q, 0, kTile * group);
    }
    for (int tile = 0; tile * kTile < p.keys; ++tile) {
        const int stage = tile % kStages;
        const int parity = PLANTED("parity-never-flipped") ? 1 : 1 ^ tile / kStages % 2;
        const int bytes =
            kTileBytes + 16 * PLANTED("too-many-bytes") - 16 * PLANTED("too-few-bytes");
        if (!PLANTED("no-wait-for-empty")) hw::mbarrier_wait(smem.empty_k[stage], parity);
        hw::mbarrier_arrive_expect_tx(smem.full_k[stage], bytes);
        const int skew = PLANTED("misaligned-tile") ? 64 : 0;
        hw::tma_load(smem.k[stage] + skew, p.k, smem.full_k[stage], 0, kTile * tile);
        hw::mbarrier_wait(smem.empty_v[stage], parity);
        if (!PLANTED("bytes-not-announced")) {
            hw::mbarrier_arrive_expect_tx(smem.full_v[stage], kTileBytes);
        } else {
            hw::mbarrier_arrive(smem.full_v[stage]);
        }
        hw::tma_load(smem.v[stage], p.v, smem.full_v[stage], 0, kTile * tile);
    }
}

__device__ unsigned long long descriptor(const unsigned char* tile) {
    return hw::wgmma_descriptor(tile, 16, 8 * kRowBytes, hw::Swizzle::k128);
}

// 32 columns of the warpgroup's results, to its part of shared memory, rows as TMA swizzles them.
__device__ void write_half(const float* result, unsigned char* out) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    for (int pair = 0; pair < 2; ++pair) {
        const float* const d = result + 8 * pair;
        unsigned int r[4];
        for (int i = 0; i < 4; ++i) r[i] = hw::pack2<Element>(d[2 * i], d[2 * i + 1]);
        const int row = 16 * warp + lane % 16, piece = 2 * pair + lane / 16;
        const int offset = row * kHalfRowBytes + piece * 16;
        hw::stmatrix(out + (offset ^ (offset >> 3 & 0x30)), r);
    }
}

__device__ void store(const Params& p, Smem& smem, const float* result) {
    const int group = threadIdx.x / 128 - 1;
    unsigned char* const out = smem.out[group] + (PLANTED("tile-off-the-swizzle") ? 128 : 0);
    for (int half = 0; half < 2; ++half) {
        write_half(result + 16 * half, out);
        if (!PLANTED("no-fence-before-tma-store")) hw::fence_proxy_async();
        if (!PLANTED("no-barrier-before-tma-store")) hw::named_barrier_sync(1 + group, 128);
        if (threadIdx.x % 128 == 0) {
            hw::tma_store(p.out, out, 32 * half, kTile * group);
            if (!PLANTED("no-bulk-commit")) hw::bulk_commit();
            const bool waits = half == 0 ? !PLANTED("store-not-waited-for")
                                         : !PLANTED("return-before-store-has-read");
            if (waits) hw::bulk_wait_read<0>();
        }
        if (half == 0) hw::named_barrier_sync(1 + group, 128);
    }
}

__device__ void consume(const Params& p, Smem& smem) {
    hw::registers_increase<232>();
    const int group = threadIdx.x / 128 - 1;
    float result[kWidth / 2] = {};
    hw::mbarrier_wait(smem.full_q, 0);
    for (int tile = 0; tile * kTile < p.keys; ++tile) {
        const int stage = tile % kStages, parity = tile / kStages % 2;
        float scores[kTile / 2];
        if (!PLANTED("no-wait-for-k")) {
            hw::mbarrier_wait(smem.full_k[stage], parity ^ PLANTED("wrong-parity"));
        }
        if (!PLANTED("no-wgmma-fence")) hw::wgmma_fence();
        const int step_bytes = PLANTED("wrong-step-along-k") ? 16 : 32;
        for (int step = 0; step < kWidth / 16; ++step) {
            hw::wgmma<Element, kTile>(scores, descriptor(smem.q[group] + step * step_bytes),
                                      descriptor(smem.k[stage] + step * step_bytes), step > 0);
        }
        if (!PLANTED("no-wgmma-commit")) hw::wgmma_commit();
        if (PLANTED("k-released-early")) hw::mbarrier_arrive(smem.empty_k[stage]);
        if (PLANTED("wgmma-wait-too-lax")) {
            hw::wgmma_wait<1>();
        } else if (!PLANTED("no-wgmma-wait")) {
            hw::wgmma_wait<0>();
        }
        if (!PLANTED("no-arrival") && !PLANTED("k-released-early")) {
            hw::mbarrier_arrive(smem.empty_k[stage]);
        }
        if (PLANTED("arrives-twice")) hw::mbarrier_arrive(smem.empty_k[stage]);

        // What a lane has of 16 columns of scores is what it needs of 16 rows of v.
        unsigned int left[kTile / 16][4];
        for (int i = 0; i < kTile / 4; ++i) {
            left[i / 4][i % 4] = hw::pack2<Element>(scores[2 * i], scores[2 * i + 1]);
        }
        if (!PLANTED("no-wait-for-v")) hw::mbarrier_wait(smem.full_v[stage], parity);
        const int used = PLANTED("wrong-stage-of-v") ? (stage + 1) % kStages : stage;
        hw::wgmma_fence();
        for (int step = 0; step < kTile / 16; ++step) {
            hw::wgmma<Element, kWidth, true>(
                result, left[step], descriptor(smem.v[used] + step * 16 * kRowBytes), true);
        }
        hw::wgmma_commit();
        if (PLANTED("registers-of-a-changed")) left[1][2] = 0;
        if (PLANTED("accumulators-changed")) result[3] += 1.0f;
        hw::wgmma_wait<0>();
        hw::mbarrier_arrive(smem.empty_v[stage]);
    }
    store(p, smem, result);
}

extern "C" __global__ void planted_tma(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    start(p, smem);
    if (threadIdx.x < 128) {
        produce(p, smem);
    } else {
        consume(p, smem);
    }
}
