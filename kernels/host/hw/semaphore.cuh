// SPDX-License-Identifier: Apache-2.0
// The CPU twin of hw/semaphore.cuh.
#pragma once

namespace hw {

inline void semaphore_wait(const int* counter, int at_least, HOST_PLACE) {
    host::self().executor->semaphore_wait({"semaphore_wait", file, line}, counter, at_least);
}

inline void semaphore_add(int* counter, int value, HOST_PLACE) {
    host::self().executor->semaphore_add({"semaphore_add", file, line}, counter, value);
}

}  // namespace hw
