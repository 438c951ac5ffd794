// SPDX-License-Identifier: Apache-2.0
// The CPU twin of hw/ldmatrix.cuh.
#pragma once

#include "hw/memory.cuh"

namespace hw {

template <bool Trans = false, int N>
inline void ldmatrix(unsigned int (&r)[N], const void* row, int offset = 0, HOST_PLACE) {
    static_assert(N == 1 || N == 2 || N == 4, "ldmatrix loads 1, 2 or 4 matrices");
    row = static_cast<const char*>(row) + offset;
    host::self().executor->ldmatrix({"ldmatrix", file, line}, r, row, N, Trans);
}

template <bool Trans = false, int N>
inline void stmatrix(void* row, const unsigned int (&r)[N], HOST_PLACE) {
    static_assert(N == 1 || N == 2 || N == 4, "stmatrix stores 1, 2 or 4 matrices");
    host::self().executor->stmatrix({"stmatrix", file, line}, row, r, N, Trans);
}

}  // namespace hw
