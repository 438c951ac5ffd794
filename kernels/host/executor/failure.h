// SPDX-License-Identifier: Apache-2.0
// How a launch ends early.
#pragma once
#include <stdarg.h>
#include <stdio.h>

#include "host/executor/state.h"

namespace host {
namespace {

// Ends the launch. What happens at a time of its own (a copy that lands) only notes a failure;
// the fiber on whose stack it happened ends the launch as soon as it looks.
[[noreturn]] void stop(Worker& w) {
    switch_context(&w.fibers[w.running].context, &w.main);
    __builtin_unreachable();
}

void note(Worker& w, const Failure& failure) {
    if (w.failure.fault == Fault::kNone) w.failure = failure;
}

[[noreturn]] void fail(Worker& w, const Failure& failure) {
    note(w, failure);
    stop(w);
}

// What a kernel did that no GPU defines, in words. `fiber` is -1 for the running one.
__attribute__((format(printf, 4, 5))) void note_misuse(
    Worker& w, Place place, int fiber, const char* format, ...) {
    if (w.failure.fault != Fault::kNone) return;
    va_list values;
    va_start(values, format);
    vsnprintf(w.misuse, sizeof(w.misuse), format, values);
    va_end(values);
    w.failure = {Fault::kMisuse, place};
    w.failure.fiber = fiber;
}

#define HOST_MISUSE(w, place, ...)              \
    do {                                        \
        note_misuse(w, place, -1, __VA_ARGS__); \
        stop(w);                                \
    } while (false)

}  // namespace
}  // namespace host
