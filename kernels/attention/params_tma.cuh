// SPDX-License-Identifier: Apache-2.0
// The run-time values of kernels that load by TMA: Params, and maps of arrays, with the axes (dim,
// seq, head, batch). cuflash/launch.py writes them behind Params, in the order of plan.boxes().
#pragma once
#include "attention/params.cuh"
#include "hw/tma.cuh"

struct TmaParams {
    Params call;
    hw::TensorMap q, k, v;
    hw::TensorMap o;  // out in the forward, dout in the backward
};

static_assert(sizeof(TmaParams) == plan::kParamsBytes, "params_tma.cuh and params.py disagree");
