// SPDX-License-Identifier: Apache-2.0
// Ways in which threads hand on what they wrote. Each is right if `bug` is 0, and otherwise lacks
// something; tests/test_races.py finds lines by the names in the comments.
#include "hw/cp_async.cuh"
#include "hw/ldmatrix.cuh"
#include "hw/mbarrier.cuh"
#include "hw/reduce.cuh"
#include "hw/semaphore.cuh"
#include "hw/sync.cuh"
#include "hw/tma.cuh"
#include "hw/wgmma.cuh"

struct Params {
    const float* x;  // (4096), read-only
    float* out;      // (4096)
    int* counter;    // (64), zeros
    int way, bug;
};

constexpr int kThreads = 128, kSteps = 4;

struct alignas(1024) Smem {
    float tile[2][kThreads];
    unsigned char bytes[256];
    alignas(1024) hw::float16 a[64 * 64];
    hw::float16 b[8 * 64];
    hw::MBarrier full[2], empty[2];
    float* pointer;
    int flag;
};

__device__ void reduction(const Params& p, Smem& smem) {
    const int thread = threadIdx.x;
    smem.tile[0][thread] = hw::load(p.x + thread);  // reduction: write
    for (int n = kThreads / 2; n > 0; n /= 2) {
        if (p.bug != 1 || n < kThreads / 2) __syncthreads();
        if (thread < n) {
            smem.tile[0][thread] += smem.tile[0][thread + n];  // reduction: read
        }
    }
    if (thread == 0) hw::store(p.out + blockIdx.x, smem.tile[0][0]);
}

__device__ void transposition(const Params& p, Smem& smem) {
    const int thread = threadIdx.x, turned = thread % 16 * 8 + thread / 16;
    for (int step = 0; step < kSteps; ++step) {
        smem.tile[0][thread] = hw::load(p.x + step * kThreads + thread);  // transposition: write
        if (p.bug != 1) __syncthreads();
        const float value = smem.tile[0][turned];  // transposition: read
        hw::store(p.out + (blockIdx.x * kSteps + step) * kThreads + thread, value);
        if (p.bug != 2) __syncthreads();
    }
}

// A shuffle brings its value, and orders nothing else.
__device__ void warps(const Params& p, Smem& smem) {
    const int thread = threadIdx.x;
    for (int step = 0; step < kSteps; ++step) {
        smem.tile[step % 2][thread] = static_cast<float>(step);  // warps: write
        if (p.bug == 1) {
            __shfl_xor_sync(0xffffffff, step, 1);
        } else {
            __syncwarp();
        }
        const float value = smem.tile[step % 2][thread ^ 1];  // warps: read
        hw::store(p.out + blockIdx.x * kThreads + thread, value);
    }
}

__device__ void named(const Params& p, Smem& smem) {
    constexpr int kFull = 1, kEmpty = 2;
    const int thread = threadIdx.x % 64;
    for (int step = 0; step < kSteps; ++step) {
        if (threadIdx.x < 64) {
            if (step > 0) {
                if (p.bug == 2) {
                    hw::named_barrier_arrive(kEmpty, kThreads);
                } else {
                    hw::named_barrier_sync(kEmpty, kThreads);
                }
            }
            smem.tile[0][thread] = static_cast<float>(step);  // named: write
            hw::named_barrier_arrive(kFull, kThreads);
        } else {
            if (p.bug == 1) {
                hw::named_barrier_arrive(kFull, kThreads);
            } else {
                hw::named_barrier_sync(kFull, kThreads);
            }
            const float value = smem.tile[0][63 - thread];  // named: read
            hw::store(p.out + blockIdx.x * 64 + thread, value);
            if (step + 1 < kSteps) hw::named_barrier_arrive(kEmpty, kThreads);
        }
    }
}

// Warp 0 loads, the others read.
__device__ void bulk_loads(const Params& p, Smem& smem) {
    const int thread = threadIdx.x;
    if (thread == 0) {
        for (int stage = 0; stage < 2; ++stage) {
            hw::mbarrier_init(smem.full[stage], 1);  // bulk loads: init
            hw::mbarrier_init(smem.empty[stage], 96);
        }
        hw::fence_mbarrier_init();
    }
    if (p.bug == 4) {
        if (thread >= 32) hw::named_barrier_sync(1, 96);
    } else {
        __syncthreads();
    }
    for (int step = 0; step < 2 * kSteps; ++step) {
        const int stage = step % 2, parity = step / 2 % 2;
        if (thread == 0) {
            // That the stage was filled says nothing about those who read it.
            hw::mbarrier_wait(p.bug == 2 ? smem.full[stage] : smem.empty[stage], parity ^ 1);
            hw::mbarrier_arrive_expect_tx(smem.full[stage], sizeof(smem.tile[0]));
            hw::bulk_load(  // bulk loads: write
                smem.tile[stage], p.x + step * kThreads, sizeof(smem.tile[0]), smem.full[stage]);
        } else if (thread >= 32) {
            if (p.bug != 1 || step > 0) {
                hw::mbarrier_wait(smem.full[stage], parity);  // bulk loads: wait
            }
            if (p.bug == 3) hw::mbarrier_arrive(smem.empty[stage]);
            const float value = smem.tile[stage][thread];  // bulk loads: read
            if (p.bug != 3) hw::mbarrier_arrive(smem.empty[stage]);
            hw::store(p.out + blockIdx.x * kThreads + thread, value);
        }
    }
}

__device__ void double_buffer(const Params& p, Smem& smem) {
    const int thread = threadIdx.x;
    const auto copy = [&](int step) {
        hw::cp_async<4>(  // double buffer: copy
            &smem.tile[step % 2][thread], p.x + step * kThreads + thread, true);
        hw::cp_async_commit();
    };
    copy(0);
    for (int step = 0; step < kSteps; ++step) {
        if (step + 1 < kSteps) copy(step + 1);
        if (step + 1 < kSteps || p.bug == 1) {
            hw::cp_async_wait<1>();
        } else {
            hw::cp_async_wait<0>();
        }
        if (p.bug != 2) __syncthreads();
        const float value = smem.tile[step % 2][kThreads - 1 - thread];  // double buffer: read
        hw::store(p.out + (blockIdx.x * kSteps + step) * kThreads + thread, value);
        if (p.bug != 3) __syncthreads();
    }
}

// A by stmatrix, B by plain stores; both are replaced when the product is done.
__device__ void product(const Params& p, Smem& smem) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const hw::float16 one = hw::from_float<hw::float16>(1.0f);
    const unsigned int ones = hw::pack2<hw::float16>(1.0f, 1.0f);
    const unsigned int registers[4] = {ones, ones, ones, ones};
    for (int step = 0; step < 2; ++step) {
        for (int column = 0; column < 64; column += 16) {
            hw::stmatrix(smem.a + (warp * 16 + lane % 16) * 64 + column + lane / 16 * 8, registers);
        }
        if (p.bug == 2) hw::fence_proxy_async();
        for (int i = thread; i < 8 * 64; i += kThreads) {
            smem.b[i] = one;  // product: write
        }
        if (p.bug != 2) hw::fence_proxy_async();
        if (p.bug != 1) __syncthreads();
        float d[4];
        hw::wgmma_fence();
        for (int k = 0; k < 64; k += 16) {
            const unsigned long long b =
                hw::wgmma_descriptor(smem.b + k, 16, 1024, hw::Swizzle::k128);
            hw::wgmma<hw::float16, 8>(  // product: read
                d, hw::wgmma_descriptor(smem.a + k, 16, 1024, hw::Swizzle::k128), b, k > 0);
        }
        hw::wgmma_commit();
        if (p.bug == 3) smem.b[thread] = one;  // product: early
        hw::wgmma_wait<0>();
        if (p.bug != 4) __syncthreads();
        hw::store(p.out + blockIdx.x * kThreads + thread, d[0]);
    }
}

// Block i adds what block i - 1 left.
__device__ void in_turn(const Params& p, Smem&) {
    const int block = blockIdx.x, wanted = block - (p.bug == 1);
    if (threadIdx.x == 0) hw::semaphore_wait(p.counter, wanted);
    if (p.bug != 2) __syncthreads();
    const float sum = hw::load(p.out + threadIdx.x);  // in turn: read
    hw::store(p.out + threadIdx.x, sum + 1.0f);       // in turn: write
    if (p.bug != 3) __syncthreads();
    if (threadIdx.x == 0) hw::semaphore_add(p.counter, 1);
}

// The block that comes last adds the others' results.
__device__ void last_block(const Params& p, Smem& smem) {
    const int thread = threadIdx.x;
    hw::store(p.out + blockIdx.x * kThreads + thread, 1.0f);  // last block: write
    __syncthreads();
    if (thread == 0) {
        if (p.bug != 1) __threadfence();
        smem.tile[0][0] = static_cast<float>(atomicAdd(p.counter, 1));
        if (p.bug != 2) __threadfence();
    }
    __syncthreads();
    if (smem.tile[0][0] != static_cast<float>(gridDim.x - 1)) return;
    float sum = 0.0f;
    for (unsigned int block = 0; block < gridDim.x; ++block) {
        sum += hw::load(p.out + block * kThreads + thread);  // last block: read
    }
    hw::store(p.out + gridDim.x * kThreads + thread, sum);
}

__device__ void bulk_stores(const Params& p, Smem& smem) {
    const int thread = threadIdx.x;
    float* const mine = p.out + blockIdx.x * kThreads;
    for (int step = 0; step < kSteps; ++step) {
        smem.tile[0][thread] = static_cast<float>(step);  // bulk stores: fill
        hw::fence_proxy_async();
        __syncthreads();
        if (thread == 0) {
            hw::bulk_store(mine, smem.tile[0], sizeof(smem.tile[0]));  // bulk stores: copy
            hw::bulk_commit();
            if (p.bug == 1) {
                hw::bulk_wait_read<1>();
            } else if (p.bug == 2 || (p.bug == 3 && step == kSteps - 1)) {
                hw::bulk_wait_read<0>();
            } else {
                hw::bulk_wait<0>();
            }
        }
        __syncthreads();
    }
    if (thread == 0) hw::bulk_wait_read<0>();
    if (p.bug != 1) hw::store(mine + thread, hw::load(mine + thread));  // bulk stores: global
}

__device__ void blocks(const Params& p, Smem&) {
    const int first = p.bug == 1 ? 0 : blockIdx.x * kThreads;
    hw::store(p.out + first + threadIdx.x, 1.0f);  // blocks
}

__device__ void atomics(const Params& p, Smem& smem) {
    if (threadIdx.x == 0) smem.tile[0][0] = 0.0f;
    __syncthreads();
    atomicAdd(&smem.tile[0][0], 1.0f);
    hw::reduce_add(p.out, 1.0f);
    const float four[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    hw::reduce_add(p.out, four);  // atomics: add
    if (p.bug == 1 && threadIdx.x == 70) {
        hw::store(p.out + 2, 1.0f);  // atomics: write
    } else if (p.bug == 2 && threadIdx.x == 70) {
        hw::store(p.out + 9, hw::load(p.out + 2));  // atomics: read
    }
    __syncthreads();
    if (threadIdx.x == 0) hw::store(p.out + 16 + blockIdx.x, smem.tile[0][0]);
}

// Neighbours are nobody's business.
__device__ void bytes(const Params& p, Smem& smem) {
    const int thread = threadIdx.x;
    if (p.bug == 1 && thread == 70) {
        *reinterpret_cast<unsigned short*>(smem.bytes + 70) = 1;  // bytes: two
    } else {
        smem.bytes[thread] = 1;  // bytes: one
    }
    __syncthreads();
    const auto four =
        *reinterpret_cast<const hw::Vec<unsigned int, 4>*>(smem.bytes + thread / 16 * 16);
    if (thread == 0) hw::store(p.counter + blockIdx.x, static_cast<int>(four.v[0]));
    __syncthreads();
    smem.bytes[127 - thread] = 2;
}

// Of sizes that compilers expand, and of one that they do not know.
__device__ void library(const Params& p, Smem& smem) {
    const int thread = threadIdx.x;
    const float four[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    if (thread < 32) memset(smem.tile[0] + 4 * thread, 0, 16);  // library: set
    if (p.bug != 1) __syncthreads();
    if (thread >= 96) memcpy(smem.tile[0] + 4 * (thread - 96), four, 16);  // library: copy
    if (p.bug != 2) __syncthreads();
    if (thread < 32) {
        memmove(p.out + blockIdx.x * kThreads + 4 * thread,  // library: move
                smem.tile[0] + 4 * thread, hw::load(p.counter) + 16);
    }
}

// A flag in shared memory is not that of the block before, at the same address.
__device__ void flag(const Params& p, Smem& smem) {
    float* const mine = p.out + (p.bug == 1 ? 0 : blockIdx.x);
    if (threadIdx.x == 0) {
        atomicExch(&smem.flag, 0);
        __threadfence();
        hw::store(mine, 1.0f);  // flag: write
        if (p.bug != 2) __threadfence();
        atomicExch(&smem.flag, 1);
    } else if (threadIdx.x == 64 && p.bug != 1) {
        while (atomicAdd(&smem.flag, 0) != 1) {
        }
        if (p.bug != 3) __threadfence();
        hw::store(p.out + 64 + blockIdx.x, hw::load(mine));  // flag: read
    }
}

// Constants, but for one mistake.
__device__ int kTable[4] = {1, 2, 3, 4};

// Not races.
__device__ void mistakes(const Params& p, Smem& smem) {
    const int thread = threadIdx.x;
    float mine = 0.0f;
    if (thread == 0) smem.pointer = &mine;
    __syncthreads();
    float value = 0.0f;
    switch (p.bug) {
        case 1:
            value = smem.tile[1][thread];  // mistakes: unwritten
            break;
        case 2:
            if (thread == 70) value = *smem.pointer;  // mistakes: stack
            break;
        case 3:
            if (thread == 70) value = *reinterpret_cast<float*>(&smem + 1);  // mistakes: shared
            break;
        case 4:
            if (thread == 70) value = p.out[4096];  // mistakes: global
            break;
        case 5:
            if (thread == 70) const_cast<float*>(p.x)[5] = 1.0f;  // mistakes: read-only
            break;
        case 6:
            value = static_cast<float>(kTable[thread % 4]);
            if (thread == 70) kTable[2] = 7;  // mistakes: table
            break;
    }
    hw::store(p.out + blockIdx.x * kThreads + thread, value);
    __syncthreads();
}

extern "C" __global__ void races(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    constexpr void (*kWays[])(const Params&, Smem&) = {
        reduction, transposition, warps,      named,   bulk_loads,  double_buffer,
        product,   in_turn,       last_block, blocks,  bulk_stores, atomics,
        bytes,     library,       flag,       mistakes};
    kWays[p.way](p, smem);
}
