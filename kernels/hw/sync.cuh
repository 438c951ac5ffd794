// SPDX-License-Identifier: Apache-2.0
// Barriers of parts of a block, order between the two ways to shared memory, and what steers the
// compiler. Those that order memory say "memory", so that the compiler moves no access across.
#pragma once

namespace hw {

// Waits until `threads` threads, a multiple of 32, have come to barrier `id`, which is 1 to 15
// where
// __syncthreads is used too. PTX ISA, bar.sync; whole warps.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts as come to the barrier and goes on. PTX ISA, bar.arrive; whole warps.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// True in one lane, always the same one. Unlike a comparison with the lane's number, the compiler
// knows from it that one thread is active. PTX ISA, elect.sync, sm_90; a full warp.
__device__ __forceinline__ bool elect_one() {
    unsigned int elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(elected)::"memory");
    return elected != 0;
}

// What the thread did in shared memory, or knows of through a barrier, comes before what the TMA
// unit and wgmma do there at its later request. PTX ISA, fence.proxy.async, sm_90; any thread.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The number of registers that setmaxnreg takes.
template <int Registers>
constexpr bool kIsRegisterCount = Registers >= 24 && Registers <= 256 && Registers % 8 == 0;

// Waits until the block has so many registers a thread free, and takes them. The block never has
// more than it was started with. PTX ISA, setmaxnreg.inc, sm_90a; all warps of a warpgroup.
template <int Registers>
__device__ __forceinline__ void registers_increase() {
    static_assert(kIsRegisterCount<Registers>, "24 to 256 registers, a multiple of 8");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Leaves the registers above so many to other warpgroups. PTX ISA, setmaxnreg.dec, sm_90a; all
// warps of a warpgroup.
template <int Registers>
__device__ __forceinline__ void registers_decrease() {
    static_assert(kIsRegisterCount<Registers>, "24 to 256 registers, a multiple of 8");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// The largest of three, which is one instruction on sm_90; any thread.
__device__ __forceinline__ int max3(int a, int b, int c) { return max(max(a, b), c); }
__device__ __forceinline__ unsigned max3(unsigned a, unsigned b, unsigned c) {
    return max(max(a, b), c);
}

// The same number, of which the compiler does not know that it is: what follows from it is worked
// out here, instead of before a loop and kept in registers. No instruction; any thread.
__device__ __forceinline__ int forget(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
__device__ __forceinline__ unsigned forget(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}

// The registers have their values here, as far as the compiler can tell: it moves no use of them
// across. To stand before wgmma_fence and after wgmma_wait for registers that wgmma reads or writes
// in between. No instruction; any thread.
template <int N>
__device__ __forceinline__ void pin(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}

template <int N>
__device__ __forceinline__ void pin(unsigned int (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(r[i])::"memory");
}

}  // namespace hw
