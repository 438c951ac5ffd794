// SPDX-License-Identifier: Apache-2.0
// Races: accesses of two threads to the same bytes, one of them a write, that nothing orders.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "host/executor.h"

namespace host {
namespace {

// What a thread had seen when it released something, for those who acquire it.
struct Clock {
    uint32_t* times;  // null: of nobody
};

// Who accesses memory: a fiber, by its number, or an actor, which does asynchronous work for one.
using Who = int;

class Races {
  public:
    // All that follows does nothing unless the kernel is instrumented.
    bool on() const { return false; }

    bool start_launch(const Launch&) { return true; }
    void end_launch() {}
    // The threads of a new block are fibers `first` to `first + count - 1`; nothing is ordered
    // before them but the launch, and shared memory is fresh.
    void start_block(unsigned int first, unsigned int count, const unsigned char* shared, size_t) {
        (void)first, (void)count, (void)shared;
    }

    // Everything that these fibers did before is ordered before everything they do next.
    void meet(const unsigned int* fibers, unsigned int count) { (void)fibers, (void)count; }
    // What `who` did so far is ordered before what those do who acquire the clock.
    void release(Who who, Clock& clock) { (void)who, (void)clock; }
    void acquire(Who who, const Clock& clock) { (void)who, (void)clock; }
    // `to` becomes what `from` is, and `from` is of nobody again.
    void move(Clock& from, Clock& to) { (void)from, (void)to; }
    void clear(Clock& clock) { (void)clock; }

    // The memory model of atomics: relaxed ones order nothing unless fences stand beside them.
    void fence(unsigned int fiber) { (void)fiber; }
    void atomic(unsigned int fiber, uintptr_t address) { (void)fiber, (void)address; }
    void release_at(Who who, uintptr_t address) { (void)who, (void)address; }
    void acquire_at(Who who, uintptr_t address) { (void)who, (void)address; }

    // An actor that is ordered after what the fiber did so far; end() gives it back, and orders
    // what it did before those who acquire the clock.
    Who begin(unsigned int fiber) { return static_cast<Who>(fiber); }
    void join(Who actor, unsigned int fiber) { (void)actor, (void)fiber; }  // after this one, too
    void end(Who actor, Clock& clock) { (void)actor, (void)clock; }

    // Returns false if the access races with an earlier one, which `text` then tells.
    bool access(Who, Access, uintptr_t, size_t, Place, char* text, size_t text_bytes) {
        (void)text, (void)text_bytes;
        return true;
    }
};

}  // namespace
}  // namespace host
