// SPDX-License-Identifier: Apache-2.0
// What the backward pass knows of a row of scores, and the gradient of one score:
//
//     P = exp(score - lse),   dscore = P * (dP - delta + dlse)
#pragma once
#include "hw/memory.cuh"
#include "parts/operand.cuh"
#include "parts/softmax.cuh"

struct RowGradient {
    Accum lse, delta, dlse;

    // A row past the end, and one that sees no key (lse = -inf): all probabilities are 0, and what
    // arrives through lse goes nowhere.
    __device__ static __forceinline__ RowGradient none() {
        return {softmax::infinity<Accum>(), Accum(0), Accum(0)};
    }

    __device__ static __forceinline__ RowGradient load(const Params& p,
                                                       const Entry& entry,
                                                       int32 head,
                                                       int32 row) {
        if (row >= entry.seqlen_q) return none();
        const Accum lse = hw::load(vector(p.lse, entry, head).at(row));
        if (lse == -softmax::infinity<Accum>()) return none();
        const Accum delta = hw::load(vector(p.delta, entry, head).at(row));
        Accum dlse = 0;
        if (p.dlse.data) dlse = hw::load(vector(p.dlse, entry, head).at(row));
        return {lse, delta, dlse};
    }

    __device__ __forceinline__ Accum probability(Accum score) const {
        return softmax::exponential(score - lse);
    }

    // In this order: dP - delta is exactly zero where all the weight is on one key, and dlse then
    // comes through unharmed, which dP - (delta - dlse) would round away.
    __device__ __forceinline__ Accum dscore(Accum probability, Accum dprobability) const {
        return probability * ((dprobability - delta) + dlse);
    }
};
