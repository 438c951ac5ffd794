// SPDX-License-Identifier: Apache-2.0
// The result over all keys, from results over disjoint sets of them (parts):
//
//     lse[r] = log(sum_n exp(lse_n[r]))        out[r][d] = sum_n exp(lse_n[r] - lse[r]) out_n[r][d]
//
// A thread computes a group of kGroup elements of a row r. It walks the lses of the row for their
// maximum m and s = sum_n exp(lse_n - m), then the outs, whose weights are exp(lse_n - m) / s: with
// exp(lse_n - lse), an lse of 1e5 would cost three digits. A part of weight 0 is not read.
//
// More parts than kMaxParts take several launches. Had a launch to weigh its parts without knowing
// the lses to come, a NaN could get in that they drown. So all lses go first:
//
//     scan launches   lses 0..15 -> states,  lses 16..31 -> states, ...   one thread a row
//     then            outs 0..15 -> sums,    outs 16..31 -> sums,   ...   the last writes out, lse
//
// Budget: memory. Every out is read once; neighbouring threads have neighbouring groups of a row,
// and rows are numbered in the order of the arrays' axes. The lses of a row are read by each of its
// threads, out of the cache.
#include "hw/memory.cuh"
#include "parts/softmax.cuh"

using Element = plan::Element;
using Accum = AccumOf<Element>::type;
using Row = softmax::Row<Accum>;

constexpr int kGroup = 16 / sizeof(Element);

// An (outer, middle, inner, dim) array of Element and an (outer, middle, inner) array of Accum with
// any strides, counted in elements.
struct State {
    Element* out;
    int64 out_outer, out_middle, out_inner, out_dim;
    int64 vectors;  // 1: groups of kGroup elements of a row can be moved at once
    Accum* lse;
    int64 lse_outer, lse_middle, lse_inner;
};

struct MergeParams {
    State parts[plan::kMaxParts];
    State result;
    Accum* states;  // workspace (rows, 2): m and s; null if one launch does all
    Accum* sums;    // workspace (rows, dim): sums over the outs so far
    int64 rows;     // outer * middle * inner
    int64 middle, inner, dim;
    int64 groups;  // threads that share a row; 1 in a scan
    int32 count;   // of parts in this launch
    int32 scan;    // 1: add lses to `states`, and nothing else
    int32 first;   // 1: these are the first parts
    int32 last;    // 1: these are the last parts
};
static_assert(sizeof(MergeParams) == plan::kParamsBytes, "merge_states.cu and params.py disagree");

// Where a row lies in the arrays.
struct Place {
    int64 outer, middle, inner;
};
__device__ __forceinline__ Place place(const MergeParams& p, int64 row) {
    const int64 slice = row / p.inner, outer = slice / p.middle;
    return {outer, slice - outer * p.middle, row - slice * p.inner};
}
__device__ __forceinline__ Accum* lse_at(const State& s, const Place& at) {
    return s.lse + at.outer * s.lse_outer + at.middle * s.lse_middle + at.inner * s.lse_inner;
}
__device__ __forceinline__ Element* out_at(const State& s, const Place& at, int64 dim) {
    return s.out + at.outer * s.out_outer + at.middle * s.out_middle + at.inner * s.out_inner +
           dim * s.out_dim;
}

using Group = hw::Vec<Element, kGroup>;

// Elements `dim` to dim + kGroup - 1 of a row; 0 beyond its end.
__device__ __forceinline__ Group load_group(const MergeParams& p,
                                            const State& s,
                                            const Place& at,
                                            int64 dim) {
    const Element* from = out_at(s, at, dim);
    Group group = {};
    if (dim >= p.dim) return group;  // rows of no element have a thread for their lse
    if (s.vectors) return hw::load(reinterpret_cast<const Group*>(from));
#pragma unroll
    for (int e = 0; e < kGroup; ++e) {
        if (dim + e < p.dim) group.v[e] = hw::load(from + e * s.out_dim);
    }
    return group;
}
__device__ __forceinline__ void store_group(
    const MergeParams& p, const State& s, const Place& at, int64 dim, const Group& group) {
    Element* to = out_at(s, at, dim);
    if (dim >= p.dim) return;
    if (s.vectors) {
        hw::store(reinterpret_cast<Group*>(to), group);
        return;
    }
#pragma unroll
    for (int e = 0; e < kGroup; ++e) {
        if (dim + e < p.dim) hw::store(to + e * s.out_dim, group.v[e]);
    }
}

// m and s of all parts, or in a scan, of those so far.
__device__ __forceinline__ Row state(const MergeParams& p, int64 row, const Place& at) {
    Row state = Row::empty();
    if (p.states && !(p.scan && p.first)) {
        state = {hw::load(p.states + 2 * row), hw::load(p.states + 2 * row + 1)};
        if (!p.scan) return state;
    }
    for (int32 n = 0; n < p.count; ++n) {
        const Accum lse = hw::load(lse_at(p.parts[n], at));
        state.raise(lse);
        state.sum += softmax::exponential(lse - state.reference());
    }
    return state;
}

extern "C" __global__ void __launch_bounds__(plan::kThreads)
    merge_states(const __grid_constant__ MergeParams p) {
    const int64 step = static_cast<int64>(gridDim.x) * plan::kThreads;
    for (int64 index = static_cast<int64>(blockIdx.x) * plan::kThreads + threadIdx.x;
         index < p.rows * p.groups; index += step) {
        const int64 row = index / p.groups;
        const int64 dim = (index - row * p.groups) * kGroup;
        const Place at = place(p, row);
        const Row all = state(p, row, at);
        if (p.scan) {
            hw::store(p.states + 2 * row, all.maximum);
            hw::store(p.states + 2 * row + 1, all.sum);
            continue;
        }
        Accum sums[kGroup] = {};
        Accum* const kept = p.sums + row * p.dim + dim;
#pragma unroll
        for (int e = 0; e < kGroup; ++e) {
            if (!p.first && dim + e < p.dim) sums[e] = hw::load(kept + e);
        }
        for (int32 n = 0; n < p.count; ++n) {
            const Accum lse = hw::load(lse_at(p.parts[n], at));
            const Accum share = softmax::exponential(lse - all.reference());
            // The share may be 0 and s as well, or only the quotient.
            const Accum weight = share == Accum(0) ? Accum(0) : share / all.sum;
            if (weight == Accum(0)) continue;
            const Group group = load_group(p, p.parts[n], at, dim);
#pragma unroll
            for (int e = 0; e < kGroup; ++e) sums[e] += weight * widen(group.v[e]);
        }
        if (p.last) {
            Group group;
#pragma unroll
            for (int e = 0; e < kGroup; ++e) group.v[e] = narrow<Element>(sums[e]);
            store_group(p, p.result, at, dim, group);
            if (dim == 0) hw::store(lse_at(p.result, at), all.log_sum_exp(all.sum));
        } else {
#pragma unroll
            for (int e = 0; e < kGroup; ++e) {
                if (dim + e < p.dim) hw::store(kept + e, sums[e]);
            }
        }
    }
}
