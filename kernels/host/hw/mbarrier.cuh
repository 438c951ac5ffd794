// SPDX-License-Identifier: Apache-2.0
// The CPU twin of hw/mbarrier.cuh. The state of the object lies in the executor.
#pragma once

#include "hw/memory.cuh"

namespace hw {

struct MBarrier {
    unsigned long long word;
};

inline void mbarrier_init(MBarrier& b, int arrivals, HOST_PLACE) {
    host::self().executor->mbarrier_init({"mbarrier_init", file, line}, &b, arrivals);
}

inline void fence_mbarrier_init(HOST_PLACE) {
    host::self().executor->fence_mbarrier_init({"fence_mbarrier_init", file, line});
}

inline void mbarrier_arrive(MBarrier& b, HOST_PLACE) {
    host::self().executor->mbarrier_arrive({"mbarrier_arrive", file, line}, &b, 0);
}

inline void mbarrier_arrive_expect_tx(MBarrier& b, int bytes, HOST_PLACE) {
    host::self().executor->mbarrier_arrive({"mbarrier_arrive_expect_tx", file, line}, &b, bytes);
}

inline void mbarrier_wait(MBarrier& b, int parity, HOST_PLACE) {
    host::self().executor->mbarrier_wait({"mbarrier_wait", file, line}, &b, parity);
}

}  // namespace hw
