// SPDX-License-Identifier: Apache-2.0
// What a kernel compiled for the CPU and the executor that runs it know of each other.
//
// Every CUDA thread is a fiber: a stack of its own and a place to go on from. Kernel and executor
// are separate shared libraries, and neither leaves a symbol for the loader to resolve in the
// other: the executor calls the kernel's exported entry point, and the kernel reaches the executor
// through the record `Thread`, which lies at the top of the stack that it is running on.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace host {

// Stacks are aligned to their size, so that any address in a frame leads to the record of the
// thread.
#ifdef __x86_64__
constexpr uintptr_t kStackBytes = 64 * 1024;
#else
constexpr uintptr_t kStackBytes = 256 * 1024;  // the guard below may be a page of 64 KiB
#endif

constexpr int kWarpSize = 32;

// A call in the source of a kernel; the fields are literals, which live as long as its library.
struct Place {
    const char* call;
    const char* file;
    int line;
};

struct Index {
    unsigned int x, y, z;
};

// A stretch [low, high) of global memory that a launch may access.
struct Range {
    uintptr_t low, high;
    const char* name;
    int writable;
};

enum class Access { kLoad, kStore, kAtomic };

// The groups of asynchronous copies that a thread commits and waits for.
enum class Queue { kCpAsync, kBulk };

// A copy that the asynchronous proxy makes: a stretch of memory, or a box of a tensor.
struct BulkCopy {
    enum Kind { kLoad, kStore, kAdd } kind;  // to shared memory, to global memory
    void* shared;
    void* global;              // a stretch
    int bytes;                 // of a stretch
    const unsigned char* map;  // a tensor's, 128 bytes; null for a stretch
    int rank;
    int coordinates[5];
    void* barrier;  // that a load completes on
};

enum class Element { kFloat16, kBfloat16 };

// One wgmma of a thread. `a` is null if that operand lies in shared memory.
struct WgmmaCall {
    float* d;
    const unsigned int* a;
    uint64_t a_descriptor, b_descriptor;
    int n;
    Element element;
    bool a_transposed, b_transposed, accumulate;
};

struct Thread;

// The services of the executor. All of them are called on the stack of a fiber.
struct Executor {
    // __syncthreads and its relatives: how many threads of the block passed true.
    int (*block_barrier)(Place place, bool predicate);
    // The lanes of `mask` meet. Returns the value that lane `source` brought, or all ones if that
    // lane is not in the mask.
    uint64_t (*warp_exchange)(Place place, unsigned int mask, uint64_t value, int source);
    // The lanes of `mask` meet. Returns the lanes that passed true.
    unsigned int (*warp_vote)(Place place, unsigned int mask, bool predicate);
    // __syncwarp: the lanes of `mask` meet, and see what the others wrote before.
    void (*warp_barrier)(Place place, unsigned int mask);
    // Other threads may run now. Called where threads of a GPU would see each other's writes.
    void (*yield)(Place place);
    // A range that holds [address, address + bytes) and permits the access; ends the launch if
    // there is none or if the address is not a multiple of `alignment`.
    const Range* (*find_range)(
        Access access, uintptr_t address, size_t bytes, size_t alignment, Place place);
    // Ends the launch: the kernel's shared memory does not fit into that of the launch.
    void (*shared_memory_too_small)(size_t needed, size_t alignment);
    // Fences between threads, and atomic operations, as races see them; `yield` comes beside them.
    void (*fence)(Place place);
    void (*atomic)(Place place, const void* address, size_t bytes);

    // The instructions of kernels/hw/, see there.
    void (*named_barrier)(Place place, int id, int threads, bool waits);
    bool (*elect_one)(Place place);
    void (*change_registers)(Place place, int registers, bool more);
    void (*fence_proxy_async)(Place place);
    void (*semaphore_wait)(Place place, const int* counter, int at_least);
    void (*semaphore_add)(Place place, int* counter, int value);
    void (*mbarrier_init)(Place place, void* barrier, int arrivals);
    void (*fence_mbarrier_init)(Place place);
    void (*mbarrier_arrive)(Place place, void* barrier, int bytes);
    void (*mbarrier_wait)(Place place, void* barrier, int parity);
    void (*cp_async)(Place place, void* shared, const void* global, int bytes, bool valid);
    void (*bulk_copy)(Place place, const BulkCopy& copy);
    void (*commit)(Place place, Queue queue);
    // Waits until at most `pending` groups are under way, or have yet to read shared memory.
    void (*wait)(Place place, Queue queue, int pending, bool only_read);
    void (*ldmatrix)(
        Place place, unsigned int* registers, const void* row, int count, bool transposed);
    void (*stmatrix)(
        Place place, void* row, const unsigned int* registers, int count, bool transposed);
    void (*mma)(
        Place place, float* d, const unsigned int* a, const unsigned int* b, Element element);
    void (*wgmma)(Place place, const WgmmaCall& call);
    void (*wgmma_fence)(Place place);
    void (*wgmma_commit)(Place place);
    void (*wgmma_wait)(Place place, int pending);
    // An access of an instrumented kernel, from the instruction before `instruction`.
    void (*access)(Access access, uintptr_t address, size_t bytes, uintptr_t instruction);
};

// What a kernel sees of its thread. The first field is the quick path of the bounds check: the
// ranges of the previous load and of the previous store.
struct alignas(16) Thread {
    const Range* recent[2];
    const Executor* executor;
    unsigned char* shared;  // dynamic shared memory of the block
    size_t shared_bytes;
    Index thread, block, block_dim, grid_dim;
};

inline Thread* thread_of_stack(uintptr_t stack) {
    return reinterpret_cast<Thread*>(stack + kStackBytes - sizeof(Thread));
}

// The thread that is running. Inlined, so the frame may be that of a caller: it is on the same
// stack.
__attribute__((always_inline)) inline Thread& self() {
    const uintptr_t frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
    return *thread_of_stack(frame & ~(kStackBytes - 1));
}

// One launch, as cuflash/host.py describes it (the same fields in the same order).
struct Launch {
    void (*entry)(const void* params);
    int instrumented;       // its accesses come to Executor::access
    int in_order;           // blocks start in the order of their indices
    unsigned int resident;  // so many blocks are alive at once; 0: as the seed says
    size_t shared_alignment;
    const char* kernel;  // the name, for reports
    const void* params;
    size_t params_bytes;
    const Range* ranges;
    size_t range_count;
    size_t shared_bytes;
    uint64_t seed;
    unsigned int grid, block;
    // The answer: what went wrong, and for a fault of the CPU its instruction as an offset into a
    // library (0: none), from which the line in the source can be found.
    char* report;
    size_t report_bytes;
    char* fault_library;
    size_t fault_library_bytes;
    uint64_t fault_offset;
};

}  // namespace host
