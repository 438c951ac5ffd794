// SPDX-License-Identifier: Apache-2.0
// The state of a launch: fibers, warps, blocks, and what they wait for.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "host/executor.h"
#include "host/executor/context.h"
#include "host/executor/races.h"
#include "host/executor/schedule.h"

namespace host {
namespace {

constexpr unsigned int kMaxThreads = 1024;  // of a block, as on a GPU
constexpr unsigned int kMaxResident = 4;    // blocks alive at once
constexpr int kNamedBarriers = 16;
constexpr unsigned int kMaxMBarriers = 64;     // of a block
constexpr unsigned int kRegisterFile = 65536;  // of a multiprocessor

enum class State : unsigned char {
    kReady,
    kAtBarrier,
    kInWarp,
    kAtNamedBarrier,
    kAtMBarrier,
    kAtSemaphore,
    kAtRegisters,
    kReturned,
};

struct Block;
struct CpAsync;

struct Fiber {
    Context context;
    Thread* thread;
    Block* block;
    State state;
    // Where it waits and what for.
    Place place;
    unsigned int mask;
    int source;
    uintptr_t address;  // of an mbarrier or a semaphore
    int wanted;         // a parity, a semaphore's value, a barrier's number, registers
    uint64_t value;     // brought to a collective operation
    uint64_t result;    // taken from it
    // Groups of asynchronous copies that it has committed, and what it copies by cp.async.
    unsigned int groups[2];  // by Queue
    CpAsync *first_copy, *last_copy;
    unsigned int proxy_fences;  // that it has made; see proxies.h
};

// Lanes of a warp on their way into one collective operation. Several may be under way in a warp
// whose lanes have parted.
struct Meeting {
    Place place;
    unsigned int mask, arrived, passed;
};

struct Wgmma;

struct Warp {
    unsigned int lanes;  // those that exist: the last warp of a block may be smaller
    unsigned int open;   // which of the meetings are in use
    Meeting meetings[kWarpSize];
    unsigned int registers;  // of a thread
    // Products under way, in order; see wgmma.h.
    Wgmma *first_product, *last_product;
    unsigned int products, product_groups;  // issued so far, committed so far
    bool fenced;                            // by wgmma.fence, since it waited
};

struct Barrier {
    Place place;  // of the first to arrive
    unsigned int arrived;
    int passed;
    bool mixed;  // others arrived elsewhere
};

struct NamedBarrier {
    int threads;  // 0: nobody has arrived
    int arrived;
    Clock clock;
};

struct MBarrier {
    uintptr_t address;
    int count;      // arrivals of a phase
    int missing;    // of the present one
    int64_t bytes;  // still to come in the present one
    unsigned int phase;
    bool fenced;                // visible to asynchronous copies
    int initialiser;            // the fiber
    Clock arriving, completed;  // of the present phase, of the one before
};

constexpr unsigned int kTagBytes = 16;

// Who wrote a piece of shared memory last; see proxies.h.
struct Tag {
    int fiber;            // its number + 1; 0: nobody
    unsigned int fences;  // that it had made then
    Place place;
};

// What the warps of a warpgroup must agree on; see wgmma.h.
struct ProductMark {
    unsigned int number;  // of the product, from 1 on
    uint64_t mark;
};
constexpr unsigned int kProductMarks = 64;

struct Block {
    bool alive;
    unsigned int index;        // in the grid
    unsigned int first_fiber;  // its threads are fibers of consecutive numbers
    unsigned int returned;
    // guard | accessible pages: (slack) shared (slack) | guard
    unsigned char* region;
    size_t region_bytes;
    unsigned char *accessible, *accessible_end, *shared;
    Barrier barrier;
    int barrier_result;
    NamedBarrier named[kNamedBarriers];
    MBarrier mbarriers[kMaxMBarriers];
    unsigned int mbarrier_count;
    unsigned int free_registers;
    Tag* tags;  // of its shared memory
    unsigned int tag_count;
    bool tagged;  // some of it
    ProductMark marks[kMaxThreads / 128][kProductMarks];
};

enum class Fault {
    kNone,
    kStuck,
    kSpinning,
    kMask,
    kAccess,
    kPlainAccess,
    kSharedAccess,
    kSharedSize,
    kSharedOverrun,
    kSignal,
    kMisuse,
    kRace,
};

// What ended the launch.
struct Failure {
    Fault fault;
    Place place = {};
    unsigned int mask = 0;
    Access access = Access::kLoad;
    uintptr_t address = 0;
    size_t bytes = 0, alignment = 0;
    int signal = 0;
    uintptr_t instruction = 0;
    int fiber = -1;  // whose doing it is; -1: of the one that ran last
};

struct Copies;

// All that an operating system thread needs to launch. Kept until the thread ends, since mapping
// memory and touching fresh pages takes longer than many launches.
struct Worker {
    // Memory.
    size_t page;
    uintptr_t stacks;     // kMaxFibers of them, aligned; see kStackBytes
    void* reserved;       // the mapping that holds them
    unsigned int usable;  // this many of them are accessible
    void* params;         // an aligned copy
    size_t params_bytes;
    unsigned char* signal_stack;
    Copies* copies;  // under way, see copies.h
    Wgmma* spare_products;
    CpAsync* spare_copies;
    // The launch.
    const Launch* launch;
    uintptr_t image, image_end;  // the kernel's library, if it is instrumented
    unsigned int resident;       // of the blocks, these are used
    unsigned int warps;          // of each of them
    int running;                 // the fiber, -1 while the launch itself runs
    int stopped;                 // the fiber that ran last
    uint64_t idle_switches;      // in `yield`, since threads last met or returned
    Failure failure;
    char misuse[512];  // says what kMisuse or kRace is
    Context main;
    Schedule schedule;
    Races races;
    Block blocks[kMaxResident];
    Fiber fibers[kMaxFibers];
    Warp warps_of[kMaxWarps];
};

// Only a pointer, so that the signal handler may read it at any time.
__thread Worker* this_worker = nullptr;

// Of the running fiber. It stays in one operating system thread for all its life.
Worker& worker() { return *this_worker; }

uintptr_t stack_of(const Worker& w, unsigned int fiber) { return w.stacks + fiber * kStackBytes; }

Fiber& running_fiber(Worker& w) { return w.fibers[w.running]; }

unsigned int thread_of(const Fiber& fiber) { return fiber.thread->thread.x; }

// Warps never span blocks.
unsigned int warp_of(unsigned int fiber) { return fiber / kWarpSize; }

// The same call? Equal literals of one library mostly share an address.
bool same(const Place& a, const Place& b) {
    if (!a.call || !b.call) return a.call == b.call;
    return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0) &&
           (a.call == b.call || strcmp(a.call, b.call) == 0);
}

}  // namespace
}  // namespace host
