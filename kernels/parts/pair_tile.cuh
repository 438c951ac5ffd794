// SPDX-License-Identifier: Apache-2.0
// Tiles of a bias or mask in shared memory, brought by cp.async with the keys that they belong to.
//
// A lane needs the elements of its fragments of scores: of some rows two neighbours each, all over
// the tile. Rows of a tile are an odd number of 16-byte pieces apart, or of twice that for 4-byte
// elements, so that neither the lanes of a warp nor those of half a warp meet in a bank.
//
// Only for arrays whose rows can be copied by kPiece bytes, 16 or 4. Along queries, heads and
// entries they may be broadcast; then the same row is copied again.
#pragma once
#include "hw/cp_async.cuh"
#include "parts/fragment.cuh"
#include "parts/online.cuh"
#include "parts/score.cuh"

namespace pair_tile {

// kBytes: of an element. kPiece: that are copied at once.
template <int kRowsOfTile, int kKeysOfTile, int kBytes, int kPiece>
struct Tile {
    static constexpr int kRows = kRowsOfTile, kKeys = kKeysOfTile;
    static constexpr int kWidth = kKeys * kBytes;
    static constexpr int kGap = kBytes == 4 ? 32 : 16;  // a row's distance in these is odd
    static constexpr int kPitch = ((kWidth + kGap - 1) / kGap | 1) * kGap;
    static_assert(kWidth % 16 == 0, "whole pieces");

    alignas(16) unsigned char at[kRows][kPitch];

    // Starts to bring the elements of queries [query, query + kRows) and keys [key, key + kKeys).
    // What the array does not have becomes zeros, where Pairs::at() repeats its last row and key.
    // As fragment::copy_pieces.
    template <int kThreads>
    __device__ __forceinline__ void copy(const Pairs& pairs, int32 query, int32 key) {
        constexpr int kPieces = kWidth / kPiece;  // of a row
        constexpr int kSharers = fragment::divisor_to_8(kPieces);
        constexpr int kStep = kThreads / kSharers;  // rows that all threads make at once
        const int thread = hw::forget(static_cast<int>(threadIdx.x));
        const int row = thread / kSharers, col = thread % kSharers * kPiece;
        if (kThreads % kSharers != 0 && row >= kStep) return;
        const int64 pitch = pairs.stride_query * kBytes, step = kStep * pitch;
        const unsigned char* from = pairs.data + (query + row) * pitch + int64{key} * kBytes + col;
        const int rows = pairs.stride_query == 0 ? kRows : pairs.last_query + 1 - query;
        const int width = min(pairs.last_key + 1 - key, kKeys) * kBytes - col;
#pragma unroll
        for (int i = 0; i < kRows; i += kStep, from += step) {
            if (kRows % kStep != 0 && i + row >= kRows) break;
            const int bytes = i + row < rows ? width : 0;
#pragma unroll
            for (int c = 0; c < kWidth; c += kSharers * kPiece) {
                hw::cp_async<kPiece>(&at[i + row][col + c], from + c, c < bytes);
            }
        }
    }

    // The first two elements of a lane; `row`: the first of its warp.
    __device__ __forceinline__ const unsigned char* place(int row) const {
        return &at[row + fragment::row_of(0)][fragment::col_of(0) * kBytes];
    }
    // How far from there those of the lane's row r are, in fragment n.
    __host__ __device__ static constexpr int offset(int r, int n) {
        return 8 * (r * kPitch + n * kBytes);
    }
};

// What a kernel copies of a call's bias and mask, by its plan.
constexpr bool kCopiesBias = plan::kAlignedBias > 0, kCopiesMask = plan::kAlignedMask > 0;

template <bool kWide>
struct BiasOf {
    using type = Element;
};
template <>
struct BiasOf<true> {
    using type = Accum;
};
using BiasElement = BiasOf<plan::kWideBias>::type;

// Has the call a bias or mask that is not copied?
__device__ __forceinline__ bool in_place(const Scores& score) {
    bool found = false;
    if constexpr (plan::kBias && !kCopiesBias) found = score.bias.data;
    if constexpr (plan::kMask && !kCopiesMask) found = found || score.mask.data;
    return found;
}

// A tile, or nothing where none is copied.
template <int kBytes, int kPiece>
struct Part {
    Tile<plan::kTileQ, plan::kTileKv, kBytes, kPiece> tile;

    template <int kThreads>
    __device__ __forceinline__ void copy(const Pairs& pairs, int32 query, int32 key) {
        tile.template copy<kThreads>(pairs, query, key);
    }
    template <class T>
    __device__ __forceinline__ T two(int row, int r, int n) const {
        return *reinterpret_cast<const T*>(tile.place(row) + tile.offset(r, n));
    }
};
template <int kBytes>
struct Part<kBytes, 0> {
    template <int kThreads>
    __device__ __forceinline__ void copy(const Pairs&, int32, int32) {}
    template <class T>
    __device__ __forceinline__ T two(int, int, int) const {
        return {};
    }
};
using BiasPart = Part<sizeof(BiasElement), plan::kAlignedBias>;
using MaskPart = Part<1, plan::kAlignedMask>;

// The tiles of bias and mask that belong to a tile of keys. To be a base, for it may be empty.
struct Both : BiasPart, MaskPart {
    template <int kThreads>
    __device__ __forceinline__ void copy(const Scores& score, int32 query, int32 key) {
        BiasPart::template copy<kThreads>(score.bias, query, key);
        MaskPart::template copy<kThreads>(score.mask, query, key);
    }

    // Two neighbours of the calling lane, which has those of its row r in fragment n as online.cuh
    // says; `row`: the first of the warp.
    __device__ __forceinline__ hw::Vec<float, 2> bias(int row, int r, int n) const {
        const auto two = BiasPart::template two<hw::Vec<BiasElement, 2>>(row, r, n);
        return {widen(two.v[0]), widen(two.v[1])};
    }
    // Bytes of which 0 hides the key, the first in the lower half.
    __device__ __forceinline__ uint32 mask(int row, int r, int n) const {
        return MaskPart::template two<unsigned short>(row, r, n);
    }
};

// Products become scores, as by online::finish_scores; the pairs begin at (query, key), and the
// warp's rows of the tiles at `row_of_tiles`. kHides: the band may hide pairs. kReads: a bias or
// mask that is not copied is read where it lies.
template <bool kHides, bool kReads, int kSlabs, int kKeys8>
__device__ __forceinline__ void finish_scores(float (&s)[kSlabs][kKeys8][4],
                                              const Both& tiles,
                                              const Scores& score,
                                              int32 query,
                                              int32 key,
                                              int row_of_tiles) {
    constexpr bool kReadsBias = plan::kBias && kReads && !kCopiesBias;
    constexpr bool kReadsMask = plan::kMask && kReads && !kCopiesMask && kHides;
    // Without softcap scale and bias are one step.
    constexpr bool kAdds = kCopiesBias && !plan::kSoftcap;
    if constexpr (online::kScored && !kAdds) {
        if (plan::kSoftcap && score.cap > 0.0f) {
            online::soften<kHides || kCopiesMask || kCopiesBias>(s, score);
        } else {
            fragment::for_each(s, [&](float& x) { x = softmax::scaled(score.scale, x); });
        }
    }
#pragma unroll
    for (int r = 0; r < 2 * kSlabs; ++r) {
        const int32 row = online::row_at(query, r);
        const SeenRun keys = score.band.keys_of(row);
        // Of the first key; exact as long as sequences are shorter than 2^24.
        float distance = 0.0f;
        if constexpr (plan::kAlibi) {
            distance = static_cast<float>(score.distance(row, key + fragment::col_of(0)));
        }
#pragma unroll
        for (int n = 0; n < kKeys8; ++n) {
            hw::Vec<float, 2> two = {};
            uint32 bytes = 0;
            if constexpr (kCopiesBias) two = tiles.bias(row_of_tiles, r, n);
            if constexpr (kCopiesMask) bytes = tiles.mask(row_of_tiles, r, n);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& x = s[r / 2][n][r % 2 * 2 + i];
                const int32 col = key + 8 * n + fragment::col_of(i);
                bool seen = true;
                if constexpr (kHides) {
                    seen = keys.holds(col);
                }
                if constexpr (kCopiesMask) seen = seen && (bytes & 0xffu << 8 * i) != 0;
                if constexpr (kReadsMask) seen = seen && score.unmasked(row, col);
                if constexpr (kCopiesBias || kReadsBias) {
                    float added = two.v[i];
                    if constexpr (kReadsBias) added = seen ? score.bias_at(row, col) : 0.0f;
                    x = kAdds ? fmaf(x, score.scale, added) : x + added;
                    seen = seen && !(added == -softmax::infinity<float>());
                }
                if constexpr (plan::kAlibi) {
                    x -= score.penalty(distance - static_cast<float>(8 * n + i));
                }
                if (!seen) x = -softmax::infinity<float>();
            }
        }
    }
}

}  // namespace pair_tile
