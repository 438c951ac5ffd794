// SPDX-License-Identifier: Apache-2.0
// Access to memory: the block's dynamic shared memory as one struct, and loads and stores of
// global memory. On the CPU each of them is checked against the launch's arrays.
#pragma once

namespace hw {

// N values that are loaded or stored by one instruction.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
    T v[N];
};

// The dynamic shared memory of the block; the launch gives it sizeof(Struct) bytes.
template <class Struct>
__device__ __forceinline__ Struct& shared_memory() {
    extern __shared__ __align__(1024) unsigned char bytes[];
    return *reinterpret_cast<Struct*>(bytes);
}

// What instructions take as an address in shared memory, of a pointer to there.
__device__ __forceinline__ unsigned int shared_address(const void* p) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(p));
}

template <class T>
__device__ __forceinline__ T load(const T* p) {
    return *p;
}

template <class T>
__device__ __forceinline__ void store(T* p, T value) {
    *p = value;
}

}  // namespace hw
