// SPDX-License-Identifier: Apache-2.0
// dk on Hopper, where heads are wide: dk = scale * dS^T q. A block owns keys of a head and walks
// the queries of its group that see them.
#include "parts/work.cuh"

constexpr bool kQueriesStay = false, kOfWeights = false;
using Own = Keys;
using Walked = Queries;

#include "attention/backward_apart_sm90.cuh"

extern "C" __global__ void __launch_bounds__(plan::kThreads, 1)
    backward_dk_sm90(const __grid_constant__ TmaParams p) {
    run(p);
}
