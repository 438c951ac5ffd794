// SPDX-License-Identifier: Apache-2.0
// float -> 16 bits -> float, four at a time.
#include "hw/memory.cuh"
#include "hw/convert.cuh"

using Element = plan::Element;

struct Params {
    const float* x;
    Element* narrow;
    float* wide;  // narrow, back again
    int n;        // a multiple of four
};

extern "C" __global__ void convert(const __grid_constant__ Params p) {
    using Floats = hw::Vec<float, 4>;
    using Elements = hw::Vec<Element, 4>;
    const int step = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.n / 4; i += step) {
        const Floats x = hw::load(reinterpret_cast<const Floats*>(p.x) + i);
        Elements narrow;
        for (int j = 0; j < 4; ++j) narrow.v[j] = hw::from_float<Element>(x.v[j]);
        hw::store(reinterpret_cast<Elements*>(p.narrow) + i, narrow);
        Floats wide;
        for (int j = 0; j < 4; ++j) wide.v[j] = hw::to_float(narrow.v[j]);
        hw::store(reinterpret_cast<Floats*>(p.wide) + i, wide);
    }
}
