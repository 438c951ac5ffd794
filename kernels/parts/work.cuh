// SPDX-License-Identifier: Apache-2.0
// Which part of the output a block computes, and the entries of the batch that it is cut from.
//
// The grid has one dimension, since the others end at 65535; when even that one does not suffice, a
// block takes several parts.
//
// Packed entries have lengths that only the device knows. They need no list of tiles, and nobody
// need know the longest: entry e begins at slot floor(begin_e / tile) + e, which leaves it at least
// ceil(length_e / tile) slots, and there are rows / tile + entries slots in all. A block finds the
// entry of its slot by search; some slots are left over and have nothing to do.
#pragma once
#include "attention/params.cuh"
#include "hw/memory.cuh"

// One entry of the batch: its place in the arrays, and its lengths.
struct Entry {
    int64 batch;              // index along batch axes
    int32 first_q, first_kv;  // where its rows begin; 0 unless packed
    int32 seqlen_q, seqlen_kv;
    bool slack;  // rows around packed entries, which belong to nobody
};

struct Work {
    Entry entry;
    int32 head, tile;
};

// Whose rows are cut into tiles: the queries, or the keys and values. Causal: the last queries see
// most keys, and the first keys are seen by most queries; what takes longest goes first.
struct Queries {
    static constexpr bool kLastFirst = true;
    __device__ static int32 heads(const Params& p) { return p.heads_q; }
    __device__ static int32 rows(const Params& p) { return p.seqlen_q; }
    __device__ static const Offsets& offsets(const Params& p) { return p.cu_seqlens_q; }
};
struct Keys {
    static constexpr bool kLastFirst = false;
    __device__ static int32 heads(const Params& p) { return p.heads_kv; }
    __device__ static int32 rows(const Params& p) { return p.seqlen_kv; }
    __device__ static const Offsets& offsets(const Params& p) { return p.cu_seqlens_kv; }
};

// Where span `i` of all rows begins: what lies before the first entry is span 0, entry b is span
// b + 1, and what lies behind the last is span batch + 1. Always within the array.
template <class Side>
__device__ __forceinline__ int32 span_begin(const Params& p, int64 i) {
    if (i == 0) return 0;
    if (i >= p.batch + 2) return Side::rows(p);
    const Offsets& cu = Side::offsets(p);
    const int64 where = (i - 1) * cu.stride;
    const int64 at = cu.wide ? hw::load(static_cast<const int64*>(cu.at) + where)
                             : hw::load(static_cast<const int32*>(cu.at) + where);
    return static_cast<int32>(at < 0 ? 0 : at > Side::rows(p) ? Side::rows(p) : at);
}

// Entry `batch` of packed arrays.
__device__ __forceinline__ Entry packed_entry(const Params& p, int64 batch) {
    const int32 first_q = span_begin<Queries>(p, batch + 1);
    const int32 first_kv = span_begin<Keys>(p, batch + 1);
    const int32 seqlen_q = max(span_begin<Queries>(p, batch + 2) - first_q, 0);
    const int32 seqlen_kv = max(span_begin<Keys>(p, batch + 2) - first_kv, 0);
    return {batch, first_q, first_kv, seqlen_q, seqlen_kv, false};
}

// Entry `batch`.
__device__ __forceinline__ Entry entry_at(const Params& p, int64 batch) {
    if constexpr (plan::kPacked) {
        if (p.cu_seqlens_q.at) return packed_entry(p, batch);
    }
    return {batch, 0, 0, p.seqlen_q, p.seqlen_kv, false};
}

// The batch axis of the arrays, and all rows behind an index of it, whether they are packed or not.
__device__ __forceinline__ int64 array_batch(const Params& p) {
    return p.cu_seqlens_q.at ? 1 : p.batch;
}
__device__ __forceinline__ Entry all_rows(const Params& p, int64 batch) {
    return {batch, 0, 0, p.seqlen_q, p.seqlen_kv, false};
}

// Rows [first, first + rows) of a side that belong to no entry, and so meet nothing.
__device__ __forceinline__ Entry slack(Queries, int32 first, int32 rows) {
    return {0, first, 0, rows, 0, true};
}
__device__ __forceinline__ Entry slack(Keys, int32 first, int32 rows) {
    return {0, 0, first, 0, rows, true};
}

// The span that owns a slot, by a search in which each lane of a warp asks one question at a time.
template <class Side, int kTile>
__device__ __forceinline__ int64 span_of(const Params& p, int64 slot) {
    int64 low = 0, count = p.batch + 2;  // it is one of [low, low + count)
    while (count > 1) {
        const int64 step = (count + 31) / 32;
        const int64 mine = static_cast<int>(threadIdx.x) % 32 * step;
        const bool begun =
            mine < count && span_begin<Side>(p, low + mine) / kTile + low + mine <= slot;
        const int last = max(__popc(__ballot_sync(0xffffffffu, begun)) - 1, 0);
        low += last * step;
        count = min(step, count - last * step);
    }
    return low;
}

// How many parts there are. Tiles of one head are neighbours: they read the same keys and values
// (or queries), which then come from the L2 cache.
template <class Side, int kTile>
__device__ __forceinline__ int64 work_parts(const Params& p) {
    if constexpr (plan::kPacked) {
        if (p.cu_seqlens_q.at) {
            return Side::heads(p) * (Side::rows(p) / kTile + p.batch + 2);
        }
    }
    return p.batch * Side::heads(p) * ceil_div(Side::rows(p), kTile);
}

// Part `index`; false if it has nothing to do. The same for all threads of the block.
template <class Side, int kTile>
__device__ __forceinline__ bool work_at(const Params& p, int64 index, Work& work) {
    int32 tiles;
    if constexpr (plan::kPacked) {
        if (p.cu_seqlens_q.at) {
            const int64 slots = Side::rows(p) / kTile + p.batch + 2;
            const int64 slot = index % slots;
            const int64 span = span_of<Side, kTile>(p, slot);
            const int32 first = span_begin<Side>(p, span);
            const int32 rows = max(span_begin<Side>(p, span + 1) - first, 0);
            const int64 tile = slot - (first / kTile + span);
            tiles = ceil_div(rows, kTile);
            if (tile < 0 || tile >= tiles) return false;
            const bool is_entry = span >= 1 && span <= p.batch;
            work = {is_entry ? packed_entry(p, span - 1) : slack(Side(), first, rows),
                    static_cast<int32>(index / slots), static_cast<int32>(tile)};
            if (Side::kLastFirst) work.tile = tiles - 1 - work.tile;
            return true;
        }
    }
    tiles = ceil_div(Side::rows(p), kTile);
    const int64 row = index / tiles;
    work = {entry_at(p, row / Side::heads(p)), static_cast<int32>(row % Side::heads(p)),
            static_cast<int32>(index % tiles)};
    if (Side::kLastFirst) work.tile = tiles - 1 - work.tile;
    return true;
}

// So many heads that they have `parts` parts.
template <class Side, int kTile>
__device__ __forceinline__ int64 heads_of(const Params& p, int64 parts) {
    int64 tiles = ceil_div(Side::rows(p), kTile);
    if constexpr (plan::kPacked) {
        if (p.cu_seqlens_q.at) tiles = Side::rows(p) / kTile + p.batch + 2;
    }
    return (parts + tiles - 1) / tiles;
}

// So many heads that what is read of them again and again, of so many bytes a row of the side,
// fills `cache` bytes; at least one.
template <class Side>
__device__ __forceinline__ int64 heads_in(const Params& p, int64 cache, int64 row_bytes) {
    int64 rows = Side::rows(p);
    if constexpr (plan::kPacked) {
        if (p.cu_seqlens_q.at) rows = rows / max(p.batch, int64{1});  // of an entry, on average
    }
    return max(cache / (max(rows, int64{1}) * row_bytes), int64{1});
}

// Parts in another order: not head by head, but tile by tile of `together` heads. Tiles of a head
// then start one after the other.
template <class Side, int kTile>
__device__ __forceinline__ int64 interleaved(const Params& p, int64 index, int64 together) {
    int64 heads = p.batch * Side::heads(p), tiles = ceil_div(Side::rows(p), kTile);
    if constexpr (plan::kPacked) {
        if (p.cu_seqlens_q.at) {
            heads = Side::heads(p);
            tiles = Side::rows(p) / kTile + p.batch + 2;
        }
    }
    const int64 first = index / (together * tiles) * together;
    const int64 width = min(together, heads - first), within = index - first * tiles;
    return (first + within % width) * tiles + within / width;
}

// The next number of the grid's counter. All lanes of a warp. A launch draws so many times: the
// last one puts the counter back for the next launch.
__device__ __forceinline__ int64 take_ticket(const Params& p, int64 draws) {
    auto* const tickets = static_cast<uint64*>(p.tickets);
    uint64 ticket = 0;
    if (threadIdx.x % 32 == 0) {
        ticket = atomicAdd(tickets, uint64{1});
        if (ticket == static_cast<uint64>(draws) - 1) {
            atomicAdd(tickets, uint64{0} - static_cast<uint64>(draws));
        }
    }
    return static_cast<int64>(__shfl_sync(0xffffffffu, ticket, 0));
}

// The index of a part that no block has from the start: as many draws as parts.
__device__ __forceinline__ int64 draw(const Params& p, int64 parts) {
    return take_ticket(p, parts) + gridDim.x;
}

// The place of a tile of queries of an entry among what workspace has of each: below work_parts(),
// and different for each.
template <int kTile>
__device__ __forceinline__ int64
query_slot(const Params& p, const Entry& entry, int32 head, int32 tile) {
    if constexpr (plan::kPacked) {
        if (p.cu_seqlens_q.at) {
            const int64 slots = p.seqlen_q / kTile + p.batch + 2;
            return head * slots + entry.first_q / kTile + entry.batch + 1 + tile;
        }
    }
    return (entry.batch * p.heads_q + head) * ceil_div(p.seqlen_q, kTile) + tile;
}
