// SPDX-License-Identifier: Apache-2.0
// The CPU twin of hw/memory.cuh: the same names, and every access to global memory is checked.
// A load or store must lie inside one of the launch's arrays and be aligned to its type, or the
// launch ends with a report of where it was made.
#pragma once

namespace hw {

template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
    T v[N];
};

template <class Struct>
inline Struct& shared_memory() {
    host::Thread& thread = host::self();
    if (sizeof(Struct) > thread.shared_bytes ||
        reinterpret_cast<uintptr_t>(thread.shared) % alignof(Struct) != 0) {
        thread.executor->shared_memory_too_small(sizeof(Struct), alignof(Struct));
    }
    return *reinterpret_cast<Struct*>(thread.shared);
}

// A thread mostly stays in the array of its previous access, which is looked at first.
template <class T>
HOST_UNWATCHED inline void check(host::Access access, const T* p, host::Place place) {
    host::Thread& thread = host::self();
    const host::Range*& recent = thread.recent[static_cast<int>(access)];
    const uintptr_t address = reinterpret_cast<uintptr_t>(p);
    if (address < recent->low || address > recent->high || recent->high - address < sizeof(T) ||
        address % alignof(T) != 0) {
        recent = thread.executor->find_range(access, address, sizeof(T), alignof(T), place);
    }
}

template <class T>
inline T load(const T* p, HOST_PLACE) {
    check(host::Access::kLoad, p, {"hw::load", file, line});
    return *p;
}

template <class T>
inline void store(T* p, T value, HOST_PLACE) {
    check(host::Access::kStore, p, {"hw::store", file, line});
    *p = value;
}

}  // namespace hw
