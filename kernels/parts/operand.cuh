// SPDX-License-Identifier: Apache-2.0
// One head of one entry of the batch: the part of an operand that a block works on.
#pragma once
#include "parts/work.cuh"

using Element = plan::Element;
using Accum = AccumOf<Element>::type;

constexpr int kGroup = 16 / sizeof(Accum);  // accumulators in a 16-byte shared memory access

// The (seq, dim) matrix of a head.
struct Matrix {
    Element* data;
    int64 stride_row, stride_col;
    int32 rows, cols;
    bool vectors;   // groups of kGroup elements of a row can be moved at once
    int32 aligned;  // bytes of a contiguous row that can be moved at once, or 0

    // Without the first `count` rows.
    __device__ __forceinline__ void skip(int32 count) {
        data += count * stride_row;
        rows -= count;
    }
};
__device__ __forceinline__ Matrix
matrix(const Tensor& t, int64 batch, int32 head, int32 first, int32 rows, int32 cols) {
    return {static_cast<Element*>(t.data) + batch * t.stride_batch + head * t.stride_head +
                first * t.stride_seq,
            t.stride_seq,
            t.stride_dim,
            rows,
            cols,
            t.aligned != 0,
            static_cast<int32>(t.aligned)};
}
// Of a tensor whose rows are queries, or keys.
__device__ __forceinline__ Matrix query_matrix(const Tensor& t,
                                               const Entry& entry,
                                               int32 head,
                                               int32 cols) {
    return matrix(t, entry.batch, head, entry.first_q, entry.seqlen_q, cols);
}
__device__ __forceinline__ Matrix key_matrix(const Tensor& t,
                                             const Entry& entry,
                                             int32 head,
                                             int32 cols) {
    return matrix(t, entry.batch, head, entry.first_kv, entry.seqlen_kv, cols);
}

// The (seq,) vector of a head.
struct Vector {
    Accum* data;
    int64 stride;

    __device__ __forceinline__ Accum* at(int32 row) const { return data + row * stride; }
};
__device__ __forceinline__ Vector vector(const RowTensor& t, const Entry& entry, int32 head) {
    return {static_cast<Accum*>(t.data) + entry.batch * t.stride_batch + head * t.stride_head +
                entry.first_q * t.stride_seq,
            t.stride_seq};
}

// The number of a head.
__device__ __forceinline__ Accum* head_value(const HeadTensor& t, int64 batch, int32 head) {
    return static_cast<Accum*>(t.data) + batch * t.stride_batch + head * t.stride_head;
}

// Round and write one element of a (batch, head, query, key) array.
__device__ __forceinline__ void write_pair(
    const PairTensor& t, int64 batch, int32 head, int32 query, int32 key, Accum value) {
    const int64 at =
        batch * t.stride_batch + head * t.stride_head + query * t.stride_query + key * t.stride_key;
    if (t.wide) {
        hw::store(static_cast<Accum*>(t.data) + at, value);
    } else {
        hw::store(static_cast<Element*>(t.data) + at, narrow<Element>(value));
    }
}
