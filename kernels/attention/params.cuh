// SPDX-License-Identifier: Apache-2.0
// The run-time values of every kernel: one struct, passed by value. cuflash/launch.py packs the
// same fields in the same order; the size is compared when a kernel is compiled.
#pragma once
#include "parts/types.cuh"

// A (batch, seq, head, dim) array of plan::Element with any strides, counted in elements.
struct Tensor {
    void* data;  // may be null where a kernel does not use the array
    int64 stride_batch, stride_seq, stride_head, stride_dim;
    int64 vectors;  // 1: rows are contiguous, and each 16 / sizeof(Accum) elements of a row are
                    // aligned to their size, so that they can be moved at once
};

// A (batch, head, seq) array of Accum with any strides, counted in elements.
struct RowTensor {
    void* data;  // may be null
    int64 stride_batch, stride_head, stride_seq;
};

struct Params {
    Tensor q;         // (batch, seqlen_q, heads_q, head_dim)
    Tensor k;         // (batch, seqlen_kv, heads_kv, head_dim)
    Tensor v;         // (batch, seqlen_kv, heads_kv, head_dim_v)
    Tensor out;       // (batch, seqlen_q, heads_q, head_dim_v)
    Tensor dout;      // as out; backward only, like dq, dk, dv, dlse and delta
    Tensor dq;        // as q
    Tensor dk;        // as k
    Tensor dv;        // as v
    RowTensor lse;    // (batch, heads_q, seqlen_q); written by the forward if not null
    RowTensor dlse;   // as lse; gradient that arrives through lse, may be null
    RowTensor delta;  // as lse; workspace: rowsum(dout * out)
    double scale;     // scores are scale * <q, k>
    int64 batch;
    int32 heads_q, heads_kv;  // query head h reads key head h / (heads_q / heads_kv)
    int32 seqlen_q, seqlen_kv;
    int32 head_dim, head_dim_v;
    int32 window_left, window_right;  // keys before and after the diagonal; kOpen: no limit
};

constexpr int32 kOpen = 0x7fffffff;

static_assert(sizeof(Params) == plan::kParamsBytes, "params.cuh and launch.py disagree");
