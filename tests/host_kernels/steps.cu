// SPDX-License-Identifier: Apache-2.0
// Every thread follows a list of steps of its own, which tests/test_races.py makes up.
#include "hw/mbarrier.cuh"
#include "hw/semaphore.cuh"
#include "hw/sync.cuh"

enum Step {
    kNothing,
    kRead,
    kWrite,
    kAtomic,
    kSyncThreads,
    kSyncWarp,
    kNamedSync,
    kNamedArrive,
    kMBarrierArrive,
    kMBarrierWait,
    kSemaphoreAdd,
    kSemaphoreWait
};

struct Params {
    const int* steps;  // (grid, block, count): step, place, bytes, a byte each; global: place + 64
    char* out;         // (64)
    int* semaphores;   // (64), zeros
    int count, arrivals;
};

constexpr int kBarriers = 16;

struct Smem {
    alignas(16) char bytes[64];
    hw::MBarrier barriers[kBarriers];
};

template <class T>
__device__ void touch(char* at, bool write) {
    volatile T* const pointer = reinterpret_cast<T*>(at);
    if (write) {
        *pointer = T(1);
    } else {
        (void)*pointer;
    }
}

__device__ void touch_bytes(char* at, int bytes, bool write) {
    switch (bytes) {
        case 1:
            return touch<char>(at, write);
        case 2:
            return touch<short>(at, write);
        case 4:
            return touch<int>(at, write);
        case 8:
            return touch<long long>(at, write);
        default:
            using Four = hw::Vec<int, 4>;
            Four four = {};
            if (write) {
                *reinterpret_cast<Four*>(at) = four;
            } else {
                four = *reinterpret_cast<Four*>(at);
                volatile int used = four.v[0] + four.v[1] + four.v[2] + four.v[3];
                (void)used;
            }
    }
}

extern "C" __global__ void steps(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    if (threadIdx.x == 0) {
        for (char& byte : smem.bytes) byte = 0;
        for (hw::MBarrier& barrier : smem.barriers) hw::mbarrier_init(barrier, p.arrivals);
    }
    __syncthreads();
    const int* const mine = p.steps + (blockIdx.x * blockDim.x + threadIdx.x) * p.count;
    for (int i = 0; i < p.count; ++i) {
        const int step = hw::load(mine + i);
        const int place = step >> 8 & 0xff, bytes = step >> 16 & 0xff;
        char* const at = place < 64 ? smem.bytes + place : p.out + place - 64;
        switch (step & 0xff) {
            case kRead:
            case kWrite:
                touch_bytes(at, bytes, (step & 0xff) == kWrite);
                break;
            case kAtomic:
                atomicAdd(reinterpret_cast<int*>(at), 1);
                break;
            case kSyncThreads:
                __syncthreads();
                break;
            case kSyncWarp:
                __syncwarp();
                break;
            case kNamedSync:
                hw::named_barrier_sync(place, 64);
                break;
            case kNamedArrive:
                hw::named_barrier_arrive(place, 64);
                break;
            case kMBarrierArrive:
                hw::mbarrier_arrive(smem.barriers[place]);
                break;
            case kMBarrierWait:
                hw::mbarrier_wait(smem.barriers[place], 0);
                break;
            case kSemaphoreAdd:
                hw::semaphore_add(p.semaphores + place, 1);
                break;
            case kSemaphoreWait:
                hw::semaphore_wait(p.semaphores + place, bytes);
                break;
        }
    }
}
