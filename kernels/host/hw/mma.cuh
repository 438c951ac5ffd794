// SPDX-License-Identifier: Apache-2.0
// The CPU twin of hw/mma.cuh.
#pragma once

#include "hw/convert.cuh"

namespace hw {

template <class T>
inline void mma_m16n8k16(float (&d)[4],
                         const unsigned int (&a)[4],
                         const unsigned int (&b)[2],
                         HOST_PLACE) {
    host::self().executor->mma({"mma_m16n8k16", file, line}, d, a, b, kElement<T>);
}

}  // namespace hw
