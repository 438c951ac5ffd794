// SPDX-License-Identifier: Apache-2.0
// One head of one batch entry: the part of an operand that a block works on.
#pragma once
#include "attention/params.cuh"

using Element = plan::Element;
using Accum = AccumOf<Element>::type;

constexpr int kGroup = 16 / sizeof(Accum);  // accumulators in a 16-byte shared memory access

// The (seq, dim) matrix of a head.
struct Matrix {
    Element* data;
    int64 stride_row, stride_col;
    int32 rows, cols;
    bool vectors;  // groups of kGroup elements of a row can be moved at once
};
__device__ __forceinline__ Matrix
matrix(const Tensor& t, int64 batch, int32 head, int32 rows, int32 cols) {
    return {static_cast<Element*>(t.data) + batch * t.stride_batch + head * t.stride_head,
            t.stride_seq,
            t.stride_dim,
            rows,
            cols,
            t.vectors != 0};
}

// The (seq,) vector of a head.
struct Vector {
    Accum* data;
    int64 stride;

    __device__ __forceinline__ Accum* at(int32 row) const { return data + row * stride; }
};
__device__ __forceinline__ Vector vector(const RowTensor& t, int64 batch, int32 head) {
    return {static_cast<Accum*>(t.data) + batch * t.stride_batch + head * t.stride_head,
            t.stride_seq};
}
