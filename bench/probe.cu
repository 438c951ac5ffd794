// SPDX-License-Identifier: Apache-2.0
// Single instructions of an H200, with everything that goes into them and all that comes out.
// bench/probe.py launches these kernels and says what is recorded.
#include "hw/convert.cuh"
#include "hw/ldmatrix.cuh"
#include "hw/math.cuh"
#include "hw/mbarrier.cuh"
#include "hw/memory.cuh"
#include "hw/mma.cuh"
#include "hw/reduce.cuh"
#include "hw/sync.cuh"
#include "hw/tma.cuh"
#include "hw/wgmma.cuh"

namespace {

constexpr unsigned int kFill = 0xdeadbeef;
constexpr int kWords = 1024;        // of shared memory that TMA's probes look at
constexpr int kImageWords = 16384;  // of wgmma's operands
constexpr int kMatrixWords = 512;   // of ldmatrix' and stmatrix'

struct Dynamic {
    unsigned int words[1];
};

// The first multiple of 1024 in the dynamic shared memory, which has 1024 bytes to spare: swizzles
// depend on the address.
__device__ unsigned char* base() {
    auto* bytes = reinterpret_cast<unsigned char*>(hw::shared_memory<Dynamic>().words);
    return bytes + (-reinterpret_cast<unsigned long long>(bytes) & 1023);
}

__device__ void copy(void* to, const void* from, int words) {
    for (int i = threadIdx.x; i < words; i += blockDim.x) {
        static_cast<unsigned int*>(to)[i] = static_cast<const unsigned int*>(from)[i];
    }
    hw::fence_proxy_async();
    __syncthreads();
}

// Fills shared memory and returns a barrier behind it, in the phase in which so many bytes arrive.
__device__ hw::MBarrier& expect(int bytes) {
    auto& arrived = *reinterpret_cast<hw::MBarrier*>(base() + 4 * kWords);
    for (int i = threadIdx.x; i < kWords; i += blockDim.x) {
        reinterpret_cast<unsigned int*>(base())[i] = kFill;
    }
    hw::fence_proxy_async();
    if (threadIdx.x == 0) {
        hw::mbarrier_init(arrived, 1);
        hw::fence_mbarrier_init();
        hw::mbarrier_arrive_expect_tx(arrived, bytes);
    }
    __syncthreads();
    return arrived;
}

template <class T>
__device__ void mma(const unsigned int* a, const unsigned int* b, const float* c, float* d) {
    const int lane = threadIdx.x;
    unsigned int fragment_a[4], fragment_b[2];
    float sum[4];
    for (int i = 0; i < 4; i++) fragment_a[i] = a[4 * lane + i];
    for (int i = 0; i < 2; i++) fragment_b[i] = b[2 * lane + i];
    for (int i = 0; i < 4; i++) sum[i] = c[4 * lane + i];
    hw::mma_m16n8k16<T>(sum, fragment_a, fragment_b);
    for (int i = 0; i < 4; i++) d[4 * lane + i] = sum[i];
}

template <bool Trans, int N>
__device__ void ldmatrix(const unsigned int* image, const int* offsets, unsigned int* registers) {
    copy(base(), image, kMatrixWords);
    unsigned int r[N];
    hw::ldmatrix<Trans>(r, base() + offsets[threadIdx.x]);
    for (int i = 0; i < N; i++) registers[N * threadIdx.x + i] = r[i];
}

template <bool Trans, int N>
__device__ void stmatrix(const unsigned int* registers, const int* offsets, unsigned int* image) {
    copy(base(), image, kMatrixWords);
    unsigned int r[N];
    for (int i = 0; i < N; i++) r[i] = registers[N * threadIdx.x + i];
    hw::stmatrix<Trans>(base() + offsets[threadIdx.x], r);
    __syncwarp();
    copy(image, base(), kMatrixWords);
}

struct Operand {
    int offset, leading, stride, swizzle;
};
__device__ unsigned long long descriptor(const Operand& x) {
    return hw::wgmma_descriptor(base() + x.offset, x.leading, x.stride,
                                static_cast<hw::Swizzle>(x.swizzle));
}

// What a is: in shared memory, K-major and MN-major, or in registers.
enum A { kK, kMn, kRegisters };

template <class T, int N, A Where, bool TransB>
__device__ void wgmma(const unsigned int* image,
                      const Operand* operands,
                      const unsigned int* a,
                      int accumulate,
                      float before,
                      float* after) {
    copy(base(), image, kImageWords);
    float d[N / 2];
    unsigned int fragment[4];
    for (int i = 0; i < N / 2; i++) d[i] = before;
    for (int i = 0; i < 4; i++) fragment[i] = a[4 * threadIdx.x + i];
    const unsigned long long in_a = descriptor(operands[0]), in_b = descriptor(operands[1]);
    hw::pin(d);
    hw::pin(fragment);
    hw::wgmma_fence();
    if constexpr (Where == kRegisters) {
        hw::wgmma<T, N, TransB>(d, fragment, in_b, accumulate != 0);
    } else {
        hw::wgmma<T, N, Where == kMn, TransB>(d, in_a, in_b, accumulate != 0);
    }
    hw::wgmma_commit();
    hw::wgmma_wait<0>();
    hw::pin(d);
    hw::pin(fragment);
    for (int i = 0; i < N / 2; i++) after[N / 2 * threadIdx.x + i] = d[i];
}

template <class F>
__device__ void map(const float* x, float* y, int n, F f) {
    const int i = blockDim.x * blockIdx.x + threadIdx.x;
    if (i < n) y[i] = f(x[i]);
}

template <class T>
__device__ void pack2(const float* low, const float* high, unsigned int* y, int n) {
    const int i = blockDim.x * blockIdx.x + threadIdx.x;
    if (i < n) y[i] = hw::pack2<T>(low[i], high[i]);
}

}  // namespace

#define MMA(T)                                                                       \
    extern "C" __global__ void mma_##T(const unsigned int* a, const unsigned int* b, \
                                       const float* c, float* d) {                   \
        mma<hw::T>(a, b, c, d);                                                      \
    }
MMA(float16)
MMA(bfloat16)

#define MATRIX(N, Trans)                                                                          \
    extern "C" __global__ void ldmatrix_x##N##_##Trans(                                           \
        const unsigned int* image, const int* offsets, unsigned int* registers) {                 \
        ldmatrix<Trans, N>(image, offsets, registers);                                            \
    }                                                                                             \
    extern "C" __global__ void stmatrix_x##N##_##Trans(const unsigned int* registers,             \
                                                       const int* offsets, unsigned int* image) { \
        stmatrix<Trans, N>(registers, offsets, image);                                            \
    }
MATRIX(1, 0)
MATRIX(2, 0)
MATRIX(4, 0)
MATRIX(1, 1)
MATRIX(2, 1)
MATRIX(4, 1)

#define WGMMA(T, N, Where, TransB)                                                                 \
    extern "C" __global__ void __launch_bounds__(128, 1) wgmma_##T##_##N##_##Where##_##TransB(     \
        const unsigned int* image, const Operand* operands, const unsigned int* a, int accumulate, \
        float before, float* after) {                                                              \
        wgmma<hw::T, N, Where, TransB>(image, operands, a, accumulate, before, after);             \
    }
#define WGMMA_OF(N)                  \
    WGMMA(float16, N, kK, 0)         \
    WGMMA(float16, N, kMn, 1)        \
    WGMMA(float16, N, kRegisters, 0) \
    WGMMA(float16, N, kRegisters, 1)
WGMMA_OF(8)
WGMMA_OF(24)
WGMMA_OF(80)
WGMMA_OF(96)
WGMMA_OF(128)
WGMMA_OF(192)
WGMMA_OF(256)
WGMMA(float16, 96, kK, 1)
WGMMA(float16, 96, kMn, 0)
WGMMA(bfloat16, 96, kRegisters, 0)
WGMMA(bfloat16, 96, kRegisters, 1)

// A call with as many coordinates as the tensor has dimensions.
#define OF_RANK(f, ...)                                        \
    if (rank == 1) f(__VA_ARGS__, at[0]);                      \
    if (rank == 2) f(__VA_ARGS__, at[0], at[1]);               \
    if (rank == 3) f(__VA_ARGS__, at[0], at[1], at[2]);        \
    if (rank == 4) f(__VA_ARGS__, at[0], at[1], at[2], at[3]); \
    if (rank == 5) f(__VA_ARGS__, at[0], at[1], at[2], at[3], at[4])

#define TMA_LOAD(name, function)                                                                 \
    extern "C" __global__ void name(const __grid_constant__ hw::TensorMap tensor, int rank,      \
                                    const int* at, int offset, int bytes, unsigned int* words) { \
        hw::MBarrier& arrived = expect(bytes);                                                   \
        if (threadIdx.x == 0) {                                                                  \
            hw::prefetch(tensor);                                                                \
            OF_RANK(function, base() + offset, tensor, arrived);                                 \
        }                                                                                        \
        hw::mbarrier_wait(arrived, 0);                                                           \
        copy(words, base(), kWords);                                                             \
    }
TMA_LOAD(tma_load, hw::tma_load)
TMA_LOAD(tma_load_evict_first, hw::tma_load<hw::CacheHint::kEvictFirst>)
TMA_LOAD(tma_load_evict_last, hw::tma_load<hw::CacheHint::kEvictLast>)

#define TMA_STORE(name, function)                                                           \
    extern "C" __global__ void name(const __grid_constant__ hw::TensorMap tensor, int rank, \
                                    const int* at, int offset, const unsigned int* words) { \
        copy(base(), words, kWords);                                                        \
        if (threadIdx.x == 0) {                                                             \
            OF_RANK(function, tensor, base() + offset);                                     \
            hw::bulk_commit();                                                              \
            hw::bulk_wait<0>();                                                             \
        }                                                                                   \
    }
TMA_STORE(tma_store, hw::tma_store)
TMA_STORE(tma_reduce_add, hw::tma_reduce_add)

extern "C" __global__ void bulk_load(
    const unsigned char* global, int global_offset, int offset, int bytes, unsigned int* words) {
    hw::MBarrier& arrived = expect(bytes);
    if (threadIdx.x == 0) {
        hw::bulk_load(base() + offset, global + global_offset, bytes, arrived);
    }
    hw::mbarrier_wait(arrived, 0);
    copy(words, base(), kWords);
}

extern "C" __global__ void bulk_store(
    unsigned char* global, int global_offset, int offset, int bytes, const unsigned int* words) {
    copy(base(), words, kWords);
    if (threadIdx.x == 0) {
        hw::bulk_store(global + global_offset, base() + offset, bytes);
        hw::bulk_commit();
        hw::bulk_wait_read<0>();
        hw::bulk_wait<0>();
    }
}

extern "C" __global__ void bulk_reduce_add(
    unsigned char* global, int global_offset, int offset, int bytes, const unsigned int* words) {
    copy(base(), words, kWords);
    if (threadIdx.x == 0) {
        hw::bulk_reduce_add(reinterpret_cast<float*>(global + global_offset),
                            reinterpret_cast<const float*>(base() + offset), bytes);
        hw::bulk_commit();
        hw::bulk_wait<0>();
    }
}

extern "C" __global__ void reduce_add_1(float* global, const int* at, const float* values) {
    hw::reduce_add(global + at[threadIdx.x], values[threadIdx.x]);
}

#define REDUCE_ADD(N)                                                                              \
    extern "C" __global__ void reduce_add_##N(float* global, const int* at, const float* values) { \
        float v[N];                                                                                \
        for (int i = 0; i < N; i++) v[i] = values[N * threadIdx.x + i];                            \
        hw::reduce_add(global + at[threadIdx.x], v);                                               \
    }
REDUCE_ADD(2)
REDUCE_ADD(4)

extern "C" __global__ void exp2_approx(const float* x, float* y, int n) {
    map(x, y, n, [](float a) { return hw::exp2_approx(a); });
}
extern "C" __global__ void log2_approx(const float* x, float* y, int n) {
    map(x, y, n, [](float a) { return hw::log2_approx(a); });
}
extern "C" __global__ void rcp_approx(const float* x, float* y, int n) {
    map(x, y, n, [](float a) { return hw::rcp_approx(a); });
}

#define PACK2(T)                                                                               \
    extern "C" __global__ void pack2_##T(const float* low, const float* high, unsigned int* y, \
                                         int n) {                                              \
        pack2<hw::T>(low, high, y, n);                                                         \
    }
PACK2(float16)
PACK2(bfloat16)

extern "C" __global__ void elect_one(int* elected) { elected[threadIdx.x] = hw::elect_one(); }
