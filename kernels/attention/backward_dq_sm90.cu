// SPDX-License-Identifier: Apache-2.0
// dq on Hopper, where heads are wide: dq = scale * dS k. A block owns queries of a head and walks
// their keys.
#include "parts/work.cuh"

constexpr bool kQueriesStay = true, kOfWeights = false;
using Own = Queries;
using Walked = Keys;

#include "attention/backward_apart_sm90.cuh"

extern "C" __global__ void __launch_bounds__(plan::kThreads, 1)
    backward_dq_sm90(const __grid_constant__ TmaParams p) {
    run(p);
}
