// SPDX-License-Identifier: Apache-2.0
// The dialect of CUDA C++ that the kernels are written in, for the machine's C++ compiler:
// keywords, built-in variables and functions. The first include of a translation unit, so that the
// system headers come before the macros.
//
// Functions that wait or communicate take their place in the source by default arguments, so that
// the executor can tell one call from another and name them in reports. It is stricter than a GPU:
// threads that return while others wait for them are an error (a GPU lets the rest go on). Lanes
// that a small last warp never had are not waited for.
#pragma once
#include <math.h>
#include <stdio.h>  // printf, for those who look for a mistake
#include <string.h>

#include "executor.h"

#define __global__
#define __device__
#define __host__
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#ifdef __GNUC__
#pragma GCC diagnostic ignored "-Wunknown-pragmas"  // #pragma unroll
#endif

#define threadIdx (::host::self().thread)
#define blockIdx (::host::self().block)
#define blockDim (::host::self().block_dim)
#define gridDim (::host::self().grid_dim)
constexpr int warpSize = host::kWarpSize;

// The file and line of the caller of a function that ends with these parameters.
#define HOST_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// A function whose accesses are told to the executor in another way, where they are told at all.
#define HOST_UNWATCHED __attribute__((no_sanitize("thread")))

#ifdef CUFLASH_INSTRUMENTED
// What kernels call by these names is told, see host/instrument.h: the compiler may not do it.
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t bytes);
extern "C" void* __tsan_memmove(void* to, const void* from, size_t bytes);
extern "C" void* __tsan_memset(void* to, int value, size_t bytes);
#define memcpy(...) __tsan_memcpy(__VA_ARGS__)
#define memmove(...) __tsan_memmove(__VA_ARGS__)
#define memset(...) __tsan_memset(__VA_ARGS__)
#endif

namespace host {

// A reinterpretation of the leading bytes; zeros where To is longer.
template <class To, class From>
inline To bits_as(From from) {
    To to;
    __builtin_memset(&to, 0, sizeof(to));
    __builtin_memcpy(&to, &from, sizeof(to) < sizeof(from) ? sizeof(to) : sizeof(from));
    return to;
}

inline int lane() { return static_cast<int>(self().thread.x % kWarpSize); }

template <class T>
inline T exchange(Place place, unsigned int mask, T value, int source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    return bits_as<T>(
        self().executor->warp_exchange(place, mask, bits_as<uint64_t>(value), source));
}

// Shuffles group the lanes into segments of `width`; one from outside gives the lane's own value.
inline int source_within(int source, int first, int last) {
    return source < first || source > last ? lane() : source;
}

}  // namespace host

inline void __syncthreads(HOST_PLACE) {
    host::self().executor->block_barrier({"__syncthreads", file, line}, false);
}
inline int __syncthreads_count(int predicate, HOST_PLACE) {
    return host::self().executor->block_barrier({"__syncthreads_count", file, line},
                                                predicate != 0);
}
inline int __syncthreads_or(int predicate, HOST_PLACE) {
    return host::self().executor->block_barrier({"__syncthreads_or", file, line}, predicate != 0) !=
           0;
}
inline int __syncthreads_and(int predicate, HOST_PLACE) {
    return host::self().executor->block_barrier({"__syncthreads_and", file, line},
                                                predicate == 0) == 0;
}

inline void __syncwarp(unsigned int mask = 0xffffffff, HOST_PLACE) {
    host::self().executor->warp_barrier({"__syncwarp", file, line}, mask);
}
inline unsigned int __ballot_sync(unsigned int mask, int predicate, HOST_PLACE) {
    return host::self().executor->warp_vote({"__ballot_sync", file, line}, mask, predicate != 0);
}
inline int __any_sync(unsigned int mask, int predicate, HOST_PLACE) {
    return host::self().executor->warp_vote({"__any_sync", file, line}, mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned int mask, int predicate, HOST_PLACE) {
    return host::self().executor->warp_vote({"__all_sync", file, line}, mask, predicate == 0) == 0;
}

template <class T>
inline T __shfl_sync(unsigned int mask, T value, int source, int width = 32, HOST_PLACE) {
    const int first = host::lane() & -width;
    return host::exchange({"__shfl_sync", file, line}, mask, value, first + (source & (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(unsigned int mask, T value, int lanes, int width = 32, HOST_PLACE) {
    // As on a GPU, a lane may read from an earlier segment, not from a later one.
    const int last = host::lane() | (width - 1);
    const int source = host::source_within(host::lane() ^ lanes, 0, last);
    return host::exchange({"__shfl_xor_sync", file, line}, mask, value, source);
}
template <class T>
inline T __shfl_up_sync(
    unsigned int mask, T value, unsigned int lanes, int width = 32, HOST_PLACE) {
    const int first = host::lane() & -width;
    const int source = host::source_within(host::lane() - static_cast<int>(lanes), first, 31);
    return host::exchange({"__shfl_up_sync", file, line}, mask, value, source);
}
template <class T>
inline T __shfl_down_sync(
    unsigned int mask, T value, unsigned int lanes, int width = 32, HOST_PLACE) {
    const int last = host::lane() | (width - 1);
    const int source = host::source_within(host::lane() + static_cast<int>(lanes), 0, last);
    return host::exchange({"__shfl_down_sync", file, line}, mask, value, source);
}

// Threads of a block run one at a time and give way only in the functions of this file, so plain
// code is atomic. Giving way before each atomic operation lets other threads win the race, and
// lets a loop that waits for another thread end. The address may be in shared or global memory.
namespace host {

template <class T, class Change>
HOST_UNWATCHED inline T atomic(T* address, Place place, Change change) {
    Thread& thread = self();
    thread.executor->yield(place);
    const uintptr_t number = reinterpret_cast<uintptr_t>(address);
    if (number - reinterpret_cast<uintptr_t>(thread.shared) >= thread.shared_bytes) {
        thread.executor->find_range(Access::kStore, number, sizeof(T), alignof(T), place);
    }
    thread.executor->atomic(place, address, sizeof(T));
    const T old = *address;
    *address = change(old);
    return old;
}

// Integers wrap around.
inline int sum(int a, int b) {
    return static_cast<int>(static_cast<unsigned int>(a) + static_cast<unsigned int>(b));
}
template <class T>
inline T sum(T a, T b) {
    return a + b;
}

}  // namespace host

#define HOST_ATOMIC(name, T, result)                                              \
    inline T name(T* address, T value, HOST_PLACE) {                              \
        return host::atomic(address, {#name, file, line},                         \
                            [=]([[maybe_unused]] T old) -> T { return result; }); \
    }
HOST_ATOMIC(atomicAdd, int, host::sum(old, value))
HOST_ATOMIC(atomicAdd, unsigned int, host::sum(old, value))
HOST_ATOMIC(atomicAdd, unsigned long long, host::sum(old, value))
HOST_ATOMIC(atomicAdd, float, host::sum(old, value))
HOST_ATOMIC(atomicAdd, double, host::sum(old, value))
HOST_ATOMIC(atomicMax, int, old < value ? value : old)
HOST_ATOMIC(atomicMax, unsigned int, old < value ? value : old)
HOST_ATOMIC(atomicMin, int, value < old ? value : old)
HOST_ATOMIC(atomicMin, unsigned int, value < old ? value : old)
HOST_ATOMIC(atomicExch, int, value)
HOST_ATOMIC(atomicExch, unsigned int, value)
#undef HOST_ATOMIC

template <class T>
inline T atomicCAS(T* address, T expected, T value, HOST_PLACE) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "compares 4 or 8 bytes");
    return host::atomic(address, {"atomicCAS", file, line},
                        [=](T old) { return old == expected ? value : old; });
}

inline void __threadfence(HOST_PLACE) {
    host::self().executor->fence({"__threadfence", file, line});
}
inline void __threadfence_block(HOST_PLACE) {
    host::self().executor->fence({"__threadfence_block", file, line});
}

#define HOST_MIN_MAX(T)                              \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; }
HOST_MIN_MAX(int)
HOST_MIN_MAX(unsigned int)
HOST_MIN_MAX(long)
HOST_MIN_MAX(unsigned long)
HOST_MIN_MAX(long long)
HOST_MIN_MAX(unsigned long long)
#undef HOST_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }

// Kernels are compiled without contraction, so a product and a sum stay two roundings.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
// The quick approximations of a GPU, computed accurately.
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }

inline float __int_as_float(int x) { return host::bits_as<float>(x); }
inline float __uint_as_float(unsigned int x) { return host::bits_as<float>(x); }
inline int __float_as_int(float x) { return host::bits_as<int>(x); }
inline unsigned int __float_as_uint(float x) { return host::bits_as<unsigned int>(x); }
inline double __longlong_as_double(long long x) { return host::bits_as<double>(x); }
inline long long __double_as_longlong(double x) { return host::bits_as<long long>(x); }

inline unsigned int __umulhi(unsigned int a, unsigned int b) {
    return static_cast<unsigned int>(static_cast<unsigned long long>(a) * b >> 32);
}
inline unsigned int __dp4a(unsigned int a, unsigned int b, unsigned int sum) {
    for (int i = 0; i < 32; i += 8) sum += (a >> i & 255) * (b >> i & 255);
    return sum;
}
inline int __popc(unsigned int x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned int>(x)) : 32; }
inline int __clzll(long long x) {
    return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64;
}
