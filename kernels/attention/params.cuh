// SPDX-License-Identifier: Apache-2.0
// The run-time values of every kernel: one struct, passed by value. cuflash/params.py packs the
// same fields in the same order; the size is compared when a kernel is compiled.
#pragma once
#include "parts/types.cuh"

// A (batch, seq, head, dim) array of plan::Element with any strides, counted in elements.
struct Tensor {
    void* data;  // may be null where a kernel does not use the array
    int64 stride_batch, stride_seq, stride_head, stride_dim;
    int64 aligned;  // 8 or 16 if rows are contiguous, and so many bytes of them after the other are
                    // aligned to their size and can be moved at once; else 0. Never fewer bytes
                    // than 16 / sizeof(Accum) elements.
};

// A (batch, head, seq) array of Accum with any strides, counted in elements.
struct RowTensor {
    void* data;  // may be null
    int64 stride_batch, stride_head, stride_seq;
};

// A (batch, head, query, key) array; axes of length 1 stand for any length, with stride 0.
struct PairTensor {
    void* data;  // null: the call has no such array
    int64 stride_batch, stride_head, stride_query, stride_key;
    int32 batch, heads, queries, keys;  // lengths of the axes
    int64 wide;                         // 1: the elements are Accum, 0: plan::Element
};

// A (batch, head) array of Accum.
struct HeadTensor {
    void* data;  // null: the call has no such array
    int64 stride_batch, stride_head;
};

// Sequences that lie one behind the other: entry b is rows at[b] to at[b + 1] - 1 of an array. The
// numbers come from the caller and are not trusted.
struct Offsets {
    const void* at;  // (batch + 1,); null: not packed
    int64 stride;    // in elements
    int64 wide;      // 1: int64, 0: int32
};

struct Params {
    Tensor q;           // (batch, seqlen_q, heads_q, head_dim)
    Tensor k;           // (batch, seqlen_kv, heads_kv, head_dim)
    Tensor v;           // (batch, seqlen_kv, heads_kv, head_dim_v)
    Tensor out;         // (batch, seqlen_q, heads_q, head_dim_v)
    Tensor dout;        // as out; backward only, like all that begins with d
    Tensor dq;          // as q
    Tensor dk;          // as k
    Tensor dv;          // as v
    RowTensor lse;      // (batch, heads_q, seqlen_q); written by the forward if not null
    RowTensor dlse;     // as lse; gradient that arrives through lse, may be null
    RowTensor delta;    // as lse; workspace: rowsum(dout * out)
    PairTensor bias;    // (batch, heads_q, seqlen_q, seqlen_kv)
    PairTensor dbias;   // as bias, and of its type
    PairTensor mask;    // as bias; bytes, of which 0 hides the key
    HeadTensor slopes;  // (batch, heads_q); of ALiBi
    HeadTensor sinks;   // (1, heads_q)
    HeadTensor dsinks;  // as sinks
    Offsets cu_seqlens_q, cu_seqlens_kv;
    void* dbias_parts;  // workspace: (dbias_splits, all of dbias) of Accum
    void* row_stats;    // workspace of mma and sm90, by query_slot(): parts/gradient_mma.cuh
    void* dq_sums;
    void* dq_turns;
    void* tickets;        // uint64, 0 before and after each launch: work that blocks have taken
    const void* seed_at;  // one 64-bit integer; null: the seed is `seed`
    uint64 seed;
    double scale;    // scores are scale * <q, k>
    double softcap;  // 0: none
    double kept;     // what kept probabilities are multiplied by: 1 / (1 - dropout_p), or 0
    int64 batch;     // entries: packed arrays have no batch axis, so that their stride is 0
    uint32 dropped;  // a pair whose random number is below is dropped; 0: none
    int32 heads_q, heads_kv;  // query head h reads key head h / (heads_q / heads_kv)
    int32 seqlen_q,
        seqlen_kv;  // of packed arrays: the rows of all entries, and what surrounds them
    int32 head_dim, head_dim_v;
    int32 window_left, window_right;  // keys before and after the diagonal; kOpen: no limit
    int32 dbias_splits;               // parts that the sums of dbias are cut into
    int32 dbias_strides;              // query tiles of an entry that different parts begin with
    int32 unused;
};

constexpr int32 kOpen = 0x7fffffff;

static_assert(sizeof(Params) == plan::kCallBytes, "params.cuh and params.py disagree");
