// SPDX-License-Identifier: Apache-2.0
// Copies of arrays for kernels that move rows by 16 bytes, and of what they left there back:
//
//     to[r][d] = from[r][d] for d < cols, and 0 behind that, as far as a row of `to` has elements
//
// A launch makes several copies, up to kMaxCopies. Each is cut into parts of kItems groups of
// 16 bytes; a block takes a part, and a thread every kThreads-th group of it:
//
//     row    |  0  |  1  |  2  |  3  | ...        neighbouring threads have neighbouring groups,
//     groups | ... | ..[ part  ]..   | ...        across the ends of rows
//
// One side moves by vectors: the place in workspace. The other has any strides, and is moved
// element by element; the sectors that a warp does so are its own, and come from L1 but once.
//
// Budget: memory. Only where a part begins is found by divisions of 64 bits.
#include "hw/memory.cuh"
#include "parts/types.cuh"

using Element = plan::Element;

constexpr int kGroup = 16 / sizeof(Element);
constexpr int kItems = plan::kThreads * plan::kGroupsPerThread;  // of a part

// An (outer, middle, inner, dim) array with any strides, counted in elements.
struct Side {
    Element* data;
    int64 outer, middle, inner, dim;  // strides
    int64 vectors;                    // 1: groups of kGroup elements of a row can be moved at once
};

struct Copy {
    Side from, to;
    int64 rows;           // outer * middle * inner
    int32 middle, inner;  // lengths
    int32 cols;           // elements of a row of `from` that count
    int32 groups;         // of a row of `to`
};

struct RealignParams {
    Copy copies[plan::kMaxCopies];
    int64 parts;  // of them all
};
static_assert(sizeof(RealignParams) == plan::kParamsBytes, "realign.cu and params.py disagree");

// Where a row lies in the arrays.
struct Place {
    int64 outer;
    int32 middle, inner;

    __device__ __forceinline__ Element* in(const Side& s) const {
        return s.data + outer * s.outer + middle * s.middle + inner * s.inner;
    }
    // Of the row that comes so many rows later.
    __device__ __forceinline__ Place behind(const Copy& copy, int32 rows) const {
        const int32 i = inner + rows, m = middle + i / copy.inner;
        return {outer + m / copy.middle, m % copy.middle, i % copy.inner};
    }
};

using Group = hw::Vec<Element, kGroup>;

__device__ __forceinline__ Group load_group(const Copy& copy, const Place& at, int32 col) {
    const Element* const from = at.in(copy.from) + col * copy.from.dim;
    if (copy.from.vectors) return hw::load(reinterpret_cast<const Group*>(from));
    Group group = {};
#pragma unroll
    for (int e = 0; e < kGroup; ++e) {
        if (col + e < copy.cols) group.v[e] = hw::load(from + e * copy.from.dim);
    }
    return group;
}

__device__ __forceinline__ void store_group(const Copy& copy,
                                            const Place& at,
                                            int32 col,
                                            const Group& group) {
    Element* const to = at.in(copy.to) + col * copy.to.dim;
    if (copy.to.vectors) {
        hw::store(reinterpret_cast<Group*>(to), group);
        return;
    }
#pragma unroll
    for (int e = 0; e < kGroup; ++e) {
        if (col + e < copy.cols) hw::store(to + e * copy.to.dim, group.v[e]);
    }
}

__device__ __forceinline__ int64 parts_of(const Copy& copy) {
    return (copy.rows * copy.groups + kItems - 1) / kItems;
}

__device__ __forceinline__ void copy_part(const Copy& copy, int64 part) {
    const int64 first = part * kItems, row = first / copy.groups;
    const int64 slice = row / copy.inner, outer = slice / copy.middle;
    const Place begin = {outer, static_cast<int32>(slice - outer * copy.middle),
                         static_cast<int32>(row - slice * copy.inner)};
    const int32 skipped = static_cast<int32>(first - row * copy.groups);  // of the first row
    const int64 left = copy.rows * copy.groups - first;
#pragma unroll
    for (int item = 0; item < kItems; item += plan::kThreads) {
        const int32 index = item + static_cast<int>(threadIdx.x);
        if (index >= left) return;
        const int32 rows = (skipped + index) / copy.groups;
        const int32 col = (skipped + index - rows * copy.groups) * kGroup;
        const Place at = begin.behind(copy, rows);
        store_group(copy, at, col, load_group(copy, at, col));
    }
}

extern "C" __global__ void __launch_bounds__(plan::kThreads)
    realign(const __grid_constant__ RealignParams p) {
    for (int64 index = blockIdx.x; index < p.parts; index += gridDim.x) {
        int64 part = index;
        int n = 0;
        for (; part >= parts_of(p.copies[n]); ++n) part -= parts_of(p.copies[n]);
        copy_part(p.copies[n], part);
    }
}
