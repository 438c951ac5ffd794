// SPDX-License-Identifier: Apache-2.0
// Waiting and going on: how a fiber gives way, and what threads of a block wait for each other at.
// All of this runs on the stacks of fibers.
#pragma once
#include "host/executor/watch.h"

namespace host {
namespace {

void make_ready(Worker& w, unsigned int fiber) {
    w.idle_switches = 0;
    w.fibers[fiber].state = State::kReady;
    w.schedule.add(fiber);
}

bool land_one(Worker& w);  // copies.h; false if nothing is under way

// Threads that wait for a semaphore whose value has come.
bool wake_at_semaphores(Worker& w) {
    bool woken = false;
    const unsigned int fibers = w.resident * w.warps * kWarpSize;
    for (unsigned int i = 0; i < fibers; ++i) {
        Fiber& fiber = w.fibers[i];
        if (fiber.state != State::kAtSemaphore) continue;
        if (*reinterpret_cast<const volatile int*>(fiber.address) < fiber.wanted) continue;
        make_ready(w, i);
        woken = true;
    }
    return woken;
}

// The next fiber to run; -1 if all that are left wait in vain, or after a failure.
int next_ready(Worker& w) {
    if (w.schedule.early()) land_one(w);
    for (;;) {
        if (w.failure.fault != Fault::kNone) return -1;
        const int next = w.schedule.take();
        if (next >= 0) return next;
        if (!wake_at_semaphores(w) && !land_one(w)) return -1;
    }
}

// Whether a block only waits for its copies to land, or to be replaced.
bool some_returned(const Worker& w) {
    for (unsigned int i = 0; i < w.resident; ++i) {
        if (w.blocks[i].alive && w.blocks[i].returned == w.launch->block) return true;
    }
    return false;
}

// Let the next fiber run; returns when the schedule comes back to `fiber`.
void switch_to_next(Worker& w, Fiber& fiber) {
    const int next = next_ready(w);
    if (next < 0) {
        // Nothing is under way any more: blocks that have returned make room for others.
        if (w.failure.fault != Fault::kNone || !some_returned(w)) fail(w, {Fault::kStuck});
        switch_context(&fiber.context, &w.main);
        return;
    }
    w.running = next;
    Fiber& other = w.fibers[next];
    if (&other != &fiber) switch_context(&fiber.context, &other.context);
}

void yield(Place place) {
    Worker& w = worker();
    Fiber& fiber = running_fiber(w);
    fiber.place = place;
    if (++w.idle_switches > CUFLASH_SPIN_LIMIT) fail(w, {Fault::kSpinning});
    w.schedule.add(static_cast<unsigned int>(w.running));
    switch_to_next(w, fiber);
}

// --- __syncthreads -------------------------------------------------------------------------------

int block_barrier(Place place, bool predicate) {
    Worker& w = worker();
    Fiber& fiber = running_fiber(w);
    Block& block = *fiber.block;
    fiber.state = State::kAtBarrier;
    fiber.place = place;
    Barrier& barrier = block.barrier;
    if (barrier.arrived == 0) {
        barrier.place = place;
    } else if (!barrier.mixed && !same(barrier.place, place)) {
        barrier.mixed = true;  // never to open; the report comes when all have stopped
    }
    ++barrier.arrived;
    barrier.passed += predicate;
    if (barrier.arrived == w.launch->block && !barrier.mixed) {
        block.barrier_result = barrier.passed;
        barrier = {};
        unsigned int members[kMaxThreads];
        for (unsigned int i = 0; i < w.launch->block; ++i) {
            members[i] = block.first_fiber + i;
            make_ready(w, members[i]);
        }
        if (w.races.on()) w.races.meet(members, w.launch->block);
    }
    switch_to_next(w, fiber);
    return block.barrier_result;  // the next one cannot open before this thread arrives there
}

// --- Named barriers ------------------------------------------------------------------------------

void named_barrier(Place place, int id, int threads, bool waits) {
    Worker& w = worker();
    Fiber& fiber = running_fiber(w);
    Block& block = *fiber.block;
    if (id < 1 || id >= kNamedBarriers) {
        HOST_MISUSE(w, place, "named barriers are 1 to %d, got %d", kNamedBarriers - 1, id);
    }
    if (threads <= 0 || threads % kWarpSize || threads > static_cast<int>(w.launch->block)) {
        HOST_MISUSE(w, place, "%d threads: expected a multiple of 32 up to the block's %u", threads,
                    w.launch->block);
    }
    NamedBarrier& barrier = block.named[id];
    if (barrier.threads == 0) {
        barrier.threads = threads;
    } else if (barrier.threads != threads) {
        HOST_MISUSE(w, place, "barrier %d: this thread expects %d threads, one before it %d", id,
                    threads, barrier.threads);
    }
    if (w.races.on()) w.races.release(static_cast<unsigned int>(w.running), barrier.clock);
    fiber.place = place;
    fiber.wanted = id;
    if (waits) fiber.state = State::kAtNamedBarrier;
    if (++barrier.arrived == threads) {
        for (unsigned int i = 0; i < w.launch->block; ++i) {
            const unsigned int other = block.first_fiber + i;
            const Fiber& waiting = w.fibers[other];
            if (waiting.state != State::kAtNamedBarrier || waiting.wanted != id) continue;
            if (w.races.on()) w.races.acquire(other, barrier.clock);
            make_ready(w, other);
        }
        barrier.threads = barrier.arrived = 0;
        if (w.races.on()) w.races.clear(barrier.clock);
    }
    if (waits) {
        switch_to_next(w, fiber);
    } else {
        yield(place);
    }
}

// --- Warps ---------------------------------------------------------------------------------------

// The running lane enters the meeting at `place`; if it is the last one, `give_results` is called
// with the meeting and its warp's fibers, and all go on. Returns the lane's result.
//
// Only __syncwarp orders memory; other operations bring values in registers.
template <class GiveResults>
uint64_t meet(Place place,
              unsigned int mask,
              bool predicate,
              uint64_t value,
              int source,
              GiveResults give_results,
              bool orders_memory = false) {
    Worker& w = worker();
    const unsigned int index_of_fiber = static_cast<unsigned int>(w.running);
    const unsigned int lane = 1u << index_of_fiber % kWarpSize;
    Fiber& fiber = w.fibers[index_of_fiber];
    Warp& warp = w.warps_of[warp_of(index_of_fiber)];
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
        const unsigned int first = index_of_fiber - index_of_fiber % kWarpSize;
        unsigned int members[kWarpSize], count = 0;
        for (unsigned int rest = meeting.arrived; rest; rest &= rest - 1) {
            members[count++] = first + static_cast<unsigned int>(__builtin_ctz(rest));
        }
        if (orders_memory && w.races.on()) w.races.meet(members, count);
        give_results(meeting, &w.fibers[first]);
        if (w.failure.fault != Fault::kNone) stop(w);
        warp.open &= ~(1u << index);
        for (unsigned int i = 0; i < count; ++i) make_ready(w, members[i]);
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

void warp_barrier(Place place, unsigned int mask) {
    meet(place, mask, false, 0, 0, [](const Meeting&, Fiber*) {}, true);
}

// All lanes of a full warp meet, each with a record of type T; the last one does the work of all.
template <class T, class Work>
void warp_together(Place place, const T& record, Work work) {
    Worker& w = worker();
    if (w.warps_of[warp_of(static_cast<unsigned int>(w.running))].lanes != 0xffffffff) {
        HOST_MISUSE(w, place, "needs a warp of 32 threads; the block has %u", w.launch->block);
    }
    const uint64_t address = reinterpret_cast<uintptr_t>(&record);
    meet(place, 0xffffffff, false, address, 0, [&](const Meeting&, Fiber* fibers) {
        const T* records[kWarpSize];
        for (int i = 0; i < kWarpSize; ++i) {
            records[i] = reinterpret_cast<const T*>(static_cast<uintptr_t>(fibers[i].value));
        }
        work(w, fibers, records);
    });
}

// The lane that elect.sync takes: any, but always the same; never lane 0, which is the one that
// kernels would count on.
bool elect_one(Place place) {
    Worker& w = worker();
    const int elected = 1 + static_cast<int>((w.launch->seed * 0x9e3779b97f4a7c15 >> 32) % 31);
    warp_together(place, elected, [](Worker&, Fiber*, const int* const*) {});
    return w.running % kWarpSize == elected;
}

// --- Registers -----------------------------------------------------------------------------------

// setmaxnreg: what a warp gives back others may take; those that find too few wait.
void change_registers(Place place, int registers, bool more) {
    Worker& w = worker();
    const unsigned int index = static_cast<unsigned int>(w.running);
    Fiber& fiber = w.fibers[index];
    Block& block = *fiber.block;
    Warp& warp = w.warps_of[warp_of(index)];
    const unsigned int wanted = static_cast<unsigned int>(registers);
    warp_together(place, registers, [&](Worker&, Fiber*, const int* const*) {
        if (more ? wanted < warp.registers : wanted > warp.registers) {
            note_misuse(w, place, -1, "the warp has %u registers a thread, and %d are not %s",
                        warp.registers, registers, more ? "more" : "fewer");
        } else if (!more) {
            block.free_registers += (warp.registers - wanted) * kWarpSize;
            warp.registers = wanted;
            for (unsigned int i = 0; i < w.launch->block; ++i) {
                const unsigned int other = block.first_fiber + i;
                if (w.fibers[other].state == State::kAtRegisters) make_ready(w, other);
            }
        }
    });
    while (warp.registers < wanted) {
        const unsigned int needed = (wanted - warp.registers) * kWarpSize;
        if (block.free_registers >= needed) {
            block.free_registers -= needed;
            warp.registers = wanted;
            break;
        }
        fiber.state = State::kAtRegisters;
        fiber.wanted = registers;
        switch_to_next(w, fiber);
    }
}

// --- Waiting between blocks ----------------------------------------------------------------------

const Range* find_range(
    Access access, uintptr_t address, size_t bytes, size_t alignment, Place place);

void semaphore_wait(Place place, const int* counter, int at_least) {
    Worker& w = worker();
    Fiber& fiber = running_fiber(w);
    const uintptr_t address = reinterpret_cast<uintptr_t>(counter);
    find_range(Access::kLoad, address, sizeof(int), alignof(int), place);
    fiber.place = place;
    fiber.address = address;
    fiber.wanted = at_least;
    if (*counter >= at_least) {
        yield(place);
    } else {
        fiber.state = State::kAtSemaphore;
        switch_to_next(w, fiber);
    }
    if (!w.races.on()) return;
    const unsigned int index = static_cast<unsigned int>(w.running);
    w.races.acquire_at(index, address, at_least);
    if (!watch_thread(w, index, Access::kAtomic, address, sizeof(int), place)) stop(w);
}

void semaphore_add(Place place, int* counter, int value) {
    Worker& w = worker();
    const uintptr_t address = reinterpret_cast<uintptr_t>(counter);
    find_range(Access::kStore, address, sizeof(int), alignof(int), place);
    *counter += value;
    if (w.races.on()) {
        const unsigned int index = static_cast<unsigned int>(w.running);
        if (!watch_thread(w, index, Access::kAtomic, address, sizeof(int), place)) stop(w);
        if (!w.races.release_at(index, address, *counter)) fail_of_signals(w, place);
    }
    wake_at_semaphores(w);
    yield(place);
}

}  // namespace
}  // namespace host
