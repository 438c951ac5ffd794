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
// One side is moved by vectors: the place in workspace. The other has any strides and is moved
// element by element; neighbours find what a sector holds in L1.
//
// Budget: memory, and divisions, of which only those for where a part begins are of 64 bits. A
// thread loads all its groups before it stores any, so that enough bytes are on their way.
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

// A group on its way.
struct Load {
    Group group;
    Element* to;
    int32 cols;  // elements of it that count; none if there is no such group
};

__device__ __forceinline__ Load load(const Copy& copy, const Place& at, int32 col) {
    Load load = {{}, at.in(copy.to) + col * copy.to.dim, copy.cols - col};
    const Element* const from = at.in(copy.from) + col * copy.from.dim;
    if (copy.from.vectors) {
        load.group = hw::load(reinterpret_cast<const Group*>(from));
        return load;
    }
#pragma unroll
    for (int e = 0; e < kGroup; ++e) {
        if (e < load.cols) load.group.v[e] = hw::load(from + e * copy.from.dim);
    }
    return load;
}

__device__ __forceinline__ void store(const Copy& copy, const Load& load) {
    if (copy.to.vectors) {
        if (load.cols > 0) hw::store(reinterpret_cast<Group*>(load.to), load.group);
        return;
    }
#pragma unroll
    for (int e = 0; e < kGroup; ++e) {
        if (e < load.cols) hw::store(load.to + e * copy.to.dim, load.group.v[e]);
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
    Load loads[plan::kGroupsPerThread];
#pragma unroll
    for (int n = 0; n < plan::kGroupsPerThread; ++n) {  // all are on their way at once
        const int32 index = n * plan::kThreads + static_cast<int>(threadIdx.x);
        const int32 rows = (skipped + index) / copy.groups;
        const int32 col = (skipped + index - rows * copy.groups) * kGroup;
        loads[n].cols = 0;
        if (index < left) loads[n] = load(copy, begin.behind(copy, rows), col);
    }
#pragma unroll
    for (int n = 0; n < plan::kGroupsPerThread; ++n) store(copy, loads[n]);
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
