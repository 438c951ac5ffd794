// SPDX-License-Identifier: Apache-2.0
// The exports of a kernel's library. The last include of a translation unit, which defines
// CUFLASH_KERNEL (the kernel) and CUFLASH_PARAMS (the type of its one parameter).
#pragma once
#ifdef CUFLASH_INSTRUMENTED
#include "host/instrument.h"
#endif

#define HOST_EXPORT extern "C" __attribute__((visibility("default")))

// Compared with what the launch passes, before anything runs.
HOST_EXPORT size_t cuflash_params_bytes() { return sizeof(CUFLASH_PARAMS); }

// The kernel, for the thread on whose stack this is called.
HOST_EXPORT void cuflash_entry(const void* params) {
    CUFLASH_KERNEL(*static_cast<const CUFLASH_PARAMS*>(params));
}

#undef HOST_EXPORT
