// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies by the TMA unit, since sm_90: boxes of tensors, and plain runs of bytes.
// Loads report their bytes to an MBarrier; stores and reductions are put into groups by the thread
// that starts them. What threads wrote to shared memory needs fence_proxy_async before a store
// reads it.
#pragma once

#include "hw/mbarrier.cuh"
#include "hw/memory.cuh"

namespace hw {

// What the driver makes (cuTensorMapEncodeTiled): where a tensor is, its shape, the box that is
// copied. To be a __grid_constant__ parameter of the kernel.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

// How long the L2 cache should keep what is read. The policies are what createpolicy.fractional
// makes of 1.0, here as constants.
enum class CacheHint { kNone, kEvictFirst, kEvictLast };

template <CacheHint Hint>
constexpr unsigned long long kCachePolicy =
    Hint == CacheHint::kEvictFirst ? 0x12f0000000000000 : 0x14f0000000000000;

// The operand "[map, {coordinates}]", where %0 to %4 are the coordinates and %5 is the map.
#define HW_TMA_BOX_1 "[%5, {%0}]"
#define HW_TMA_BOX_2 "[%5, {%0, %1}]"
#define HW_TMA_BOX_3 "[%5, {%0, %1, %2}]"
#define HW_TMA_BOX_4 "[%5, {%0, %1, %2, %3}]"
#define HW_TMA_BOX_5 "[%5, {%0, %1, %2, %3, %4}]"

// For the rank of the tensor, the instruction `ISSUE(rank, box)`; the operands that no rank below 5
// names cost nothing.
#define HW_TMA_OF_RANK(ISSUE)                                                                \
    static_assert(sizeof...(C) >= 1 && sizeof...(C) <= 5, "a tensor has 1 to 5 dimensions"); \
    const int c[5] = {coordinates...};                                                       \
    if constexpr (sizeof...(C) == 1) ISSUE("1d", HW_TMA_BOX_1);                              \
    if constexpr (sizeof...(C) == 2) ISSUE("2d", HW_TMA_BOX_2);                              \
    if constexpr (sizeof...(C) == 3) ISSUE("3d", HW_TMA_BOX_3);                              \
    if constexpr (sizeof...(C) == 4) ISSUE("4d", HW_TMA_BOX_4);                              \
    if constexpr (sizeof...(C) == 5) ISSUE("5d", HW_TMA_BOX_5)
#define HW_TMA_COORDINATES "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4])

// Loads the box at the coordinates, the innermost first; what lies outside of the tensor is zero.
// The barrier receives the bytes of the full box. A tensor of one axis must be swizzled, here and
// below (an H200 knows no other). PTX ISA, cp.async.bulk.tensor; one thread.
template <CacheHint Hint = CacheHint::kNone, class... C>
__device__ __forceinline__ void tma_load(void* shared,
                                         const TensorMap& map,
                                         MBarrier& barrier,
                                         C... coordinates) {
    const unsigned int to = shared_address(shared), done = shared_address(&barrier);
    // clang-format off
#define HW_TMA_LOAD(rank, box)                                                                \
    asm volatile("cp.async.bulk.tensor." rank                                                 \
                 ".shared::cluster.global.tile.mbarrier::complete_tx::bytes [%6], " box ", [%7];" \
                 : : HW_TMA_COORDINATES, "l"(&map), "r"(to), "r"(done) : "memory")
#define HW_TMA_LOAD_HINT(rank, box)                                                           \
    asm volatile("cp.async.bulk.tensor." rank                                                 \
                 ".shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "  \
                 "[%6], " box ", [%7], %8;"                                                   \
                 : : HW_TMA_COORDINATES, "l"(&map), "r"(to), "r"(done),                       \
                     "l"(kCachePolicy<Hint>) : "memory")
    // clang-format on
    if constexpr (Hint == CacheHint::kNone) {
        HW_TMA_OF_RANK(HW_TMA_LOAD);
    } else {
        HW_TMA_OF_RANK(HW_TMA_LOAD_HINT);
    }
#undef HW_TMA_LOAD
#undef HW_TMA_LOAD_HINT
}

// Stores the box; what lies behind the ends of the tensor is left out. No coordinate may be
// negative. PTX ISA, cp.async.bulk.tensor; one thread.
template <class... C>
__device__ __forceinline__ void tma_store(const TensorMap& map,
                                          const void* shared,
                                          C... coordinates) {
    const unsigned int from = shared_address(shared);
    // clang-format off
#define HW_TMA_STORE(rank, box)                                                                   \
    asm volatile("cp.async.bulk.tensor." rank ".global.shared::cta.tile.bulk_group " box ", [%6];" \
                 : : HW_TMA_COORDINATES, "l"(&map), "r"(from) : "memory")
    // clang-format on
    HW_TMA_OF_RANK(HW_TMA_STORE);
#undef HW_TMA_STORE
}

// Adds the box to the tensor, in the tensor's type. No coordinate may be negative. PTX ISA,
// cp.reduce.async.bulk.tensor; one thread.
template <class... C>
__device__ __forceinline__ void tma_reduce_add(const TensorMap& map,
                                               const void* shared,
                                               C... coordinates) {
    const unsigned int from = shared_address(shared);
    // clang-format off
#define HW_TMA_REDUCE(rank, box)                                                               \
    asm volatile("cp.reduce.async.bulk.tensor." rank ".global.shared::cta.add.tile.bulk_group " \
                 box ", [%6];"                                                                 \
                 : : HW_TMA_COORDINATES, "l"(&map), "r"(from) : "memory")
    // clang-format on
    HW_TMA_OF_RANK(HW_TMA_REDUCE);
#undef HW_TMA_REDUCE
}

#undef HW_TMA_COORDINATES
#undef HW_TMA_OF_RANK
#undef HW_TMA_BOX_1
#undef HW_TMA_BOX_2
#undef HW_TMA_BOX_3
#undef HW_TMA_BOX_4
#undef HW_TMA_BOX_5

// Loads bytes: addresses and number are multiples of 16. PTX ISA, cp.async.bulk; one thread.
__device__ __forceinline__ void bulk_load(void* shared,
                                          const void* global,
                                          int bytes,
                                          MBarrier& barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(&barrier))
        : "memory");
}

// Stores bytes: addresses and number are multiples of 16. PTX ISA, cp.async.bulk; one thread.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

// Adds elements to global memory: addresses and bytes are multiples of 16. PTX ISA,
// cp.reduce.async.bulk; one thread.
__device__ __forceinline__ void bulk_reduce_add(float* global, const float* shared, int bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
        "r"(shared_address(shared)), "r"(bytes)
        : "memory");
}

// The thread's stores and reductions since the last call are a group. PTX ISA,
// cp.async.bulk.commit_group; the thread that started them.
__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the N latest groups have read shared memory, which may then be written. PTX
// ISA, cp.async.bulk.wait_group.read; the thread that started them.
template <int N>
__device__ __forceinline__ void bulk_wait_read() {
    static_assert(N >= 0, "a number of groups");
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Waits until all but the N latest groups are complete and the thread sees what they wrote. PTX
// ISA, cp.async.bulk.wait_group; the thread that started them.
template <int N>
__device__ __forceinline__ void bulk_wait() {
    static_assert(N >= 0, "a number of groups");
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// Fetches the map itself, ahead of its first use. PTX ISA, prefetch.tensormap; one thread.
__device__ __forceinline__ void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}  // namespace hw
