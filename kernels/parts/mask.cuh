// SPDX-License-Identifier: Apache-2.0
// Which (query, key) pairs are visible by their position, and which tiles hold any of them.
//
// Causal order and windows are one thing, a band along the diagonal that ends at the bottom right:
// query i stands at position i + seqlen_kv - seqlen_q, and sees key j iff
//     first_diagonal <= j - i <= last_diagonal.
// Tiles outside the band are never visited; tiles inside it are computed without a compare.
#pragma once
#include "parts/work.cuh"

struct TileRange {
    int32 first, last;  // [first, last)

    __device__ __forceinline__ bool holds(int32 tile) const { return first <= tile && tile < last; }
};

// The tiles of keys that some queries see anything of, and all of; or the same the other way round.
struct alignas(16) SeenTiles {
    TileRange any, all;

    __device__ __forceinline__ bool has(int32 tile) const { return any.holds(tile); }
    __device__ __forceinline__ bool hides(int32 tile) const { return !all.holds(tile); }
};

// The keys that one query sees by its position, or the queries that see one key.
struct SeenRun {
    int32 first;
    uint32 count;

    __device__ static __forceinline__ SeenRun of(int32 first, int32 last, bool any) {
        return {first, any && last >= first ? static_cast<uint32>(last - first) + 1u : 0u};
    }
    __device__ __forceinline__ bool holds(int32 at) const {
        return static_cast<uint32>(at) - static_cast<uint32>(first) < count;
    }
};

struct Band {
    int32 first_diagonal, last_diagonal;
    int32 seqlen_q, seqlen_kv;

    __device__ static Band of(const Params& p, const Entry& entry) {
        // An open side is a diagonal beyond the corner. Lengths are below 2^30, so that every sum
        // of a diagonal and an index fits 32 bits; the window itself may be anything.
        const int64 offset = entry.seqlen_kv - entry.seqlen_q;
        const int64 first = offset - p.window_left, last = offset + p.window_right;
        Band band;
        band.seqlen_q = entry.seqlen_q;
        band.seqlen_kv = entry.seqlen_kv;
        band.first_diagonal = static_cast<int32>(
            p.window_left == kOpen || first < -entry.seqlen_q ? -entry.seqlen_q : first);
        band.last_diagonal = static_cast<int32>(
            p.window_right == kOpen || last > entry.seqlen_kv ? entry.seqlen_kv : last);
        return band;
    }

    // Also where a tile reaches past the end: rows that do not exist see nothing, or the zeros they
    // are loaded as would meet the infinities of a key.
    __device__ __forceinline__ bool visible(int32 query, int32 key) const {
        const int32 diagonal = key - query;
        return diagonal >= first_diagonal && diagonal <= last_diagonal && query < seqlen_q &&
               key < seqlen_kv;
    }

    // The same of all keys, or all queries, with one compare for each.
    __device__ __forceinline__ SeenRun keys_of(int32 query) const {
        return SeenRun::of(max(query + first_diagonal, 0),
                           min(query + last_diagonal, seqlen_kv - 1), query < seqlen_q);
    }
    __device__ __forceinline__ SeenRun queries_of(int32 key) const {
        return SeenRun::of(max(key - last_diagonal, 0), min(key - first_diagonal, seqlen_q - 1),
                           key < seqlen_kv);
    }

    // Does every query of [query, query + queries) see every key of [key, key + keys)?
    __device__ __forceinline__ bool full(int32 query, int32 queries, int32 key, int32 keys) const {
        return query + queries <= seqlen_q && key + keys <= seqlen_kv &&
               key - (query + queries - 1) >= first_diagonal &&
               key + keys - 1 - query <= last_diagonal;
    }

    // The tiles of `tile` keys that queries [query, query + queries) see all of.
    __device__ __forceinline__ TileRange full_key_tiles(int32 query,
                                                        int32 queries,
                                                        int32 tile) const {
        if (query + queries > seqlen_q) return {0, 0};
        const int32 first = max(query + queries - 1 + first_diagonal, 0);
        const int32 end = min(query + last_diagonal + 1, seqlen_kv);
        return {ceil_div(first, tile), max(end, 0) / tile};
    }

    // The tiles of `tile` keys that queries [query, query + queries) see anything of.
    __device__ __forceinline__ TileRange key_tiles(int32 query, int32 queries, int32 tile) const {
        if (query >= seqlen_q) return {0, 0};
        const int32 last_query = min(query + queries, seqlen_q) - 1;
        return tiles(max(query + first_diagonal, 0), min(last_query + last_diagonal, seqlen_kv - 1),
                     tile);
    }

    // The tiles of `tile` queries that see all of keys [key, key + keys).
    __device__ __forceinline__ TileRange full_query_tiles(int32 key, int32 keys, int32 tile) const {
        if (key + keys > seqlen_kv) return {0, 0};
        const int32 first = max(key + keys - 1 - last_diagonal, 0);
        const int32 end = min(key - first_diagonal + 1, seqlen_q);
        return {ceil_div(first, tile), max(end, 0) / tile};
    }

    // The tiles of `tile` queries that see anything of keys [key, key + keys).
    __device__ __forceinline__ TileRange query_tiles(int32 key, int32 keys, int32 tile) const {
        if (key >= seqlen_kv) return {0, 0};
        const int32 last_key = min(key + keys, seqlen_kv) - 1;
        return tiles(max(key - last_diagonal, 0), min(last_key - first_diagonal, seqlen_q - 1),
                     tile);
    }

  private:
    __device__ static __forceinline__ TileRange tiles(int32 first, int32 last, int32 tile) {
        if (last < first) return {0, 0};
        return {first / tile, last / tile + 1};
    }
};
