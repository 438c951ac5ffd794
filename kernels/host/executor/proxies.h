// SPDX-License-Identifier: Apache-2.0
// What the asynchronous proxy (bulk and tensor copies, wgmma) sees of shared memory: what threads
// wrote there is visible to it only after a fence.proxy.async of the thread that wrote.
//
// The plain build knows of the writes of instructions (stmatrix, cp.async), the instrumented one of
// all. Each piece of 16 bytes has a tag: who wrote it last, and in which of the stretches between
// that thread's fences.
#pragma once
#include "host/executor/mbarrier.h"
#include "host/executor/text.h"

namespace host {
namespace {

void tag_written(Worker& w, const Fiber& fiber, uintptr_t address, size_t bytes, Place place) {
    Block& block = *fiber.block;
    if (bytes == 0 || !is_shared(w, block, address, bytes)) return;
    block.tagged = true;
    const unsigned int first = shared_offset(block, address) / kTagBytes;
    const unsigned int last =
        (shared_offset(block, address) + static_cast<unsigned int>(bytes) - 1) / kTagBytes;
    for (unsigned int i = first; i <= last; ++i) {
        block.tags[i] = {static_cast<int>(&fiber - w.fibers) + 1, fiber.proxy_fences, place};
    }
}

void fence_proxy_async(Place place) {
    Worker& w = worker();
    ++running_fiber(w).proxy_fences;
    yield(place);
}

// The asynchronous proxy is asked to read for `fiber`, has not read until now what it was asked for
// before, or writes; what it overwrites needs no fence any more.
enum class Proxy { kRead, kReadLate, kWrite };

void check_proxy(
    Worker& w, Block& block, int fiber, Proxy proxy, uintptr_t address, size_t bytes, Place place) {
    if (!block.tagged || bytes == 0 || !is_shared(w, block, address, bytes)) return;
    const unsigned int first = shared_offset(block, address) / kTagBytes;
    const unsigned int last =
        (shared_offset(block, address) + static_cast<unsigned int>(bytes) - 1) / kTagBytes;
    for (unsigned int i = first; i <= last; ++i) {
        Tag& tag = block.tags[i];
        if (tag.fiber == 0) continue;
        const Fiber& writer = w.fibers[tag.fiber - 1];
        if (proxy == Proxy::kReadLate ||
            (proxy == Proxy::kRead && tag.fences == writer.proxy_fences)) {
            char where[128];
            Text text(where, sizeof(where));
            if (tag.place.call) text.add("%s, ", tag.place.call);
            text.add_place(tag.place);
            note_misuse(
                w, place, fiber,
                proxy == Proxy::kRead
                    ? "reads shared+%u through the asynchronous proxy, which thread %u wrote "
                      "(%s) without fence_proxy_async()"
                    : "was still to read shared+%u when thread %u wrote there (%s)",
                i * kTagBytes, thread_of(writer), where);
            return;
        }
        tag.fiber = 0;
    }
}

}  // namespace
}  // namespace host
