// SPDX-License-Identifier: Apache-2.0
// Accesses as races see them; nothing unless the kernel is instrumented.
#pragma once
#include "host/executor/failure.h"

namespace host {
namespace {

// Notes a failure and returns false if the access is wrong.
bool watch(
    Worker& w, const Actor& actor, Access access, uintptr_t address, size_t bytes, Source source) {
    if (w.races.access(actor, access, address, bytes, source)) return true;
    if (w.failure.fault != Fault::kNone) return true;
    w.races.tell(actor, access, address, bytes, source, w.misuse, sizeof(w.misuse));
    w.failure = {Fault::kRace};
    w.failure.fiber = static_cast<int>(actor.fiber);
    return false;
}

// Of a thread, at once.
bool watch_thread(
    Worker& w, unsigned int fiber, Access access, uintptr_t address, size_t bytes, Place place) {
    return !w.races.on() ||
           watch(w, w.races.thread(fiber), access, address, bytes, w.races.source(place));
}

// Of what addresses tell, see races/places.h.
[[noreturn]] void fail_of_signals(Worker& w, Place place) {
    HOST_MISUSE(w, place,
                "atomic operations and semaphores at more than %zu addresses are too many to look "
                "for races",
                kMaxSignals - 1);
}

// Work in group `group` of an engine has, when all is done, this time: times begin at 1.
Time time_of_group(unsigned int group) { return group + 1; }

}  // namespace
}  // namespace host
