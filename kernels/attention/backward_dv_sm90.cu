// SPDX-License-Identifier: Apache-2.0
// dv on Hopper, where heads are wide: dv = P^T dout. A block owns keys of a head and walks the
// queries of its group that see them.
#include "parts/work.cuh"

constexpr bool kQueriesStay = false, kOfWeights = true;
using Own = Keys;
using Walked = Queries;

#include "attention/backward_apart_sm90.cuh"

extern "C" __global__ void __launch_bounds__(plan::kThreads, 1)
    backward_dv_sm90(const __grid_constant__ TmaParams p) {
    run(p);
}
