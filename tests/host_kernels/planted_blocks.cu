// SPDX-License-Identifier: Apache-2.0
// sum += x[block], in the order of blocks, which take turns by a semaphore; with faults. The first
// half of each row is stored by all threads, the second half by a bulk copy.
#include "hw/memory.cuh"
#include "hw/semaphore.cuh"
#include "hw/sync.cuh"
#include "hw/tma.cuh"
#include "planted.cuh"

constexpr int kThreads = 64;

struct Params {
    const float* x;  // (blocks, 2, kThreads)
    float* sum;      // (2, kThreads)
    int* turn;       // 0
    unsigned int fault;
};

struct Smem {
    alignas(16) float row[kThreads];
};

extern "C" __global__ void planted_blocks(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int block = blockIdx.x, thread = threadIdx.x;
    const float* const x = p.x + block * 2 * kThreads + thread;
    if (thread == 0 && !PLANTED("no-semaphore-wait")) {
        hw::semaphore_wait(p.turn, block + PLANTED("wrong-turn"));
    }
    if (!PLANTED("no-barrier-after-semaphore-wait")) __syncthreads();

    float* const sum = p.sum + thread;
    const float first = hw::load(sum) + hw::load(x);
    smem.row[thread] = hw::load(sum + kThreads) + hw::load(x + kThreads);
    hw::fence_proxy_async();
    if (!PLANTED("no-barrier-before-bulk-store")) __syncthreads();
    if (thread == 0) {
        const int skew = PLANTED("bulk-past-the-end") ? 4 : PLANTED("misaligned-bulk") ? -1 : 0;
        hw::bulk_store(p.sum + kThreads + skew, smem.row, sizeof(smem.row));
        hw::bulk_commit();
        if (PLANTED("only-reads-waited-for")) {
            hw::bulk_wait_read<0>();
        } else {
            hw::bulk_wait<0>();
        }
    }
    hw::store(sum, first);
    if (!PLANTED("no-barrier-before-semaphore-add")) __syncthreads();
    if (thread == 0 && !PLANTED("no-semaphore-add")) hw::semaphore_add(p.turn, 1);
}
