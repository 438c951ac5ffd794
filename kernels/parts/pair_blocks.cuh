// SPDX-License-Identifier: Apache-2.0
// What bias and mask hold for the pairs of a warp whose scores are transposed (transposed.cuh), by
// way of shared memory: brought there ahead, whatever their strides, and read as fragments hold
// scores.
//
// A warp has 16 keys and kQueries queries, and of shared memory a block of 512 bytes for each 16
// queries: 16 rows of two pieces of 16 bytes. Only the warp itself uses them, so that no barrier is
// needed. The kernel says where they lie: place.at(block, row, piece).
//     mask           a piece is the keys of a query
//     16-bit bias    a row is the keys of a query
//     float32 bias   two rows are; there is room for one half of the queries, then for the other
#pragma once
#include "hw/cp_async.cuh"
#include "hw/ldmatrix.cuh"
#include "parts/columns.cuh"
#include "parts/pipeline.cuh"
#include "parts/score.cuh"

namespace pair_blocks {

constexpr uint32 kKeys = 16, kRows = 16;

// Not known to be the same as elsewhere, so that no address is kept in a register for long.
__device__ __forceinline__ uint32 lane() {
    return hw::forget(static_cast<uint32>(fragment::lane()));
}

// --- To shared memory ----------------------------------------------------------------------------

// All of these start to bring the elements T of kQueries queries from `query` on, and of the keys
// from `key` on, a multiple of 16; to(query, piece) is where they go, of queries counted from 0. An
// index past the end of the array, which nobody asks about, is the last one here. All lanes.

// By kPiece bytes.
template <class T, uint32 kPiece, uint32 kQueries, class To>
__device__ __forceinline__ void copy_pieces(const Pairs& x, int32 query, int32 key, const To& to) {
    constexpr uint32 kPieces = kKeys * sizeof(T) / kPiece;  // of a query
    const uint32 thread = lane(), first = thread / kPieces, offset = thread % kPieces * kPiece;
    const unsigned char* const from = x.data + (int64{key} * static_cast<int>(sizeof(T)) + offset);
#pragma unroll(kPiece == 16 ? kPieces * kQueries / 32 : 2)
    for (uint32 q = 0; q < kQueries; q += 32 / kPieces) {
        const int32 row = min(query + static_cast<int32>(first + q), x.last_query);
        auto* const place = static_cast<unsigned char*>(to(first + q, offset / 16));
        hw::cp_async<kPiece>(place + offset % 16,
                             from + row * x.stride_query * static_cast<int>(sizeof(T)), true);
    }
}

// One after the other, of any strides; those of 4 bytes need not wait for one another.
template <class T, uint32 kQueries, class To>
__device__ __forceinline__ void copy_elements(const Pairs& x,
                                              int32 query,
                                              int32 key,
                                              const To& to) {
    constexpr bool kAsync = sizeof(T) == 4;
    constexpr uint32 kAtOnce = kAsync ? 2 : 8, kOfPiece = 16 / sizeof(T);
    const uint32 thread = lane(), k = thread % kKeys;
    const T* const from = reinterpret_cast<const T*>(x.data) +
                          min(key + static_cast<int32>(k), x.last_key) * x.stride_key;
#pragma unroll 1
    for (uint32 q = thread / kKeys; q < kQueries; q += 2 * kAtOnce) {
        T found[kAtOnce];
#pragma unroll
        for (uint32 i = 0; i < kAtOnce; ++i) {
            const int32 row = min(query + static_cast<int32>(q + 2 * i), x.last_query);
            const T* const element = from + row * x.stride_query;
            if constexpr (kAsync) {
                T* const place = static_cast<T*>(to(q + 2 * i, k / kOfPiece));
                hw::cp_async<sizeof(T)>(place + k % kOfPiece, element, true);
            } else {
                found[i] = hw::load(element);
            }
        }
#pragma unroll
        for (uint32 i = 0; !kAsync && i < kAtOnce; ++i) {
            static_cast<T*>(to(q + 2 * i, k / kOfPiece))[k % kOfPiece] = found[i];
        }
    }
}

template <class T, uint32 kQueries, class To>
__device__ __forceinline__ void bring(const Pairs& x, int32 query, int32 key, const To& to) {
    const auto lies = static_cast<uint32>(reinterpret_cast<uint64>(x.data)) |
                      static_cast<uint32>(x.stride_query * static_cast<int>(sizeof(T)));
    const bool rows = x.stride_key == 1 && key + static_cast<int32>(kKeys) <= x.last_key + 1;
    const int32 piece = uniform(!rows || lies % 4 != 0 ? 0 : lies % 16 != 0 ? 4 : 16);
    if (piece == 16) {
        copy_pieces<T, 16, kQueries>(x, query, key, to);
    } else if (sizeof(T) < 4 && piece == 4) {
        copy_pieces<T, 4, kQueries>(x, query, key, to);
    } else {
        copy_elements<T, kQueries>(x, query, key, to);
    }
    hw::cp_async_commit();
}

// Waits until all that the warp has brought is there.
__device__ __forceinline__ void wait() {
    hw::cp_async_wait<0>();
    __syncwarp();
}

// --- From there ----------------------------------------------------------------------------------

// Exchanges bit `lane_bit` of the number of a lane with bit `bit` of the number of a bit.
__device__ __forceinline__ uint32 exchange(uint32 x, uint32 thread, int lane_bit, int bit) {
    constexpr uint32 kClear[3] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu};
    const bool set = thread >> lane_bit & 1;
    const uint32 keep = set ? ~kClear[bit] : kClear[bit];
    const uint32 other = __shfl_xor_sync(0xffffffffu, x, 1 << lane_bit);
    const uint32 moved = set ? other >> (1 << bit) : other << (1 << bit);
    return (x & keep) | (moved & ~keep);
}

// Of the keys of a query a bit each: 1 where the mask's byte is not 0.
__device__ __forceinline__ uint32 bits_of(hw::Vec<uint32, 4> bytes) {
    uint32 eight[2];  // bits of 8 keys, behind 7 others
#pragma unroll
    for (uint32& x : bytes.v) x = (((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) & 0x80808080u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        eight[i] = __dp4a(bytes.v[2 * i + 1], 0x80402010u, __dp4a(bytes.v[2 * i], 0x08040201u, 0u));
    }
    return eight[0] >> 7 | eight[1] << 1;
}

// The blocks of a visit.
template <uint32 kQueries, class Place>
struct Blocks {
    static_assert(kQueries == 64 || kQueries == 128, "queries of 32 lanes, twice or more");
    static constexpr bool kPairs = plan::kMask || plan::kBias, kAdds = plan::kBias;
    static constexpr bool kMarks = kQueries > 64 || !kPairs;  // it has few registers left
    static constexpr uint32 kHalf = kQueries / 2;

    Place place;
    uint32 seen[1][2];  // which queries see a lane's keys, as in columns.cuh

    struct MaskPlace {
        const Place& place;
        __device__ __forceinline__ void* operator()(uint32 q, uint32) const {
            return place.at(q / 32 * 2, q % kRows, q / kRows % 2);
        }
    };
    struct BiasPlace {
        const Place& place;
        __device__ __forceinline__ void* operator()(uint32 q, uint32 piece) const {
            return place.at(q / kRows, q % kRows, piece);
        }
    };
    struct WideBiasPlace {  // of one half of the queries
        const Place& place;
        __device__ __forceinline__ void* operator()(uint32 q, uint32 piece) const {
            return place.at(q / kRows + piece / 2 * (kHalf / kRows), q % kRows, piece % 2);
        }
    };

    __device__ __forceinline__ void bring_mask(const Scores& score, int32 query, int32 key) {
        if constexpr (plan::kMask) {
            if (!score.mask.data) return;
            bring<unsigned char, kQueries>(score.mask, query, key, MaskPlace{place});
        }
    }

    // Looks who is seen, if there is a mask also by what it brought; then the blocks are free
    // again.
    //
    // A lane makes bits of the pieces of two queries: bit 16 i + k of key k of query i. Then it
    // exchanges them with the lanes that have the queries and keys it needs.
    __device__ __forceinline__ void look(const Scores& score, int32 query, int32 key) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const SeenRun queries = score.band.queries_of(key + fragment::row_of(2 * r));
            seen[0][r] = columns::inside<kQueries / 8>(queries, query);
        }
        if constexpr (plan::kMask) {
            if (!score.mask.data) return;
            wait();
            const uint32 thread = lane();
            const uint32 q = thread % 4 * 2 + thread / 4 % 2 + thread / 8 * 8;
            uint32 shown[2] = {};
            const MaskPlace at = {place};
#pragma unroll
            for (uint32 first = 0; first < kQueries; first += 64) {
                using Piece = hw::Vec<uint32, 4>;
                uint32 x = bits_of(*static_cast<const Piece*>(at(q + first, 0)));
                x |= bits_of(*static_cast<const Piece*>(at(q + first + 32, 0))) << 16;
                x = exchange(x, thread, 2, 0);
                x = exchange(x, thread, 3, 1);
                x = exchange(x, thread, 4, 2);
                // Of each of 32 queries, 8 bits of the lane's first key, then 8 of the other.
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const uint32 some = (x >> (8 * r) & 0xffu) | (x >> (8 * r + 8) & 0xff00u);
                    shown[r] = shown[r] >> 16 | some << (kQueries == 64 ? 0 : 16);
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) seen[0][r] &= shown[r];
            __syncwarp();
        }
    }

    __device__ __forceinline__ void bring_bias(const Scores& score, int32 query, int32 key) {
        if constexpr (plan::kBias) {
            if (!score.bias.data) return;
            if (score.bias_wide) {
                bring<float, kHalf>(score.bias, query, key, WideBiasPlace{place});
            } else {
                bring<Element, kQueries>(score.bias, query, key, BiasPlace{place});
            }
        }
    }

    // What the bias adds to the scores of block j, in fragment n and number i of fragment.cuh. All
    // lanes of a warp, block by block.
    __device__ __forceinline__ void added(
        float (&x)[2][4], const Scores& score, int32 query, int32 key, uint32 j) const {
        const uint32 thread = lane();
        if (score.bias.data && !score.bias_wide) {
            uint32 words[4];
            if (j == 0) wait();
            hw::ldmatrix<true>(words, place.at(j, thread / 16 * 8 + thread % 8, thread / 8 % 2));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                Element half;
                half.bits = static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16));
                x[i / 4][i % 4] = widen(half);
            }
        } else if (score.bias.data) {
            const WideBiasPlace at = {place};
            if (j == kHalf / kRows) {
                __syncwarp();
                bring<float, kHalf>(score.bias, query + static_cast<int32>(kHalf), key, at);
            }
            if (j % (kHalf / kRows) == 0) wait();
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint32 q = j % (kHalf / kRows) * kRows + i / 4 * 8 + thread % 4 * 2 + i % 2;
                const uint32 k = thread / 4 + i % 4 / 2 * 8;
                x[i / 4][i % 4] = static_cast<const float*>(at(q, k / 4))[k % 4];
            }
            if (j == kQueries / kRows - 1) __syncwarp();
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i / 4][i % 4] = 0.0f;
        }
    }
};

}  // namespace pair_blocks
