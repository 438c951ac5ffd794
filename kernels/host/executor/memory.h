// SPDX-License-Identifier: Apache-2.0
// The memory of a worker: stacks, shared memory between inaccessible pages, an aligned copy of the
// parameters. It is kept from launch to launch.
#pragma once
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "host/executor/wgmma.h"

namespace host {
namespace {

constexpr size_t kSignalStackBytes = 64 * 1024;
constexpr size_t kParamsAlignment = 128;
constexpr size_t kGuardBytes = 1024 * 1024;  // inaccessible, on both sides of shared memory

// Records that wait to be used again.
void free_spares(Worker& w) {
    while (Wgmma* it = w.spare_products) {
        w.spare_products = it->next;
        free(it);
    }
    while (CpAsync* it = w.spare_copies) {
        w.spare_copies = it->next;
        free(it);
    }
}

// A failed launch leaves some under way.
void drop_all(Worker& w) {
    for (Warp& warp : w.warps_of) {
        while (Wgmma* it = warp.first_product) {
            warp.first_product = it->next;
            it->next = w.spare_products;
            w.spare_products = it;
        }
    }
    for (unsigned int i = 0; i < w.usable; ++i) {
        Fiber& fiber = w.fibers[i];
        while (CpAsync* it = fiber.first_copy) {
            fiber.first_copy = it->next;
            it->next = w.spare_copies;
            w.spare_copies = it;
        }
    }
    for (unsigned int i = 0; i < w.copies->count; ++i) free(w.copies->list[i].data);
    w.copies->count = 0;
}

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

void* reserve(size_t bytes) {
    void* memory =
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
}

void delete_worker(void* pointer) {
    Worker* w = static_cast<Worker*>(pointer);
    if (w->reserved) munmap(w->reserved, (kMaxFibers + 1) * kStackBytes);
    for (Block& block : w->blocks) {
        if (block.region) munmap(block.region, block.region_bytes);
        free(block.tags);
    }
    free_spares(*w);
    if (w->copies) free(w->copies->list);
    free(w->copies);
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
    w->copies = static_cast<Copies*>(calloc(1, sizeof(Copies)));
    w->reserved = reserve((kMaxFibers + 1) * kStackBytes);
    if (!w->reserved || !w->signal_stack || !w->copies) {
        delete_worker(w);
        return nullptr;
    }
    w->stacks = round_up(reinterpret_cast<uintptr_t>(w->reserved), kStackBytes);
    pthread_once(&worker_once, create_worker_key);
    pthread_setspecific(worker_key, w);
    return this_worker = w;
}

// Stacks for so many fibers, each with an inaccessible page below.
bool provide_stacks(Worker& w, unsigned int fibers) {
    for (; w.usable < fibers; ++w.usable) {
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
bool provide_shared_memory(Worker& w, Block& block, size_t bytes, size_t alignment) {
    const size_t aligned = round_up(bytes, alignment);
    const size_t needed = round_up(aligned, w.page);
    if (needed + 2 * kGuardBytes > block.region_bytes) {
        if (block.region) munmap(block.region, block.region_bytes);
        block.region = static_cast<unsigned char*>(reserve(needed + 2 * kGuardBytes));
        block.region_bytes = block.region ? needed + 2 * kGuardBytes : 0;
        if (!block.region) return false;
        block.accessible_end = block.region + block.region_bytes - kGuardBytes;
        block.accessible = block.accessible_end;
    }
    unsigned char* first = block.accessible_end - needed;
    if (first < block.accessible &&
        mprotect(first, static_cast<size_t>(block.accessible - first), PROT_READ | PROT_WRITE)) {
        return false;
    }
    if (first > block.accessible &&
        mprotect(block.accessible, static_cast<size_t>(first - block.accessible), PROT_NONE)) {
        return false;
    }
    block.accessible = first;
    block.shared = block.accessible_end - aligned;
    const unsigned int tags = static_cast<unsigned int>(aligned / kTagBytes) + 1;
    if (tags > block.tag_count) {
        free(block.tags);
        block.tags = static_cast<Tag*>(malloc(tags * sizeof(Tag)));
        block.tag_count = block.tags ? tags : 0;
    }
    return block.tags;
}

bool provide_params(Worker& w, const void* params, size_t bytes) {
    if (bytes > w.params_bytes) {
        free(w.params);
        w.params_bytes = round_up(bytes, kParamsAlignment);
        w.params = aligned_alloc(kParamsAlignment, w.params_bytes);
        if (!w.params) w.params_bytes = 0;
    }
    if (w.params) memcpy(w.params, params, bytes);
    return bytes == 0 || w.params;
}

}  // namespace
}  // namespace host
