// SPDX-License-Identifier: Apache-2.0
// What is said about a launch that failed.
#pragma once
#include <dlfcn.h>
#include <signal.h>

#include "host/executor/accesses.h"
#include "host/executor/text.h"

namespace host {
namespace {

// The lanes that the meeting in which a fiber waits is still waiting for.
unsigned int missing_lanes(const Worker& w, unsigned int fiber_index) {
    const Fiber& fiber = w.fibers[fiber_index];
    const Warp& warp = w.warps_of[warp_of(fiber_index)];
    for (unsigned int open = warp.open; open; open &= open - 1) {
        const Meeting& meeting = warp.meetings[__builtin_ctz(open)];
        if (meeting.mask == fiber.mask && same(meeting.place, fiber.place)) {
            return meeting.mask & warp.lanes & ~meeting.arrived;
        }
    }
    return 0;
}

// Whether two fibers wait for the same thing.
bool wait_alike(const Worker& w, unsigned int a, unsigned int b) {
    const Fiber &x = w.fibers[a], &y = w.fibers[b];
    if (x.state != y.state) return false;
    if (x.state == State::kReturned) return true;
    if (!same(x.place, y.place)) return false;
    switch (x.state) {
        case State::kInWarp:
            return x.mask == y.mask && missing_lanes(w, a) == missing_lanes(w, b);
        case State::kAtMBarrier:
        case State::kAtSemaphore:
            return x.address == y.address && x.wanted == y.wanted;
        case State::kAtNamedBarrier:
        case State::kAtRegisters:
            return x.wanted == y.wanted;
        default:
            return true;
    }
}

// What a waiting fiber misses, in parentheses.
void add_missing(Text& text, const Worker& w, const Block& block, unsigned int index) {
    const Fiber& fiber = w.fibers[index];
    if (fiber.state == State::kInWarp) {
        const unsigned int missing = missing_lanes(w, index);
        bool lanes[kWarpSize];
        for (int lane = 0; lane < kWarpSize; ++lane) lanes[lane] = missing >> lane & 1;
        text.add(" (mask 0x%08x, %s ", fiber.mask, missing & (missing - 1) ? "lanes" : "lane");
        text.add_ranges(lanes, kWarpSize);
        text.add(" missing)");
    } else if (fiber.state == State::kAtNamedBarrier) {
        const NamedBarrier& barrier = block.named[fiber.wanted];
        text.add(" (barrier %d, %d of %d threads missing)", fiber.wanted,
                 barrier.threads - barrier.arrived, barrier.threads);
    } else if (fiber.state == State::kAtMBarrier) {
        for (unsigned int i = 0; i < block.mbarrier_count; ++i) {
            const MBarrier& barrier = block.mbarriers[i];
            if (barrier.address != fiber.address) continue;
            text.add(
                " (mbarrier at shared+%u, parity %d, in phase %u with %d of %d arrivals and "
                "%lld bytes missing",
                shared_offset(block, barrier.address), fiber.wanted, barrier.phase, barrier.missing,
                barrier.count, static_cast<long long>(barrier.bytes));
            if (barrier.missing == 0) text.add("; no copy will bring them");
            text.add(")");
        }
    } else if (fiber.state == State::kAtSemaphore) {
        text.add(" (it is %d, and shall be at least %d)",
                 *reinterpret_cast<const int*>(fiber.address), fiber.wanted);
    } else if (fiber.state == State::kAtRegisters) {
        text.add(" (%d registers a thread; %u are free, in all)", fiber.wanted,
                 block.free_registers);
    }
}

// Which threads of a block wait where.
void add_threads(Text& text, const Worker& w, const Block& block) {
    const unsigned int threads = w.launch->block;
    static_assert(kMaxThreads <= 1024, "these lie on the stack");
    bool listed[kMaxThreads] = {};
    bool first = true;
    for (unsigned int i = 0; i < threads; ++i) {
        if (listed[i]) continue;
        const Fiber& fiber = w.fibers[block.first_fiber + i];
        bool group[kMaxThreads] = {};
        unsigned int count = 0;
        for (unsigned int j = i; j < threads; ++j) {
            if (listed[j] || !wait_alike(w, block.first_fiber + i, block.first_fiber + j)) continue;
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
        add_missing(text, w, block, block.first_fiber + i);
        text.add(", ");
        text.add_place(fiber.place);
    }
}

// Of the block that the report is about, and then of the others that are alive.
void add_blocks(Text& text, const Worker& w, const Block& block) {
    add_threads(text, w, block);
    for (unsigned int i = 0; i < w.resident; ++i) {
        const Block& other = w.blocks[i];
        if (&other == &block || !other.alive) continue;
        text.add("; block %u: ", other.index);
        add_threads(text, w, other);
    }
}

// The block that a failure is about.
const Block& block_of(const Worker& w) {
    const Failure& failure = w.failure;
    const Block& last = *w.fibers[failure.fiber < 0 ? w.stopped : failure.fiber].block;
    if (failure.fault != Fault::kStuck) return last;
    for (unsigned int i = 0; i < w.resident; ++i) {
        if (w.blocks[i].alive && w.blocks[i].barrier.mixed) return w.blocks[i];
    }
    for (unsigned int i = 0; i < w.resident; ++i) {
        if (w.blocks[i].alive && !last.alive) return w.blocks[i];
    }
    return last;
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

// Of an instruction; plain accesses end at guard pages, see add_signal.
void add_shared_access(Text& text, const Worker& w, const Block& block, const Failure& failure) {
    text.add("%s of %zu bytes, ", failure.place.call, failure.bytes);
    text.add_place(failure.place);
    const uintptr_t offset = failure.address - reinterpret_cast<uintptr_t>(block.shared);
    if (!is_shared(w, block, failure.address, failure.bytes)) {
        text.add(", is not in dynamic shared memory (%zu bytes): at shared%+lld",
                 w.launch->shared_bytes, static_cast<long long>(offset));
    } else {
        text.add(", is misaligned: shared+%zu is not a multiple of %zu", offset, failure.alignment);
    }
}

// An address that nothing lies at which the thread may access.
void add_wrong_address(
    Text& text, const Worker& w, const Block& block, uintptr_t address, size_t bytes) {
    if (address - reinterpret_cast<uintptr_t>(block.region) < block.region_bytes) {
        const uintptr_t low = reinterpret_cast<uintptr_t>(block.shared);
        if (address < low) {
            text.add("access %zu bytes before dynamic shared memory", low - address);
        } else {
            const uintptr_t end = low + w.launch->shared_bytes;
            text.add("access %zu bytes past the end of dynamic shared memory (%zu bytes)",
                     address > end ? address - end : 0, w.launch->shared_bytes);
        }
    } else {
        text.add("access to address 0x%zx, which is not accessible", address);
        add_nearest(text, *w.launch, address, bytes);
    }
}

// Of an instrumented kernel.
void add_plain_access(Text& text, const Worker& w, const Block& block, const Failure& failure) {
    const uintptr_t stack = failure.address - w.stacks;
    if (stack < kMaxFibers * kStackBytes) {
        const Fiber& owner = w.fibers[stack / kStackBytes];
        text.add("access to the stack of thread %u", thread_of(owner));
        if (owner.block != &block) text.add(" of block %u", owner.block->index);
    } else if (const Range* range =
                   look_up_range(*w.launch, Access::kLoad, failure.address, failure.bytes)) {
        text.add("write to %s, which is read-only", range->name);
    } else if (is_of_the_host(w, *w.fibers[w.stopped].thread, failure.address)) {
        text.add("write to 0x%zx, in the kernel's library or parameters, which are read-only",
                 failure.address);
    } else {
        add_wrong_address(text, w, block, failure.address, failure.bytes);
    }
    text.add(", ");
    text.add_place(failure.place);
}

void add_signal(Text& text, const Worker& w, const Block& block, const Failure& failure) {
    const uintptr_t address = failure.address;
    if (failure.signal == SIGFPE) {
        text.add("integer division by zero or overflow");
    } else if (failure.signal != SIGSEGV && failure.signal != SIGBUS) {
        text.add("index out of the bounds of an array, or misaligned access to shared memory");
    } else if (address - w.stacks < kMaxFibers * kStackBytes) {
        text.add("stack overflow: each thread has %zu bytes of stack",
                 kStackBytes - w.page - sizeof(Thread));
    } else {
        add_wrong_address(text, w, block, address, 1);
    }
}

void write_report(const Worker& w, Launch& launch) {
    const Failure& failure = w.failure;
    Text text(launch.report, launch.report_bytes);
    const Fiber& fiber = w.fibers[failure.fiber < 0 ? w.stopped : failure.fiber];
    const Block& block = block_of(w);
    text.add("kernel %s, block %u of %u", launch.kernel, block.index, launch.grid);
    const Fault fault = failure.fault;
    if (fault != Fault::kStuck && fault != Fault::kSpinning && fault != Fault::kSharedOverrun) {
        text.add(", thread %u", thread_of(fiber));
    }
    text.add(" (seed %llu): ", static_cast<unsigned long long>(launch.seed));
    switch (fault) {
        case Fault::kStuck:
            text.add(block.barrier.mixed ? "divergent barriers: " : "the block cannot go on: ");
            add_blocks(text, w, block);
            break;
        case Fault::kSpinning:
            text.add("threads only wait for each other's writes: ");
            add_blocks(text, w, block);
            break;
        case Fault::kMask:
            text.add("%s, ", failure.place.call);
            text.add_place(failure.place);
            text.add(": mask 0x%08x lacks the calling lane %d", failure.mask,
                     static_cast<int>(thread_of(fiber) % kWarpSize));
            break;
        case Fault::kAccess:
            add_access(text, launch, failure);
            break;
        case Fault::kPlainAccess:
            add_plain_access(text, w, block, failure);
            break;
        case Fault::kSharedAccess:
            add_shared_access(text, w, block, failure);
            break;
        case Fault::kMisuse:
            text.add("%s, ", failure.place.call);
            text.add_place(failure.place);
            text.add(": %s", w.misuse);
            break;
        case Fault::kRace:
            text.add("%s", w.misuse);
            break;
        case Fault::kSharedSize:
            text.add(
                "the kernel needs %zu bytes of dynamic shared memory, aligned to %zu; the "
                "launch has %zu, aligned to %zu",
                failure.bytes, failure.alignment, launch.shared_bytes, launch.shared_alignment);
            break;
        case Fault::kSharedOverrun:
            text.add("a thread wrote outside dynamic shared memory (%zu bytes)",
                     launch.shared_bytes);
            break;
        default:
            add_signal(text, w, block, failure);
            Dl_info info;
            if (failure.instruction &&
                dladdr(reinterpret_cast<void*>(failure.instruction), &info)) {
                snprintf(launch.fault_library, launch.fault_library_bytes, "%s", info.dli_fname);
                launch.fault_offset =
                    failure.instruction - reinterpret_cast<uintptr_t>(info.dli_fbase);
            }
    }
}

}  // namespace
}  // namespace host
