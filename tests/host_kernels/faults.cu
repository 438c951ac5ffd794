// SPDX-License-Identifier: Apache-2.0
// One mistake each; tests/test_host.py finds a mistake's line by its name in the comment.
#include "hw/memory.cuh"

struct Params {
    const float* x;  // (n), read-only
    float* out;      // (n)
    int n, fault;
};

struct Smem {
    float first[64];
    float last[64];
};

// Deep enough to leave any stack; what is done with the array keeps it from being optimised away.
__device__ __attribute__((noinline)) float descend(volatile float* above, int depth) {
    volatile float here[64];
    here[depth % 64] = above[depth % 64] + 1.0f;
    return depth == 0 ? here[0] : descend(here, depth - 1) + here[depth % 64];
}

__device__ __attribute__((noinline)) float large_frame(int index) {
    volatile float here[100000];
    here[index] = 1.0f;
    return here[index];
}

extern "C" __global__ void faults(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int thread = threadIdx.x, lane = thread % 32;
    float value = static_cast<float>(thread);
    smem.first[thread % 64] = value;
    switch (p.fault) {
        case 1:
            if (thread < 32) {
                __syncthreads();  // divergent: one side
            } else {
                __syncthreads();  // divergent: other side
            }
            break;
        case 2:
            if (thread >= 64) return;
            __syncthreads();  // early return
            break;
        case 3:
            value = __shfl_xor_sync(0xffffff0f, value, 1);  // wrong mask
            break;
        case 4:
            if (thread < 16) {
                value = __shfl_xor_sync(0xffffffff, value, 1);  // missing lanes
            }
            __syncthreads();  // missing lanes: the rest
            break;
        case 5:
            value = hw::load(p.x + p.n * (thread == 70));  // read past
            break;
        case 6:
            value = hw::load(p.x - (thread == 70));  // read before
            break;
        case 7:
            hw::store(p.out + p.n * (thread == 70), value);  // write past
            break;
        case 8:
            hw::store(const_cast<float*>(p.x) + thread, value);  // read-only
            break;
        case 9:
            value =
                hw::load(reinterpret_cast<const hw::Vec<float, 2>*>(p.x + 1)).v[0];  // misaligned
            break;
        case 10:
            value = smem.first[63 + (thread == 70)];  // inner index
            break;
        case 11:
            value = smem.last[63 + (thread == 70)];  // last index
            break;
        case 12:
            value = (&smem + 1)->first[3];  // shared end
            break;
        case 13:
            value = (&smem - 100)->first[0];  // shared begin
            break;
        case 14:
            value = descend(smem.first, 100000);  // stack
            break;
        case 15:
            value = large_frame(p.n);  // frame
            break;
        case 16:
            value = *reinterpret_cast<volatile float*>(p.n * 4ll);  // plain pointer
            break;
        case 17:
            value = static_cast<float>(thread / (p.n - 128));  // division
            break;
        case 18:
            atomicAdd(p.out + p.n, 1.0f);  // atomic past
            break;
        case 19:
            value = __shfl_sync(0xffffffff, value, 0) + hw::load(&p.x[p.n + 500]);  // far
            break;
        case 20:
            value = reinterpret_cast<hw::Vec<float, 4>*>(smem.first + 1)->v[lane % 4];  // vector
            break;
        case 21:
            while (thread < 96 && atomicAdd(p.out, 0.0f) == 0.0f) {  // spin
            }
            __syncthreads();  // spin: the rest
            break;
        case 22:
            reinterpret_cast<volatile char*>(&smem)[600] = 1;  // the launch has 600 bytes
            break;
    }
    hw::store(p.out + thread, value);
}
