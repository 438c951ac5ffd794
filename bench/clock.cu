// SPDX-License-Identifier: Apache-2.0
// What a measurement needs of the GPU itself; each is launched as one block of one thread.

using u64 = unsigned long long;

__device__ u64 nanoseconds() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// Keeps the stream busy, so that the host can queue what comes behind it.
extern "C" __global__ void hold(u64 duration) {
    const u64 begin = nanoseconds();
    while (nanoseconds() - begin < duration) {
    }
}

// Counts cycles of the SM for a while. The timer may advance in steps of a microsecond: both ends
// are taken at a step.
extern "C" __global__ void sm_clock(u64 duration, float* mhz) {
    const u64 before = nanoseconds();
    u64 begin = nanoseconds();
    while (begin == before) begin = nanoseconds();
    const long long first = clock64();
    u64 end = nanoseconds();
    while (end - begin < duration) end = nanoseconds();
    const long long last = clock64();
    *mhz = 1000.0f * static_cast<float>(last - first) / static_cast<float>(end - begin);
}
