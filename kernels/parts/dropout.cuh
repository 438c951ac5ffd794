// SPDX-License-Identifier: Apache-2.0
// The random numbers of dropout: a pure function of (seed, batch, head, query, key), so that a pair
// has the same fate in every pass, tile shape, split and GPU.
//
// Each row of scores draws two words from Philox4x32-10 (Salmon et al., "Parallel random numbers:
// as easy as 1, 2, 3", 2011); each key of the row then mixes its index with them, by the finalizer
// of MurmurHash3. A row costs about 80 instructions once, a pair 9. cuflash.reference.dropout_keep
// is the same function.
#pragma once
#include "parts/types.cuh"

namespace dropout {

struct Row {
    uint32 a, b;
};

__device__ __forceinline__ Row row(uint64 seed, int64 batch, int32 head, int32 query) {
    uint32 c0 = query, c1 = head, c2 = static_cast<uint32>(batch),
           c3 = static_cast<uint32>(batch >> 32);
    uint32 k0 = static_cast<uint32>(seed), k1 = static_cast<uint32>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32 high0 = __umulhi(0xd2511f53u, c0), low0 = 0xd2511f53u * c0;
        const uint32 high1 = __umulhi(0xcd9e8d57u, c2), low1 = 0xcd9e8d57u * c2;
        c0 = high1 ^ c1 ^ k0, c1 = low1;
        c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
    }
    return {c0, c1};
}

// Uniform in 32 bits.
__device__ __forceinline__ uint32 number(const Row& row, int32 key) {
    uint32 x = row.a + static_cast<uint32>(key) * 0x9e3779b9u;
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= row.b;
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    return x ^ x >> 16;
}

}  // namespace dropout
