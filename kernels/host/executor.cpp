// SPDX-License-Identifier: Apache-2.0
// The executor of the CPU back end: runs a kernel, compiled for the CPU, as a GPU would.
//
// Blocks run one after another. The threads of a block are fibers of one operating system thread;
// a fiber runs until it has to wait for others, and then switches straight to the next that can
// go on:
//
//     fiber 0   ###|              ####|            #|
//     fiber 1      |###|          |   |##|          |##|    | = __syncthreads, a shuffle, ...
//     fiber 2          |####|     |      |###|         |#
//                           ^ the last one to arrive makes all of them ready
//
// The launch's seed chooses who is next: 0 takes the one that has been ready for longest; an odd
// seed takes any; an even one runs the warp of highest priority, with random priorities that change
// at random moments, which lets one warp run far ahead of another. A kernel that is right gives the
// same result under all of them. Shared memory is filled with NaN before each block, ends at an
// inaccessible page, and every access to global memory is checked against the launch's arrays.
//
// What is wrong ends the launch, never the process: the fiber that notices it, or the handler of
// the signal that it caused, notes the facts and switches back to the stack of the launch, where
// they become text. Nothing is unwound, for fibers own nothing. All state belongs to the operating
// system thread, so several of them may launch at once.
//
// Only libc is used: with the zig compiler, libc++ would first have to be built, for a minute.
#include "executor.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if !defined(CUFLASH_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define CUFLASH_UCONTEXT  // may also be defined to test it
#endif

#include <ucontext.h>

// So many switches by atomic operations and fences, with no thread getting any further, mean that
// a loop waits for what never comes.
#ifndef CUFLASH_SPIN_LIMIT
#define CUFLASH_SPIN_LIMIT 1000000000
#endif

namespace host {
namespace {

// ---------------------------------------------------------------------------------------------
// Contexts: where a stack goes on. Switching saves what a function call must preserve.

#ifdef CUFLASH_UCONTEXT

struct Context {
    ucontext_t state;
};

void switch_context(Context* from, Context* to) { swapcontext(&from->state, &to->state); }

// Let `context` start with a call of `start`, which never returns, on the stack below `top`.
void prepare_context(Context* context, uintptr_t bottom, uintptr_t top, void (*start)()) {
    getcontext(&context->state);
    context->state.uc_stack.ss_sp = reinterpret_cast<void*>(bottom);
    context->state.uc_stack.ss_size = top - bottom;
    context->state.uc_link = nullptr;
    makecontext(&context->state, start, 0);
}

#else

struct Context {
    uintptr_t* stack;  // everything else lies there
};

// Saves the registers on the stack and its pointer in *from; restores those of the stack `to`.
extern "C" void cuflash_switch(uintptr_t** from, uintptr_t* to);

#if defined(__x86_64__)
// System V ABI: rbx, rbp, r12 to r15 and the control words of SSE and x87.
asm(R"(
    .text
    .p2align 4
    .globl cuflash_switch
    .hidden cuflash_switch
    .type cuflash_switch, @function
cuflash_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    subq $8, %rsp
    stmxcsr (%rsp)
    fnstcw 4(%rsp)
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    ldmxcsr (%rsp)
    fldcw 4(%rsp)
    addq $8, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size cuflash_switch, . - cuflash_switch
)");
constexpr int kSavedWords = 8;
constexpr int kReturnAddress = 7;
constexpr int kPadding = 1;  // a null return address for `start`, which also aligns its frame

#else
// AAPCS64: x19 to x28, the frame pointer, the link register, the lower halves of v8 to v15.
asm(R"(
    .text
    .p2align 4
    .globl cuflash_switch
    .hidden cuflash_switch
    .type cuflash_switch, %function
cuflash_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size cuflash_switch, . - cuflash_switch
)");
constexpr int kSavedWords = 20;
constexpr int kReturnAddress = 11;
constexpr int kPadding = 0;
#endif

void switch_context(Context* from, Context* to) { cuflash_switch(&from->stack, to->stack); }

void prepare_context(Context* context, uintptr_t, uintptr_t top, void (*start)()) {
    // What cuflash_switch would have pushed, with `start` to return to.
    uintptr_t* words = reinterpret_cast<uintptr_t*>(top) - kPadding - kSavedWords;
    memset(words, 0, top - reinterpret_cast<uintptr_t>(words));
#if defined(__x86_64__)
    unsigned int sse;
    unsigned short x87;
    asm("stmxcsr %0\n\tfnstcw %1" : "=m"(sse), "=m"(x87));
    words[0] = sse | static_cast<uintptr_t>(x87) << 32;
#endif
    words[kReturnAddress] = reinterpret_cast<uintptr_t>(start);
    context->stack = words;
}

#endif

// ---------------------------------------------------------------------------------------------
// State.

constexpr unsigned int kMaxThreads = 1024;  // of a block, as on a GPU
constexpr unsigned int kMaxWarps = kMaxThreads / kWarpSize;
constexpr size_t kSignalStackBytes = 64 * 1024;
constexpr size_t kSharedAlignment = 128;
constexpr size_t kGuardBytes = 1024 * 1024;  // inaccessible, on both sides of shared memory

enum class State : unsigned char { kReady, kAtBarrier, kInWarp, kReturned };

struct Fiber {
    Context context;
    Thread* thread;
    State state;
    // Where it waits and what for.
    Place place;
    unsigned int mask;
    int source;
    uint64_t value;   // brought to a shuffle
    uint64_t result;  // taken from it
};

// Lanes of a warp on their way into one collective operation. Several may be under way in a warp
// whose lanes have parted.
struct Meeting {
    Place place;
    unsigned int mask, arrived, passed;
};

struct Warp {
    unsigned int lanes;  // those that exist: the last warp of a block may be smaller
    unsigned int open;   // which of the meetings are in use
    Meeting meetings[kWarpSize];
};

struct Barrier {
    Place place;  // of the first to arrive
    unsigned int arrived;
    int passed;
    bool mixed;  // others arrived elsewhere
};

enum class Fault { kNone, kStuck, kSpinning, kMask, kAccess, kSharedSize, kSharedOverrun, kSignal };

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
};

// splitmix64 (Steele, Lea, Flood, 2014).
struct Random {
    uint64_t state;

    uint64_t next() {
        uint64_t x = state += 0x9e3779b97f4a7c15;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
        x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
        return x ^ (x >> 31);
    }
    // In [0, bound); the tiny bias does not matter here.
    unsigned int below(unsigned int bound) {
        return static_cast<unsigned int>((next() >> 32) * bound >> 32);
    }
};

// The threads that can run, and who of them is next.
class Schedule {
  public:
    void start_launch(uint64_t seed) {
        random_.state = seed;
        policy_ = seed == 0 ? Policy::kFifo : seed % 2 ? Policy::kRandom : Policy::kPriority;
    }

    void start_block(unsigned int warps) {
        head_ = count_ = 0;
        memset(lanes_, 0, sizeof(lanes_));
        ranks_ = 0;
        warps_ = warps;
        for (unsigned int i = 0; i < warps; ++i) {
            const unsigned int j = random_.below(i + 1);
            warp_at_[i] = warp_at_[j];
            warp_at_[j] = i;
        }
        for (unsigned int i = 0; i < warps; ++i) rank_of_[warp_at_[i]] = i;
    }

    void add(unsigned int thread) {
        if (policy_ != Policy::kPriority) {
            queue_[(head_ + count_++) % kMaxThreads] = thread;
        } else {
            const unsigned int warp = thread / kWarpSize;
            lanes_[warp] |= 1u << thread % kWarpSize;
            ranks_ |= 1u << rank_of_[warp];
        }
    }

    // Removes and returns the next thread; -1 if there is none.
    int take() {
        if (policy_ == Policy::kPriority) return take_by_priority();
        if (count_ == 0) return -1;
        if (policy_ == Policy::kRandom) {
            unsigned int& chosen = queue_[(head_ + random_.below(count_)) % kMaxThreads];
            const unsigned int first = queue_[head_];
            queue_[head_] = chosen;
            chosen = first;
        }
        const unsigned int thread = queue_[head_];
        head_ = (head_ + 1) % kMaxThreads;
        --count_;
        return static_cast<int>(thread);
    }

    // The order of the blocks: a random one unless the seed is 0.
    void shuffle(unsigned int* items, unsigned int count) {
        for (unsigned int i = 0; i < count; ++i) {
            const unsigned int j = policy_ == Policy::kFifo ? i : random_.below(i + 1);
            items[i] = items[j];
            items[j] = i;
        }
    }

  private:
    enum class Policy { kFifo, kRandom, kPriority };

    int take_by_priority() {
        if (ranks_ == 0) return -1;
        const unsigned int random = static_cast<unsigned int>(random_.next() >> 32);
        if (random % 64 == 0) demote(static_cast<unsigned int>(__builtin_ctz(ranks_)));
        const unsigned int rank = static_cast<unsigned int>(__builtin_ctz(ranks_));
        const unsigned int warp = warp_at_[rank];
        // The first ready lane from a random one on, cyclically.
        const unsigned int start = random >> 27;
        const unsigned int turned = lanes_[warp] >> start | lanes_[warp] << (32 - start) % 32;
        const unsigned int lane = (static_cast<unsigned int>(__builtin_ctz(turned)) + start) % 32;
        lanes_[warp] &= ~(1u << lane);
        if (lanes_[warp] == 0) ranks_ &= ~(1u << rank);
        return static_cast<int>(warp * kWarpSize + lane);
    }

    // The warp at `rank` becomes the last.
    void demote(unsigned int rank) {
        const unsigned int warp = warp_at_[rank];
        for (; rank + 1 < warps_; ++rank) warp_at_[rank] = warp_at_[rank + 1];
        warp_at_[rank] = warp;
        ranks_ = 0;
        for (unsigned int i = 0; i < warps_; ++i) {
            rank_of_[warp_at_[i]] = i;
            if (lanes_[warp_at_[i]]) ranks_ |= 1u << i;
        }
    }

    Policy policy_;
    Random random_;
    unsigned int head_, count_, queue_[kMaxThreads];  // FIFO and random: a ring
    // Priority: rank 0 runs first; ranks_ has a bit for each rank whose warp has ready lanes.
    unsigned int warps_, ranks_, warp_at_[kMaxWarps], rank_of_[kMaxWarps], lanes_[kMaxWarps];
};

// All that an operating system thread needs to launch. Kept until the thread ends, since mapping
// memory and touching fresh pages takes longer than many launches.
struct Worker {
    // Memory.
    size_t page;
    uintptr_t stacks;     // kMaxThreads of them, aligned; see kStackBytes
    void* reserved;       // the mapping that holds them
    unsigned int usable;  // this many of them are accessible
    // guard | accessible pages: (slack) shared (slack) | guard
    unsigned char* region;
    size_t region_bytes;
    unsigned char *accessible, *accessible_end, *shared;
    size_t shared_bytes;
    void* params;  // an aligned copy
    size_t params_bytes;
    unsigned char* signal_stack;
    // The launch and its present block.
    const Launch* launch;
    unsigned int block;
    int running;  // the thread, -1 while the launch itself runs
    int stopped;  // the thread that ran last
    unsigned int returned;
    uint64_t idle_switches;  // in `yield`, since threads last met or returned
    int barrier_result;
    Barrier barrier;
    Failure failure;
    Context main;
    Schedule schedule;
    Fiber fibers[kMaxThreads];
    Warp warps[kMaxWarps];
};

// Only a pointer, so that the signal handler may read it at any time.
__thread Worker* this_worker = nullptr;

uintptr_t stack_of(const Worker& w, unsigned int thread) { return w.stacks + thread * kStackBytes; }

// Of the running fiber. It stays in one operating system thread for all its life.
Worker& worker() { return *this_worker; }

// ---------------------------------------------------------------------------------------------
// Waiting and going on. All of this runs on the stacks of fibers.

[[noreturn]] void fail(Worker& w, const Failure& failure) {
    w.failure = failure;
    switch_context(&w.fibers[w.running].context, &w.main);
    __builtin_unreachable();
}

// Let the next thread run; returns when the schedule comes back to `fiber`.
void switch_to_next(Worker& w, Fiber& fiber) {
    const int next = w.schedule.take();
    if (next < 0) fail(w, {Fault::kStuck});
    w.running = next;
    Fiber& other = w.fibers[next];
    if (&other != &fiber) switch_context(&fiber.context, &other.context);
}

void make_ready(Worker& w, unsigned int thread) {
    w.idle_switches = 0;
    w.fibers[thread].state = State::kReady;
    w.schedule.add(thread);
}

void yield(Place place) {
    Worker& w = worker();
    Fiber& fiber = w.fibers[w.running];
    fiber.place = place;
    if (++w.idle_switches > CUFLASH_SPIN_LIMIT) fail(w, {Fault::kSpinning});
    w.schedule.add(static_cast<unsigned int>(w.running));
    switch_to_next(w, fiber);
}

// The same call? Equal literals of one library mostly share an address.
bool same(const Place& a, const Place& b) {
    if (!a.call || !b.call) return a.call == b.call;
    return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0) &&
           (a.call == b.call || strcmp(a.call, b.call) == 0);
}

int block_barrier(Place place, bool predicate) {
    Worker& w = worker();
    Fiber& fiber = w.fibers[w.running];
    fiber.state = State::kAtBarrier;
    fiber.place = place;
    Barrier& barrier = w.barrier;
    if (barrier.arrived == 0) {
        barrier.place = place;
    } else if (!barrier.mixed && !same(barrier.place, place)) {
        barrier.mixed = true;  // never to open; the report comes when all have stopped
    }
    ++barrier.arrived;
    barrier.passed += predicate;
    if (barrier.arrived == w.launch->block && !barrier.mixed) {
        w.barrier_result = barrier.passed;
        barrier = {};
        for (unsigned int i = 0; i < w.launch->block; ++i) make_ready(w, i);
    }
    switch_to_next(w, fiber);
    return w.barrier_result;  // the next barrier cannot open before this thread arrives there
}

// The running lane enters the meeting at `place`; if it is the last one, `give_results` is called
// with the meeting and its warp's fibers, and all go on. Returns the lane's result.
template <class GiveResults>
uint64_t meet(Place place,
              unsigned int mask,
              bool predicate,
              uint64_t value,
              int source,
              GiveResults give_results) {
    Worker& w = worker();
    const unsigned int thread = static_cast<unsigned int>(w.running);
    const unsigned int lane = 1u << thread % kWarpSize;
    Fiber& fiber = w.fibers[thread];
    Warp& warp = w.warps[thread / kWarpSize];
    if (!(mask & lane)) fail(w, {Fault::kMask, place, mask});
    fiber.state = State::kInWarp;
    fiber.place = place;
    fiber.mask = mask;
    fiber.value = value;
    fiber.source = source;

    unsigned int index = kWarpSize;
    for (unsigned int open = warp.open; open; open &= open - 1) {
        const unsigned int i = static_cast<unsigned int>(__builtin_ctz(open));
        if (warp.meetings[i].mask == mask && same(warp.meetings[i].place, place)) index = i;
    }
    if (index == kWarpSize) {
        // Each open meeting holds at least one waiting lane, so there is a free one.
        index = static_cast<unsigned int>(__builtin_ctz(~warp.open));
        warp.open |= 1u << index;
        warp.meetings[index] = {place, mask, 0, 0};
    }
    Meeting& meeting = warp.meetings[index];
    meeting.arrived |= lane;
    if (predicate) meeting.passed |= lane;
    if (meeting.arrived == (mask & warp.lanes)) {
        const unsigned int first = thread - thread % kWarpSize;
        give_results(meeting, &w.fibers[first]);
        warp.open &= ~(1u << index);
        for (unsigned int rest = meeting.arrived; rest; rest &= rest - 1) {
            make_ready(w, first + static_cast<unsigned int>(__builtin_ctz(rest)));
        }
    }
    switch_to_next(w, fiber);
    return fiber.result;
}

uint64_t warp_exchange(Place place, unsigned int mask, uint64_t value, int source) {
    return meet(place, mask, false, value, source, [](const Meeting& meeting, Fiber* lanes) {
        for (unsigned int rest = meeting.arrived; rest; rest &= rest - 1) {
            Fiber& lane = lanes[__builtin_ctz(rest)];
            const bool present = meeting.arrived >> lane.source & 1;
            lane.result = present ? lanes[lane.source].value : ~uint64_t{0};
        }
    });
}

unsigned int warp_vote(Place place, unsigned int mask, bool predicate) {
    return static_cast<unsigned int>(
        meet(place, mask, predicate, 0, 0, [](const Meeting& meeting, Fiber* lanes) {
            for (unsigned int rest = meeting.arrived; rest; rest &= rest - 1) {
                lanes[__builtin_ctz(rest)].result = meeting.passed;
            }
        }));
}

const Range* find_range(
    Access access, uintptr_t address, size_t bytes, size_t alignment, Place place) {
    Worker& w = worker();
    const Launch& launch = *w.launch;
    if (address % alignment == 0) {
        for (size_t i = 0; i < launch.range_count; ++i) {
            const Range& range = launch.ranges[i];
            if (range.low <= address && address <= range.high && bytes <= range.high - address &&
                (access == Access::kLoad || range.writable)) {
                return &range;
            }
        }
    }
    fail(w, {Fault::kAccess, place, 0, access, address, bytes, alignment});
}

void shared_memory_too_small(size_t needed, size_t alignment) {
    fail(worker(), {Fault::kSharedSize, {}, 0, {}, 0, needed, alignment});
}

const Executor kExecutor = {
    block_barrier, warp_exchange, warp_vote, yield, find_range, shared_memory_too_small,
};

// The life of a fiber.
void run_thread() {
    Worker& w = worker();
    w.launch->entry(w.params);
    Fiber& fiber = w.fibers[w.running];
    fiber.state = State::kReturned;
    w.idle_switches = 0;
    if (++w.returned == w.launch->block) switch_context(&fiber.context, &w.main);
    switch_to_next(w, fiber);
    __builtin_unreachable();
}

// ---------------------------------------------------------------------------------------------
// Signals. The handlers are there only while a launch runs, and leave to the previous ones what
// does not come from the code of a fiber.

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP};
constexpr int kSignalCount = sizeof(kSignals) / sizeof(kSignals[0]);

pthread_mutex_t signal_mutex = PTHREAD_MUTEX_INITIALIZER;
int signal_users = 0;
struct sigaction previous[kSignalCount];

void pass_on(int signal, siginfo_t* info, void* context) {
    int i = 0;
    while (kSignals[i] != signal) ++i;
    const struct sigaction& old = previous[i];
    if (old.sa_flags & SA_SIGINFO) {
        old.sa_sigaction(signal, info, context);
    } else if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN) {
        old.sa_handler(signal);
    } else if (info->si_code > 0 || old.sa_handler == SIG_DFL) {
        // A faulting instruction is executed again on return, and then ends the process.
        struct sigaction standard = {};
        standard.sa_handler = SIG_DFL;
        sigaction(signal, &standard, nullptr);
        if (info->si_code <= 0) raise(signal);
    }
}

void on_signal(int signal, siginfo_t* info, void* context) {
    Worker* w = this_worker;
    // A positive code: caused by an instruction, not sent by a process.
    if (!w || w->running < 0 || info->si_code <= 0) return pass_on(signal, info, context);
    const ucontext_t* state = static_cast<const ucontext_t*>(context);
#if defined(__x86_64__)
    const uintptr_t instruction = static_cast<uintptr_t>(state->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
    const uintptr_t instruction = state->uc_mcontext.pc;
#else
    const uintptr_t instruction = 0;
    (void)state;
#endif
    const uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
    // Leaves the handler for good, which the kernel does not mind: it looks only at the stack
    // pointer to see whether the signal stack is in use, and SA_NODEFER left the signal unblocked.
    fail(*w, {Fault::kSignal, {}, 0, {}, address, 0, 0, signal, instruction});
}

void catch_signals(Worker& w, stack_t* previous_stack) {
    stack_t stack = {};
    stack.ss_sp = w.signal_stack;
    stack.ss_size = kSignalStackBytes;
    sigaltstack(&stack, previous_stack);
    pthread_mutex_lock(&signal_mutex);
    if (signal_users++ == 0) {
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigemptyset(&action.sa_mask);
        for (int i = 0; i < kSignalCount; ++i) sigaction(kSignals[i], &action, &previous[i]);
    }
    pthread_mutex_unlock(&signal_mutex);
}

void release_signals(const stack_t* previous_stack) {
    pthread_mutex_lock(&signal_mutex);
    if (--signal_users == 0) {
        for (int i = 0; i < kSignalCount; ++i) {
            struct sigaction present;
            sigaction(kSignals[i], nullptr, &present);
            // Somebody may have put another handler there in the meantime.
            if ((present.sa_flags & SA_SIGINFO) && present.sa_sigaction == on_signal) {
                sigaction(kSignals[i], &previous[i], nullptr);
            }
        }
    }
    pthread_mutex_unlock(&signal_mutex);
    sigaltstack(previous_stack, nullptr);
}

// ---------------------------------------------------------------------------------------------
// Reports.

// Text that grows in a buffer and is cut off at its end.
class Text {
  public:
    Text(char* buffer, size_t bytes) : at_(buffer), left_(bytes) {
        if (bytes) *buffer = 0;
    }

    __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
        va_list values;
        va_start(values, format);
        const int length = vsnprintf(at_, left_, format, values);
        va_end(values);
        const size_t used = length < 0 ? 0 : static_cast<size_t>(length);
        const size_t step = used < left_ ? used : left_ ? left_ - 1 : 0;
        at_ += step;
        left_ -= step;
    }

    // Set bits as numbers and ranges: "0-15, 20".
    void add_ranges(const bool* set, unsigned int count) {
        bool first = true;
        for (unsigned int i = 0; i < count; ++i) {
            if (!set[i]) continue;
            unsigned int last = i;
            while (last + 1 < count && set[last + 1]) ++last;
            add(first ? "%u" : ", %u", i);
            if (last > i) add("-%u", last);
            first = false;
            i = last;
        }
    }

    void add_place(const Place& place) {
        const char* slash = strrchr(place.file, '/');
        add("%s:%d", slash ? slash + 1 : place.file, place.line);
    }

  private:
    char* at_;
    size_t left_;
};

// The lanes that the meeting in which `thread` waits is still waiting for.
unsigned int missing_lanes(const Worker& w, unsigned int thread) {
    const Fiber& fiber = w.fibers[thread];
    const Warp& warp = w.warps[thread / kWarpSize];
    for (unsigned int open = warp.open; open; open &= open - 1) {
        const Meeting& meeting = warp.meetings[__builtin_ctz(open)];
        if (meeting.mask == fiber.mask && same(meeting.place, fiber.place)) {
            return meeting.mask & warp.lanes & ~meeting.arrived;
        }
    }
    return 0;
}

// Which threads wait where.
void add_threads(Text& text, const Worker& w) {
    const unsigned int threads = w.launch->block;
    static_assert(kMaxThreads <= 1024, "these lie on the stack");
    bool listed[kMaxThreads] = {};
    bool first = true;
    for (unsigned int i = 0; i < threads; ++i) {
        if (listed[i]) continue;
        const Fiber& fiber = w.fibers[i];
        const bool in_warp = fiber.state == State::kInWarp;
        const unsigned int missing = in_warp ? missing_lanes(w, i) : 0;
        bool group[kMaxThreads] = {};
        unsigned int count = 0;
        for (unsigned int j = i; j < threads; ++j) {
            const Fiber& other = w.fibers[j];
            if (listed[j] || other.state != fiber.state) continue;
            if (fiber.state != State::kReturned && !same(other.place, fiber.place)) continue;
            if (in_warp && (other.mask != fiber.mask || missing_lanes(w, j) != missing)) continue;
            group[j] = listed[j] = true;
            ++count;
        }
        text.add("%s%s ", first ? "" : "; ", count > 1 ? "threads" : "thread");
        first = false;
        text.add_ranges(group, threads);
        if (fiber.state == State::kReturned) {
            text.add(count > 1 ? " have returned" : " has returned");
            continue;
        }
        const bool ready = fiber.state == State::kReady;
        if (ready && !fiber.place.call) {
            text.add(count > 1 ? " have not met others" : " has not met others");
            continue;
        }
        const char* verb = ready ? count > 1 ? "spin" : "spins" : count > 1 ? "wait" : "waits";
        text.add(" %s at %s", verb, fiber.place.call);
        if (in_warp) {
            bool lanes[kWarpSize];
            for (int lane = 0; lane < kWarpSize; ++lane) lanes[lane] = missing >> lane & 1;
            text.add(" (mask 0x%08x, %s ", fiber.mask, missing & (missing - 1) ? "lanes" : "lane");
            text.add_ranges(lanes, kWarpSize);
            text.add(" missing)");
        }
        text.add(", ");
        text.add_place(fiber.place);
    }
}

// How far [address, address + bytes) reaches out of a range.
struct Outside {
    uintptr_t before, after;

    static Outside of(const Range& range, uintptr_t address, size_t bytes) {
        const uintptr_t end = address + bytes;
        return {address < range.low ? range.low - address : 0,
                end > range.high ? end - range.high : 0};
    }
    uintptr_t most() const { return before > after ? before : after; }
};

// The array nearest to an address, and where the address lies in relation to it.
void add_nearest(Text& text, const Launch& launch, uintptr_t address, size_t bytes) {
    const Range* nearest = nullptr;
    Outside outside = {};
    for (size_t i = 0; i < launch.range_count; ++i) {
        const Range& range = launch.ranges[i];
        const Outside candidate = Outside::of(range, address, bytes);
        if (range.low != range.high && (!nearest || candidate.most() < outside.most())) {
            nearest = &range;
            outside = candidate;
        }
    }
    if (!nearest) {
        text.add("; the launch has no array");
        return;
    }
    text.add("; nearest array: %s", nearest->name);
    text.add(" (%zu bytes from 0x%zx): ", nearest->high - nearest->low, nearest->low);
    if (outside.before >= outside.after) {
        text.add("begins %zu bytes before it", outside.before);
    } else {
        text.add("reaches %zu bytes past its end", outside.after);
    }
}

void add_access(Text& text, const Launch& launch, const Failure& failure) {
    text.add("%s of %zu bytes at 0x%zx, ", failure.place.call, failure.bytes, failure.address);
    text.add_place(failure.place);
    text.add(", ");
    if (failure.address % failure.alignment != 0) {
        text.add("is misaligned: not a multiple of %zu", failure.alignment);
        return;
    }
    for (size_t i = 0; i < launch.range_count; ++i) {
        if (Outside::of(launch.ranges[i], failure.address, failure.bytes).most() == 0) {
            text.add("writes to %s, which is read-only", launch.ranges[i].name);
            return;
        }
    }
    text.add("is out of bounds");
    add_nearest(text, launch, failure.address, failure.bytes);
}

void add_signal(Text& text, const Worker& w, const Failure& failure) {
    const Launch& launch = *w.launch;
    const uintptr_t address = failure.address;
    if (failure.signal == SIGFPE) {
        text.add("integer division by zero or overflow");
    } else if (failure.signal != SIGSEGV && failure.signal != SIGBUS) {
        text.add("index out of the bounds of an array, or misaligned access to shared memory");
    } else if (address - w.stacks < kMaxThreads * kStackBytes) {
        text.add("stack overflow: each thread has %zu bytes of stack",
                 kStackBytes - w.page - sizeof(Thread));
    } else if (address - reinterpret_cast<uintptr_t>(w.region) < w.region_bytes) {
        const uintptr_t low = reinterpret_cast<uintptr_t>(w.shared);
        if (address < low) {
            text.add("access %zu bytes before dynamic shared memory", low - address);
        } else {
            text.add("access %zu bytes past the end of dynamic shared memory (%zu bytes)",
                     address - low - w.shared_bytes, w.shared_bytes);
        }
    } else {
        text.add("access to address 0x%zx, which is not accessible", address);
        add_nearest(text, launch, address, 1);
    }
}

void write_report(const Worker& w, Launch& launch) {
    const Failure& failure = w.failure;
    Text text(launch.report, launch.report_bytes);
    text.add("kernel %s, block %u of %u", launch.kernel, w.block, launch.grid);
    const Fault fault = failure.fault;
    if (fault != Fault::kStuck && fault != Fault::kSpinning && fault != Fault::kSharedOverrun) {
        text.add(", thread %d", w.stopped);
    }
    text.add(" (seed %llu): ", static_cast<unsigned long long>(launch.seed));
    switch (fault) {
        case Fault::kStuck:
            text.add(w.barrier.mixed ? "divergent barriers: " : "the block cannot go on: ");
            add_threads(text, w);
            break;
        case Fault::kSpinning:
            text.add("threads only wait for each other's writes: ");
            add_threads(text, w);
            break;
        case Fault::kMask:
            text.add("%s, ", failure.place.call);
            text.add_place(failure.place);
            text.add(": mask 0x%08x lacks the calling lane %d", failure.mask,
                     w.stopped % kWarpSize);
            break;
        case Fault::kAccess:
            add_access(text, launch, failure);
            break;
        case Fault::kSharedSize:
            text.add(
                "the kernel needs %zu bytes of dynamic shared memory, aligned to %zu; the "
                "launch has %zu, aligned to %zu",
                failure.bytes, failure.alignment, launch.shared_bytes, kSharedAlignment);
            break;
        case Fault::kSharedOverrun:
            text.add("a thread wrote outside dynamic shared memory (%zu bytes)",
                     launch.shared_bytes);
            break;
        default:
            add_signal(text, w, failure);
            Dl_info info;
            if (failure.instruction &&
                dladdr(reinterpret_cast<void*>(failure.instruction), &info)) {
                snprintf(launch.fault_library, launch.fault_library_bytes, "%s", info.dli_fname);
                launch.fault_offset =
                    failure.instruction - reinterpret_cast<uintptr_t>(info.dli_fbase);
            }
    }
}

// ---------------------------------------------------------------------------------------------
// Memory.

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

void* reserve(size_t bytes) {
    void* memory =
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
}

void delete_worker(void* pointer) {
    Worker* w = static_cast<Worker*>(pointer);
    if (w->reserved) munmap(w->reserved, (kMaxThreads + 1) * kStackBytes);
    if (w->region) munmap(w->region, w->region_bytes);
    free(w->signal_stack);
    free(w->params);
    free(w);
    this_worker = nullptr;
}

pthread_key_t worker_key;  // calls delete_worker when a thread ends
pthread_once_t worker_once = PTHREAD_ONCE_INIT;
void create_worker_key() { pthread_key_create(&worker_key, delete_worker); }

// The calling thread's worker; null if there is no memory.
Worker* get_worker() {
    if (this_worker) return this_worker;
    Worker* w = static_cast<Worker*>(calloc(1, sizeof(Worker)));
    if (!w) return nullptr;
    w->running = -1;
    w->page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    w->signal_stack = static_cast<unsigned char*>(malloc(kSignalStackBytes));
    w->reserved = reserve((kMaxThreads + 1) * kStackBytes);
    if (!w->reserved || !w->signal_stack) {
        delete_worker(w);
        return nullptr;
    }
    w->stacks = round_up(reinterpret_cast<uintptr_t>(w->reserved), kStackBytes);
    pthread_once(&worker_once, create_worker_key);
    pthread_setspecific(worker_key, w);
    return this_worker = w;
}

// Stacks for `threads` fibers, each with an inaccessible page below.
bool provide_stacks(Worker& w, unsigned int threads) {
    for (; w.usable < threads; ++w.usable) {
        const uintptr_t bottom = stack_of(w, w.usable) + w.page;
        if (mprotect(reinterpret_cast<void*>(bottom), kStackBytes - w.page,
                     PROT_READ | PROT_WRITE)) {
            return false;
        }
    }
    return true;
}

// Shared memory that ends as close to inaccessible pages as its alignment permits, and begins in
// the first accessible one.
bool provide_shared_memory(Worker& w, size_t bytes) {
    const size_t aligned = round_up(bytes, kSharedAlignment);
    const size_t needed = round_up(aligned, w.page);
    if (needed + 2 * kGuardBytes > w.region_bytes) {
        if (w.region) munmap(w.region, w.region_bytes);
        w.region = static_cast<unsigned char*>(reserve(needed + 2 * kGuardBytes));
        w.region_bytes = w.region ? needed + 2 * kGuardBytes : 0;
        if (!w.region) return false;
        w.accessible_end = w.region + w.region_bytes - kGuardBytes;
        w.accessible = w.accessible_end;
    }
    unsigned char* first = w.accessible_end - needed;
    if (first < w.accessible &&
        mprotect(first, static_cast<size_t>(w.accessible - first), PROT_READ | PROT_WRITE)) {
        return false;
    }
    if (first > w.accessible &&
        mprotect(w.accessible, static_cast<size_t>(first - w.accessible), PROT_NONE)) {
        return false;
    }
    w.accessible = first;
    w.shared = w.accessible_end - aligned;
    w.shared_bytes = bytes;
    return true;
}

bool provide_params(Worker& w, const void* params, size_t bytes) {
    if (bytes > w.params_bytes) {
        free(w.params);
        w.params_bytes = round_up(bytes, kSharedAlignment);
        w.params = aligned_alloc(kSharedAlignment, w.params_bytes);
        if (!w.params) w.params_bytes = 0;
    }
    if (w.params) memcpy(w.params, params, bytes);
    return bytes == 0 || w.params;
}

// ---------------------------------------------------------------------------------------------
// Running.

// NaN in every floating-point type.
constexpr unsigned char kPoison = 0xff;

void fill_shared_memory(Worker& w) {
    memset(w.accessible, kPoison, static_cast<size_t>(w.accessible_end - w.accessible));
}

// Are the accessible bytes around shared memory as fill_shared_memory left them?
bool slack_untouched(const Worker& w) {
    for (const unsigned char* p = w.accessible; p < w.accessible_end; ++p) {
        if (p == w.shared) p += w.shared_bytes;
        if (p < w.accessible_end && *p != kPoison) return false;
    }
    return true;
}

const Range kNowhere = {UINTPTR_MAX, 0, "", 0};

void prepare_block(Worker& w, unsigned int block) {
    const unsigned int threads = w.launch->block;
    const unsigned int warps = (threads + kWarpSize - 1) / kWarpSize;
    w.block = block;
    w.returned = 0;
    w.barrier = {};
    for (unsigned int i = 0; i < warps; ++i) {
        const unsigned int lanes = threads - i * kWarpSize;
        w.warps[i].lanes = lanes < kWarpSize ? (1u << lanes) - 1 : 0xffffffff;
        w.warps[i].open = 0;
    }
    w.schedule.start_block(warps);
    for (unsigned int i = 0; i < threads; ++i) {
        const uintptr_t stack = stack_of(w, i);
        Fiber& fiber = w.fibers[i];
        fiber.place = {};
        fiber.thread = thread_of_stack(stack);
        *fiber.thread = {{&kNowhere, &kNowhere},
                         &kExecutor,
                         w.shared,
                         w.shared_bytes,
                         {i, 0, 0},
                         {block, 0, 0},
                         {threads, 1, 1},
                         {w.launch->grid, 1, 1}};
        prepare_context(&fiber.context, stack + w.page, reinterpret_cast<uintptr_t>(fiber.thread),
                        run_thread);
        make_ready(w, i);
    }
    fill_shared_memory(w);
}

bool run_blocks(Worker& w, const unsigned int* order) {
    for (unsigned int i = 0; i < w.launch->grid; ++i) {
        prepare_block(w, order[i]);
        w.running = w.schedule.take();
        switch_context(&w.main, &w.fibers[w.running].context);
        w.stopped = w.running;
        w.running = -1;
        if (w.failure.fault == Fault::kNone && !slack_untouched(w)) {
            w.failure.fault = Fault::kSharedOverrun;
        }
        if (w.failure.fault != Fault::kNone) return false;
    }
    return true;
}

}  // namespace
}  // namespace host

// Runs a launch; returns 0, or 1 with a report. At most kMaxThreads threads a block, at least one
// of them and one block.
extern "C" __attribute__((visibility("default"))) int cuflash_launch(host::Launch* launch) {
    using namespace host;
    Worker* w = get_worker();
    unsigned int* order = static_cast<unsigned int*>(malloc(launch->grid * sizeof(unsigned int)));
    if (!w || !order || !provide_stacks(*w, launch->block) ||
        !provide_shared_memory(*w, launch->shared_bytes) ||
        !provide_params(*w, launch->params, launch->params_bytes)) {
        Text(launch->report, launch->report_bytes)
            .add("kernel %s: not enough memory to run it on the CPU", launch->kernel);
        free(order);
        return 1;
    }
    w->launch = launch;
    w->failure = {Fault::kNone};
    w->schedule.start_launch(launch->seed);
    w->schedule.shuffle(order, launch->grid);
    stack_t previous_stack;
    catch_signals(*w, &previous_stack);
    const bool done = run_blocks(*w, order);
    if (!done) write_report(*w, *launch);
    release_signals(&previous_stack);
    w->launch = nullptr;
    free(order);
    return done ? 0 : 1;
}
