// SPDX-License-Identifier: Apache-2.0
// mbarriers: objects in shared memory that threads arrive at and copies complete on. A phase ends
// when all arrivals and all announced bytes are there; the next one begins at once.
//
// What a GPU keeps in the object's 64 bits lies in a table of the block; in memory there is a
// number that shows when something else is written over it.
#pragma once
#include "host/executor/waiting.h"

namespace host {
namespace {

constexpr int kMaxArrivals = (1 << 20) - 1;
constexpr int64_t kMaxBytes = (1 << 20) - 1;  // that may be missing in a phase

uint64_t mark_of(const MBarrier& barrier) { return 0x9e3779b97f4a7c15 ^ barrier.address; }

bool is_shared(const Worker& w, const Block& block, uintptr_t address, size_t bytes) {
    const uintptr_t offset = address - reinterpret_cast<uintptr_t>(block.shared);
    return offset <= w.launch->shared_bytes && bytes <= w.launch->shared_bytes - offset;
}

unsigned int shared_offset(const Block& block, uintptr_t address) {
    return static_cast<unsigned int>(address - reinterpret_cast<uintptr_t>(block.shared));
}

unsigned int number_of(const Block& block, const MBarrier& barrier) {
    return static_cast<unsigned int>(&barrier - block.mbarriers);
}

// The table's entry; null, and a failure is noted, if there is none.
MBarrier* find_mbarrier(Worker& w, Block& block, const void* pointer, Place place, int fiber) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    for (unsigned int i = 0; i < block.mbarrier_count; ++i) {
        MBarrier& barrier = block.mbarriers[i];
        if (barrier.address != address) continue;
        uint64_t mark;
        memcpy(&mark, pointer, sizeof(mark));
        if (mark == mark_of(barrier)) return &barrier;
        note_misuse(w, place, fiber, "the mbarrier at shared+%u was overwritten",
                    shared_offset(block, address));
        return nullptr;
    }
    if (is_shared(w, block, address, sizeof(uint64_t))) {
        note_misuse(w, place, fiber, "there is no initialised mbarrier at shared+%u",
                    shared_offset(block, address));
    } else {
        note_misuse(w, place, fiber, "the mbarrier is not in dynamic shared memory");
    }
    return nullptr;
}

void mbarrier_init(Place place, void* pointer, int arrivals) {
    Worker& w = worker();
    Block& block = *running_fiber(w).block;
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (!is_shared(w, block, address, sizeof(uint64_t)) || address % sizeof(uint64_t)) {
        HOST_MISUSE(w, place, "an mbarrier must lie in dynamic shared memory, aligned to 8 bytes");
    }
    if (arrivals < 1 || arrivals > kMaxArrivals) {
        HOST_MISUSE(w, place, "an mbarrier takes 1 to %d arrivals, got %d", kMaxArrivals, arrivals);
    }
    for (unsigned int i = 0; i < block.mbarrier_count; ++i) {
        if (block.mbarriers[i].address == address) {
            HOST_MISUSE(w, place, "the mbarrier at shared+%u is initialised already",
                        shared_offset(block, address));
        }
    }
    if (block.mbarrier_count == kMaxMBarriers) {
        HOST_MISUSE(w, place, "more than %u mbarriers in a block", kMaxMBarriers);
    }
    MBarrier& barrier = block.mbarriers[block.mbarrier_count++];
    barrier = {address, arrivals, arrivals, 0, 0, false, w.running, {}, {}};
    const uint64_t mark = mark_of(barrier);
    memcpy(pointer, &mark, sizeof(mark));
    const unsigned int fiber = static_cast<unsigned int>(w.running);
    if (!watch_thread(w, fiber, Access::kStore, address, sizeof(mark), place)) stop(w);
}

void fence_mbarrier_init(Place) {
    Worker& w = worker();
    Block& block = *running_fiber(w).block;
    for (unsigned int i = 0; i < block.mbarrier_count; ++i) {
        if (block.mbarriers[i].initialiser == w.running) block.mbarriers[i].fenced = true;
    }
}

// Ends the phase if nothing is missing.
void look_at_phase(Worker& w, Block& block, MBarrier& barrier) {
    if (barrier.missing != 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.missing = barrier.count;
    if (w.races.on()) w.races.move(barrier.arriving, barrier.completed);
    for (unsigned int i = 0; i < w.launch->block; ++i) {
        Fiber& fiber = w.fibers[block.first_fiber + i];
        if (fiber.state != State::kAtMBarrier || fiber.address != barrier.address) continue;
        if ((barrier.phase & 1) == static_cast<unsigned int>(fiber.wanted)) continue;
        if (w.races.on()) w.races.acquire(block.first_fiber + i, barrier.completed);
        make_ready(w, block.first_fiber + i);
    }
}

// Ends the launch unless the initialisation of the barrier is visible to the running thread.
void check_initialised(Worker& w, const MBarrier& barrier, Place place) {
    const unsigned int fiber = static_cast<unsigned int>(w.running);
    const uintptr_t address = barrier.address;
    if (!watch_thread(w, fiber, Access::kLoad, address, sizeof(uint64_t), place)) stop(w);
}

// Arrives once, and announces bytes before that if there are any.
void mbarrier_arrive(Place place, void* pointer, int bytes) {
    Worker& w = worker();
    Block& block = *running_fiber(w).block;
    MBarrier* barrier = find_mbarrier(w, block, pointer, place, -1);
    if (!barrier) stop(w);
    check_initialised(w, *barrier, place);
    if (bytes < 0 || barrier->bytes + bytes > kMaxBytes) {
        HOST_MISUSE(w, place,
                    "%d bytes are announced to an mbarrier that misses %lld; it can count "
                    "%lld",
                    bytes, static_cast<long long>(barrier->bytes),
                    static_cast<long long>(kMaxBytes));
    }
    if (barrier->missing == 0) {
        HOST_MISUSE(w, place,
                    "one arrival too many: the phase of the mbarrier at shared+%u takes %d",
                    shared_offset(block, barrier->address), barrier->count);
    }
    if (w.races.on()) w.races.release(static_cast<unsigned int>(w.running), barrier->arriving);
    barrier->bytes += bytes;
    --barrier->missing;
    if (barrier->missing == 0 && barrier->bytes < 0) {
        HOST_MISUSE(w, place,
                    "%lld bytes more than are announced have come to the mbarrier at "
                    "shared+%u",
                    static_cast<long long>(-barrier->bytes),
                    shared_offset(block, barrier->address));
    }
    look_at_phase(w, block, *barrier);
    yield(place);
}

// A copy has brought bytes. The barrier may hear of them before it hears that they come.
void complete_bytes(
    Worker& w, Block& block, MBarrier& barrier, int64_t bytes, Place place, int fiber) {
    barrier.bytes -= bytes;
    if (barrier.bytes < 0 && (barrier.missing == 0 || barrier.bytes < -kMaxBytes)) {
        note_misuse(w, place, fiber,
                    "%lld bytes more than were announced to the mbarrier at "
                    "shared+%u",
                    static_cast<long long>(-barrier.bytes), shared_offset(block, barrier.address));
        return;
    }
    look_at_phase(w, block, barrier);
}

void mbarrier_wait(Place place, void* pointer, int parity) {
    Worker& w = worker();
    Fiber& fiber = running_fiber(w);
    Block& block = *fiber.block;
    MBarrier* barrier = find_mbarrier(w, block, pointer, place, -1);
    if (!barrier) stop(w);
    check_initialised(w, *barrier, place);
    if (parity != 0 && parity != 1) HOST_MISUSE(w, place, "a parity is 0 or 1, got %d", parity);
    fiber.place = place;
    if ((barrier->phase & 1) != static_cast<unsigned int>(parity)) {
        if (w.races.on()) w.races.acquire(static_cast<unsigned int>(w.running), barrier->completed);
        yield(place);
        return;
    }
    fiber.state = State::kAtMBarrier;
    fiber.address = barrier->address;
    fiber.wanted = parity;
    switch_to_next(w, fiber);
}

}  // namespace
}  // namespace host
