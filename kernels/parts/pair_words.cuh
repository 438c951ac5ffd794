// SPDX-License-Identifier: Apache-2.0
// What bias and mask hold for the pairs of a fragment (fragment.cuh), read by words of 4 bytes
// and ahead: while the tile's products are computed.
//
// Of a bias a word is the two elements that a lane has of 8 columns. Of a mask it is 4 bytes of a
// row, which the 4 lanes of the row share out; they make a bit of each byte and exchange the bits,
// in the order of columns.cuh. Tiles that cannot be read so (other strides, rows that are no whole
// words apart, the end of a row) are left to Scores, one element at a time. A float32 bias takes
// twice the registers, so that it is read by words, but not ahead.
#pragma once
#include "parts/columns.cuh"
#include "parts/score.cuh"

// How the bias of a tile is read.
enum class BiasWords { kNone, kAhead, kWide };

// One that reads nothing leaves all to Scores.
template <int kSlabs, int kKeys8, bool kReadsThem>
class PairWords {
    static_assert(kKeys8 % 2 == 0 && kKeys8 <= 16, "whole words of a mask, and a bit a column");
    static constexpr int kRows = 2 * kSlabs, kKeys = 8 * kKeys8;
    using Two = hw::Vec<Element, 2>;
    using TwoWide = hw::Vec<float, 2>;

    // The lane's rows of a mask or a bias. Rows past the end, which see nothing, are the last one.
    struct Rows {
        const unsigned char* at[kRows];  // the lane's first word

        __device__ static __forceinline__ Rows of(const Pairs& x,
                                                  int32 query,
                                                  int32 first,
                                                  int32 bytes) {
            Rows rows;
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const int32 row = query + fragment::kSlab * (r / 2) + fragment::row_of(r % 2 * 2);
                rows.at[r] = x.data + (min(row, x.last_query) * x.stride_query + first) * bytes;
            }
            return rows;
        }
    };

    // Can the tile of keys that begins at `key` be read by words of so many bytes?
    __device__ static __forceinline__ bool serves(const Pairs& x,
                                                  int32 key,
                                                  int32 bytes,
                                                  int32 word) {
        const auto place =
            reinterpret_cast<uint64>(x.data) | static_cast<uint64>(x.stride_query * bytes);
        return x.data && x.stride_key == 1 && place % word == 0 && key + kKeys <= x.last_key + 1;
    }

  public:
    static constexpr bool kReads = kReadsThem;
    static constexpr bool kReadsMask = kReads && plan::kMask;
    static constexpr bool kReadsBias = kReads && plan::kBias;

    // Starts to read; the pairs begin at (query, key).
    __device__ __forceinline__ void read(const Scores& score, int32 query, int32 key) {
        if constexpr (plan::kMask) {
            const Rows rows = Rows::of(score.mask, query, key + 4 * (fragment::lane() % 4), 1);
            has_mask_ = serves(score.mask, key, 1, 4);
            if (has_mask_) {
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    const auto* const from = reinterpret_cast<const uint32*>(rows.at[r]);
#pragma unroll
                    for (int w = 0; w < kKeys8 / 2; ++w) mask_[r][w] = hw::load(from + 4 * w);
                }
            }
        }
        if constexpr (plan::kBias) {
            const int32 size = score.bias_wide ? sizeof(float) : sizeof(Element);
            bias_rows_ = Rows::of(score.bias, query, key + fragment::col_of(0), size);
            const bool fits = serves(score.bias, key, size, 2 * size);
            bias_ = !fits             ? BiasWords::kNone
                    : score.bias_wide ? BiasWords::kWide
                                      : BiasWords::kAhead;
            if (bias_ == BiasWords::kAhead) {
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    const auto* const from = reinterpret_cast<const Two*>(bias_rows_.at[r]);
#pragma unroll
                    for (int n = 0; n < kKeys8; ++n) held_[r][n] = hw::load(from + 4 * n);
                }
            }
        }
    }

    // Whether words serve the tile; the same for all lanes of a warp.
    __device__ __forceinline__ bool has_mask() const { return kReadsMask && has_mask_; }
    __device__ __forceinline__ BiasWords bias() const {
        return kReadsBias ? bias_ : BiasWords::kNone;
    }

    // Which columns the mask shows to the lane's row r, as in columns.cuh. All lanes of a warp.
    __device__ __forceinline__ uint32 shown(int r) const {
        uint32 mine = 0;  // 4 columns a word
#pragma unroll
        for (int w = 0; w < kKeys8 / 2; ++w) {
            uint32 x = mask_[r][w];
            x = (((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) >> 7 & 0x01010101u;  // a byte is not 0
            mine |= (x * 0x01020408u >> 24 & 15u) << (4 * w);
        }
        // Of 16 columns, the lane needs 2 of a word of the first 8, and 2 of one of the others.
        const int lane = fragment::lane(), holder = lane / 4 * 4 + lane % 4 / 2;
        const int shift = lane % 2 * 2;
        const uint32 first = __shfl_sync(0xffffffffu, mine, holder) >> shift;
        const uint32 other = __shfl_sync(0xffffffffu, mine, holder + 2) >> shift;
        return (first & 0x33333333u) | (other & 0x33333333u) << 2;
    }

    // What is added to the score in row r, column 8 n + fragment::col_of(i).
    template <BiasWords kWords>
    __device__ __forceinline__ float added(int r, int n, int i) const {
        if constexpr (kWords == BiasWords::kWide) {
            return hw::load(reinterpret_cast<const TwoWide*>(bias_rows_.at[r]) + 4 * n).v[i];
        }
        return widen(held_[r][n].v[i]);
    }

  private:
    bool has_mask_ = false;
    BiasWords bias_ = BiasWords::kNone;
    Rows bias_rows_;
    uint32 mask_[kReadsMask ? kRows : 1][kReadsMask ? kKeys8 / 2 : 1];
    Two held_[kReadsBias ? kRows : 1][kReadsBias ? kKeys8 : 1];
};
