// SPDX-License-Identifier: Apache-2.0
// Plain accesses of instrumented kernels: bounds, races, and what the asynchronous proxy misses.
#pragma once
#include <link.h>

#include "host/executor/proxies.h"
#include "host/executor/copies.h"

namespace host {
namespace {

int look_at_library(struct dl_phdr_info* library, size_t, void* pointer) {
    Worker& w = *static_cast<Worker*>(pointer);
    const uintptr_t entry = reinterpret_cast<uintptr_t>(w.launch->entry);
    uintptr_t end = 0;
    bool here = false;
    for (int i = 0; i < library->dlpi_phnum; ++i) {
        const auto& segment = library->dlpi_phdr[i];
        if (segment.p_type != PT_LOAD) continue;
        const uintptr_t low = library->dlpi_addr + segment.p_vaddr;
        here |= entry - low < segment.p_memsz;
        if (low + segment.p_memsz > end) end = low + segment.p_memsz;
    }
    if (!here) return 0;
    w.image = library->dlpi_addr;
    w.image_end = end;
    return 1;
}

// Where the kernel's library lies.
void find_image(Worker& w) { dl_iterate_phdr(look_at_library, &w); }

bool lies_in(uintptr_t address, const void* object, size_t bytes) {
    return address - reinterpret_cast<uintptr_t>(object) < bytes;
}

// Memory that is neither shared nor global, and that a kernel may read but not write: its
// parameters, constants of its library, and what the functions of kernels/host/ look at.
bool is_of_the_host(const Worker& w, const Thread& thread, uintptr_t address) {
    return lies_in(address, thread.executor, sizeof(Executor)) ||
           lies_in(address, w.params, w.params_bytes) ||
           lies_in(address, w.launch->ranges, w.launch->range_count * sizeof(Range)) ||
           lies_in(address, thread.recent[0], sizeof(Range)) ||
           lies_in(address, thread.recent[1], sizeof(Range)) ||
           address - w.image < w.image_end - w.image;
}

// A thread accesses its own stack without further ado; see host/instrument.h.
void plain_access(Access access, uintptr_t address, size_t bytes, uintptr_t instruction) {
    Worker& w = worker();
    if (!w.races.on()) return;
    const unsigned int index = static_cast<unsigned int>(w.running);
    Fiber& fiber = w.fibers[index];
    // Within the call, for what lies behind it may belong to another line.
    const Source source = static_cast<Source>(instruction - 1 - w.image);
    const size_t offset = address - reinterpret_cast<uintptr_t>(fiber.block->shared);
    if (offset < w.launch->shared_bytes && bytes <= w.launch->shared_bytes - offset) {
        if (access == Access::kStore) {
            tag_written(w, fiber, address, bytes, place_of_instruction(source));
        }
    } else {
        const Range*& recent = fiber.thread->recent[static_cast<int>(access)];
        if (address < recent->low || address > recent->high || bytes > recent->high - address) {
            const Range* const range = look_up_range(*w.launch, access, address, bytes);
            if (!range) {
                // Variables of the library are not watched, so nobody may write them.
                if (access == Access::kLoad && is_of_the_host(w, *fiber.thread, address)) return;
                fail(w, {Fault::kPlainAccess, place_of_instruction(source), 0, access, address,
                         bytes});
            }
            recent = range;
        }
    }
    if (!watch(w, w.races.thread(index), access, address, bytes, source)) stop(w);
}

}  // namespace
}  // namespace host
