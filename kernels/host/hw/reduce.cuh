// SPDX-License-Identifier: Apache-2.0
// The CPU twin of hw/reduce.cuh.
#pragma once

#include "hw/memory.cuh"

namespace hw {

template <int N>
HOST_UNWATCHED inline void reduce_add(float* global, const float (&v)[N], HOST_PLACE) {
    static_assert(N == 2 || N == 4, "red.global.add adds 1, 2 or 4 numbers");
    const host::Executor* executor = host::self().executor;
    const uintptr_t address = reinterpret_cast<uintptr_t>(global);
    const host::Place place = {"reduce_add", file, line};
    executor->find_range(host::Access::kStore, address, sizeof(v), sizeof(v), place);
    executor->yield(place);
    executor->atomic(place, global, sizeof(v));
    for (int i = 0; i < N; ++i) global[i] += v[i];
}

// Not on shared memory, which atomicAdd would take.
inline void reduce_add(float* global, float a, HOST_PLACE) {
    const host::Place place = {"reduce_add", file, line};
    const uintptr_t address = reinterpret_cast<uintptr_t>(global);
    host::self().executor->find_range(host::Access::kStore, address, sizeof(a), alignof(float),
                                      place);
    host::atomic(global, place, [=](float old) { return old + a; });
}

}  // namespace hw
