// SPDX-License-Identifier: Apache-2.0
// The score of one (query, key) pair, from the product of the two to its place in the softmax:
//
//     x = scale * product
//     x = softcap * tanh(x / softcap)              plan::kSoftcap
//     x = x + bias[query][key]                     plan::kBias;  -inf hides the pair
//     x = x - slope * |query + offset - key|       plan::kAlibi; offset = seqlen_kv - seqlen_q
//     hidden by the band, by mask[query][key]      plan::kMask
//     or by a bias of -inf
//
// and what becomes of its probability (plan::kDropout). An option that is compiled in may still be
// absent from a call; then it costs a test. An option that is not compiled in costs nothing.
//
// Nothing here knows how a tile of scores is spread over threads. A kernel asks once per tile
// whether pairs may be hidden, and then for each pair that a lane holds.
#pragma once
#include "hw/memory.cuh"
#include "parts/dropout.cuh"
#include "parts/mask.cuh"
#include "parts/operand.cuh"
#include "parts/softmax.cuh"

struct Score {
    Accum value;  // in natural units; -inf if hidden
    Accum slope;  // d value / d (scale * product): 1 without softcap
    bool seen;
};

// A (query, key) matrix of bias or mask, of one head of one entry.
struct Pairs {
    const unsigned char* data;       // null: none
    int64 stride_query, stride_key;  // in elements
    int32 last_query, last_key;      // packed entries may be longer than the array, by mistake

    __device__ static __forceinline__ Pairs of(const PairTensor& t,
                                               const Entry& entry,
                                               int32 head,
                                               int32 bytes) {
        const int64 offset = entry.batch * t.stride_batch + head * t.stride_head;
        return {static_cast<const unsigned char*>(t.data) + offset * bytes, t.stride_query,
                t.stride_key, t.queries - 1, t.keys - 1};
    }

    __device__ __forceinline__ int64 at(int32 query, int32 key) const {
        if constexpr (plan::kPacked) {
            query = min(query, last_query);
            key = min(key, last_key);
        }
        return query * stride_query + key * stride_key;
    }
};

// The scores of one head of one entry of the batch.
struct Scores {
    Band band;
    Accum scale;
    Accum cap, inverse_cap;
    Pairs bias, mask;
    bool bias_wide;
    Accum slope;
    int32 offset;
    uint64 seed;
    uint32 dropped;
    Accum kept;
    int64 batch;
    int32 head;

    // What dropout knows of a row.
    struct Row {
        dropout::Row random;
    };

    __device__ static __forceinline__ Scores of(const Params& p, const Entry& entry, int32 head) {
        Scores s;
        s.band = Band::of(p, entry);
        s.scale = static_cast<Accum>(p.scale);
        if constexpr (plan::kSoftcap) {
            s.cap = static_cast<Accum>(p.softcap);
            s.inverse_cap = Accum(1) / s.cap;
        }
        if constexpr (plan::kBias) {
            s.bias_wide = p.bias.wide != 0;
            s.bias = Pairs::of(p.bias, entry, head, s.bias_wide ? sizeof(Accum) : sizeof(Element));
            if (!p.bias.data) s.bias.data = nullptr;
        }
        if constexpr (plan::kMask) {
            s.mask = Pairs::of(p.mask, entry, head, 1);
            if (!p.mask.data) s.mask.data = nullptr;
        }
        if constexpr (plan::kAlibi) {
            s.slope = 0;
            s.offset = entry.seqlen_kv - entry.seqlen_q;
            if (p.slopes.data && !entry.slack) {
                s.slope = hw::load(head_value(p.slopes, entry.batch, head));
            }
        }
        if constexpr (plan::kDropout) {
            s.dropped = p.dropped;
            s.kept = static_cast<Accum>(p.kept);
            s.batch = entry.batch;
            s.head = head;
            s.seed = p.seed;
            if (p.seed_at) s.seed = hw::load(static_cast<const uint64*>(p.seed_at));
        }
        return s;
    }

    // |scale|, for kernels that keep scores in units of products. Not 0, for -inf must remain
    // hidden, but so small instead that no product makes a score of it.
    __device__ __forceinline__ float unit() const {
        return fmaxf(fabsf(static_cast<float>(scale)), __int_as_float(1));
    }

    // A product's share of the cap. Finite, for a product of 0 has no share.
    __device__ __forceinline__ float share_of_cap() const {
        constexpr float kLargest = 3.4028234e38f;
        return fminf(fmaxf(static_cast<float>(scale * inverse_cap), -kLargest), kLargest);
    }

    // May pairs of this tile be hidden? If not, no pair need be asked about.
    __device__ __forceinline__ bool hides(int32 query, int32 queries, int32 key, int32 keys) const {
        return hides_pairs() || !band.full(query, queries, key, keys);
    }

    // The tiles of `tile` keys in which nothing is hidden from queries [query, query + queries).
    __device__ __forceinline__ TileRange plain_key_tiles(int32 query,
                                                         int32 queries,
                                                         int32 tile) const {
        if (hides_pairs()) return {0, 0};
        return band.full_key_tiles(query, queries, tile);
    }

    // The tiles of `tile` queries from which nothing of keys [key, key + keys) is hidden.
    __device__ __forceinline__ TileRange plain_query_tiles(int32 key,
                                                           int32 keys,
                                                           int32 tile) const {
        if (hides_pairs()) return {0, 0};
        return band.full_query_tiles(key, keys, tile);
    }

    __device__ __forceinline__ bool visible(int32 query, int32 key) const {
        return band.visible(query, key) && shown(query, key);
    }

    // Of a pair inside the band.
    __device__ __forceinline__ bool shown(int32 query, int32 key) const {
        bool seen = true;
        if constexpr (plan::kMask) seen = unmasked(query, key);
        if constexpr (plan::kBias) {
            seen = seen && !(bias_at(query, key) == -softmax::infinity<Accum>());
        }
        return seen;
    }

    // `some_hidden`: what hides() said of the tile that the pair lies in.
    __device__ __forceinline__ Score at(Accum product,
                                        int32 query,
                                        int32 key,
                                        bool some_hidden) const {
        Score score = {softmax::scaled(scale, product), Accum(1), true};
        if (some_hidden) {
            score.seen = band.visible(query, key);
            if constexpr (plan::kMask) score.seen = score.seen && unmasked(query, key);
        }
        if constexpr (plan::kSoftcap) {
            if (cap > Accum(0)) {
                const Accum t =
                    softmax::hyperbolic_tangent(softmax::scaled(inverse_cap, score.value));
                score.value = softmax::scaled(cap, t);
                score.slope = (Accum(1) - t) * (Accum(1) + t);
            }
        }
        if constexpr (plan::kBias) {
            const Accum added = score.seen ? bias_at(query, key) : Accum(0);
            score.value += added;
            score.seen = score.seen && !(added == -softmax::infinity<Accum>());
        }
        if constexpr (plan::kAlibi)
            score.value -= penalty(static_cast<Accum>(distance(query, key)));
        if (!score.seen) score.value = -softmax::infinity<Accum>();
        return score;
    }

    // How far a key is behind a query, and what ALiBi takes for it.
    __device__ __forceinline__ int32 distance(int32 query, int32 key) const {
        return query + offset - key;
    }
    __device__ __forceinline__ Accum penalty(Accum distance) const {
        return softmax::scaled(slope, softmax::magnitude(distance));
    }

    __device__ __forceinline__ Row row(int32 query) const {
        Row row;
        if constexpr (plan::kDropout) {
            if (dropped) row.random = dropout::row(seed, batch, head, query);
        }
        return row;
    }

    // A probability, or a gradient of one, after dropout: without the factor kept_factor().
    __device__ __forceinline__ Accum survives(Accum x, const Row& row, int32 key) const {
        if constexpr (plan::kDropout) {
            if (dropped && dropout::number(row.random, key) < dropped) return Accum(0);
        }
        return x;
    }

    __device__ __forceinline__ Accum kept_factor() const {
        if constexpr (plan::kDropout) return kept;
        return Accum(1);
    }

    // Of a pair inside the band.
    __device__ __forceinline__ Accum bias_at(int32 query, int32 key) const {
        if (!bias.data) return Accum(0);
        const int64 at = bias.at(query, key);
        if (bias_wide) return hw::load(reinterpret_cast<const Accum*>(bias.data) + at);
        return widen(hw::load(reinterpret_cast<const Element*>(bias.data) + at));
    }
    __device__ __forceinline__ bool unmasked(int32 query, int32 key) const {
        return !mask.data || hw::load(mask.data + mask.at(query, key)) != 0;
    }

  private:
    // May a pair of any tile be hidden, wherever it lies?
    __device__ __forceinline__ bool hides_pairs() const {
        bool pairs = false;
        if constexpr (plan::kBias) pairs = bias.data;
        if constexpr (plan::kMask) pairs = pairs || mask.data;
        return pairs;
    }
};
