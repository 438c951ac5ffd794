// SPDX-License-Identifier: Apache-2.0
// Faults on purpose, one a kernel: a tool of compute-sanitizer that stays silent about its own has
// not been looking. bench/sanitize.py runs them with one block of kThreads threads.

constexpr int kThreads = 64;

// memcheck: x holds n elements, n < kThreads, and the last thread to write is one past the end.
extern "C" __global__ void overrun(int* x, int n) {
    const int i = threadIdx.x;
    if (i <= n) x[i] = i;
}

// racecheck: no barrier between the writes and the reads of other warps' elements.
extern "C" __global__ void race(int* x, int n) {
    __shared__ int elements[kThreads];
    const int i = threadIdx.x;
    elements[i] = i;
    if (i < n) x[i] = elements[kThreads - 1 - i];
}

// initcheck: nobody has written x.
extern "C" __global__ void unwritten(int* x, int n) {
    const int i = threadIdx.x;
    if (i < n) x[i] = x[i] + 1;
}

// synccheck: half of the second warp has left when the other half waits.
extern "C" __global__ void barrier(int* x, int n) {
    const int i = threadIdx.x;
    if (i < 48) {
        if (i < n) x[i] = i;
        __syncthreads();
        if (i < n) x[i] += 1;
    }
}
