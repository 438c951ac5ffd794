// SPDX-License-Identifier: Apache-2.0
// The CPU twin of hw/tma.cuh.
#pragma once

#include "hw/mbarrier.cuh"
#include "hw/memory.cuh"

namespace hw {

// TensorMap.encode_cpu of cuflash/tensormap.py fills it.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

enum class CacheHint { kNone, kEvictFirst, kEvictLast };

// An argument together with the place of the call: where other arguments may follow in any number,
// the place cannot be one of its own.
template <class T>
struct Placed {
    T& value;
    const char* file;
    int line;

    Placed(T& argument, const char* of_file = __builtin_FILE(), int of_line = __builtin_LINE())
        : value(argument), file(of_file), line(of_line) {}
};

template <class... C>
inline host::BulkCopy box_copy(host::BulkCopy::Kind kind,
                               const void* shared,
                               const TensorMap& map,
                               C... coordinates) {
    static_assert(sizeof...(C) >= 1 && sizeof...(C) <= 5, "a tensor has 1 to 5 dimensions");
    return {kind,         const_cast<void*>(shared), nullptr, 0, map.bytes,
            sizeof...(C), {coordinates...},          nullptr};
}

template <CacheHint Hint = CacheHint::kNone, class... C>
inline void tma_load(void* shared,
                     const TensorMap& map,
                     Placed<MBarrier> barrier,
                     C... coordinates) {
    host::BulkCopy copy = box_copy(host::BulkCopy::kLoad, shared, map, coordinates...);
    copy.barrier = &barrier.value;
    host::self().executor->bulk_copy({"tma_load", barrier.file, barrier.line}, copy);
}

template <class... C>
inline void tma_store(Placed<const TensorMap> map, const void* shared, C... coordinates) {
    host::self().executor->bulk_copy(
        {"tma_store", map.file, map.line},
        box_copy(host::BulkCopy::kStore, shared, map.value, coordinates...));
}

template <class... C>
inline void tma_reduce_add(Placed<const TensorMap> map, const void* shared, C... coordinates) {
    host::self().executor->bulk_copy(
        {"tma_reduce_add", map.file, map.line},
        box_copy(host::BulkCopy::kAdd, shared, map.value, coordinates...));
}

inline host::BulkCopy stretch(host::BulkCopy::Kind kind,
                              const void* shared,
                              const void* global,
                              int bytes,
                              MBarrier* barrier) {
    return {kind,   const_cast<void*>(shared), const_cast<void*>(global), bytes, nullptr, 0, {},
            barrier};
}

inline void bulk_load(void* shared, const void* global, int bytes, MBarrier& barrier, HOST_PLACE) {
    host::self().executor->bulk_copy(
        {"bulk_load", file, line}, stretch(host::BulkCopy::kLoad, shared, global, bytes, &barrier));
}

inline void bulk_store(void* global, const void* shared, int bytes, HOST_PLACE) {
    host::self().executor->bulk_copy(
        {"bulk_store", file, line},
        stretch(host::BulkCopy::kStore, shared, global, bytes, nullptr));
}

inline void bulk_reduce_add(float* global, const float* shared, int bytes, HOST_PLACE) {
    host::self().executor->bulk_copy({"bulk_reduce_add", file, line},
                                     stretch(host::BulkCopy::kAdd, shared, global, bytes, nullptr));
}

inline void bulk_commit(HOST_PLACE) {
    host::self().executor->commit({"bulk_commit", file, line}, host::Queue::kBulk);
}

template <int N>
inline void bulk_wait_read(HOST_PLACE) {
    static_assert(N >= 0, "a number of groups");
    host::self().executor->wait({"bulk_wait_read", file, line}, host::Queue::kBulk, N, true);
}

template <int N>
inline void bulk_wait(HOST_PLACE) {
    static_assert(N >= 0, "a number of groups");
    host::self().executor->wait({"bulk_wait", file, line}, host::Queue::kBulk, N, false);
}

inline void prefetch(const TensorMap&) {}

}  // namespace hw
