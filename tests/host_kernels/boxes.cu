// SPDX-License-Identifier: Apache-2.0
// One copy of the TMA unit, to or from an image of shared memory.
#include "hw/sync.cuh"
#include "hw/tma.cuh"

enum class Op { kTmaLoad, kTmaStore, kTmaReduceAdd, kBulkLoad, kBulkStore, kBulkReduceAdd };

struct Params {
    hw::TensorMap map;
    unsigned int* image;    // (words), shared memory before and after
    unsigned char* global;  // of bulk copies
    int words;
    Op op;
    int offset;  // in shared memory, in bytes
    int bytes;   // of bulk copies, or of the box
    int hint;
    int rank, at[5];
};

struct Smem {
    alignas(1024) hw::MBarrier done;
    alignas(1024) unsigned char bytes[1];  // and as many more as the launch has room for
};

template <hw::CacheHint Hint>
__device__ void load_box(const Params& p, unsigned char* to, hw::MBarrier& done) {
    const int* const c = p.at;
    switch (p.rank) {
        case 1:
            return hw::tma_load<Hint>(to, p.map, done, c[0]);
        case 2:
            return hw::tma_load<Hint>(to, p.map, done, c[0], c[1]);
        case 3:
            return hw::tma_load<Hint>(to, p.map, done, c[0], c[1], c[2]);
        case 4:
            return hw::tma_load<Hint>(to, p.map, done, c[0], c[1], c[2], c[3]);
        default:
            return hw::tma_load<Hint>(to, p.map, done, c[0], c[1], c[2], c[3], c[4]);
    }
}

__device__ void store_box(const Params& p, const unsigned char* from) {
    const int* const c = p.at;
    switch (p.rank) {
        case 1:
            return hw::tma_store(p.map, from, c[0]);
        case 2:
            return hw::tma_store(p.map, from, c[0], c[1]);
        case 3:
            return hw::tma_store(p.map, from, c[0], c[1], c[2]);
        case 4:
            return hw::tma_store(p.map, from, c[0], c[1], c[2], c[3]);
        default:
            return hw::tma_store(p.map, from, c[0], c[1], c[2], c[3], c[4]);
    }
}

__device__ void add_box(const Params& p, const unsigned char* from) {
    const int* const c = p.at;
    switch (p.rank) {
        case 1:
            return hw::tma_reduce_add(p.map, from, c[0]);
        case 2:
            return hw::tma_reduce_add(p.map, from, c[0], c[1]);
        case 3:
            return hw::tma_reduce_add(p.map, from, c[0], c[1], c[2]);
        case 4:
            return hw::tma_reduce_add(p.map, from, c[0], c[1], c[2], c[3]);
        default:
            return hw::tma_reduce_add(p.map, from, c[0], c[1], c[2], c[3], c[4]);
    }
}

__device__ void copy(const Params& p, unsigned char* shared, hw::MBarrier& done) {
    switch (p.op) {
        case Op::kTmaLoad:
            if (p.hint == 0) return load_box<hw::CacheHint::kNone>(p, shared, done);
            if (p.hint == 1) return load_box<hw::CacheHint::kEvictFirst>(p, shared, done);
            return load_box<hw::CacheHint::kEvictLast>(p, shared, done);
        case Op::kTmaStore:
            return store_box(p, shared);
        case Op::kTmaReduceAdd:
            return add_box(p, shared);
        case Op::kBulkLoad:
            return hw::bulk_load(shared, p.global, p.bytes, done);
        case Op::kBulkStore:
            return hw::bulk_store(p.global, shared, p.bytes);
        case Op::kBulkReduceAdd:
            return hw::bulk_reduce_add(reinterpret_cast<float*>(p.global),
                                       reinterpret_cast<const float*>(shared), p.bytes);
    }
}

extern "C" __global__ void boxes(const __grid_constant__ Params p) {
    Smem& smem = hw::shared_memory<Smem>();
    unsigned int* const words = reinterpret_cast<unsigned int*>(smem.bytes);
    for (int i = threadIdx.x; i < p.words; i += blockDim.x) words[i] = hw::load(p.image + i);
    const bool load = p.op == Op::kTmaLoad || p.op == Op::kBulkLoad;
    if (threadIdx.x == 0) {
        hw::prefetch(p.map);
        hw::mbarrier_init(smem.done, 1);
        hw::fence_mbarrier_init();
    }
    hw::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        if (load) hw::mbarrier_arrive_expect_tx(smem.done, p.bytes);
        copy(p, reinterpret_cast<unsigned char*>(words) + p.offset, smem.done);
        if (!load) {
            hw::bulk_commit();
            hw::bulk_wait_read<0>();
        }
    }
    if (load) hw::mbarrier_wait(smem.done, 0);
    __syncthreads();
    for (int i = threadIdx.x; i < p.words; i += blockDim.x) hw::store(p.image + i, words[i]);
}
