// SPDX-License-Identifier: Apache-2.0
// The CPU twin of hw/cp_async.cuh.
#pragma once

#include "hw/memory.cuh"

namespace hw {

template <int Bytes>
inline void cp_async(void* shared, const void* global, bool valid, HOST_PLACE) {
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async copies 4, 8 or 16 bytes");
    host::self().executor->cp_async({"cp_async", file, line}, shared, global, Bytes, valid);
}

inline void cp_async_commit(HOST_PLACE) {
    host::self().executor->commit({"cp_async_commit", file, line}, host::Queue::kCpAsync);
}

template <int N>
inline void cp_async_wait(HOST_PLACE) {
    static_assert(N >= 0, "a number of groups");
    host::self().executor->wait({"cp_async_wait", file, line}, host::Queue::kCpAsync, N, false);
}

}  // namespace hw
