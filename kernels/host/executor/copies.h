// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies. They do what they do as late as is legal, or now and then earlier: where
// they will write there is poison from their issue on, and what they read is read when they land.
#pragma once
#include <stdlib.h>

#include "host/executor/boxes.h"
#include "host/executor/proxies.h"

namespace host {
namespace {

constexpr unsigned char kPoison = 0xff;  // NaN in every floating-point type
constexpr uint32_t kFloat32Type = 7;     // CU_TENSOR_MAP_DATA_TYPE_FLOAT32

// The range that holds these bytes and permits the access, or null.
const Range* look_up_range(const Launch& launch, Access access, uintptr_t address, size_t bytes) {
    for (size_t i = 0; i < launch.range_count; ++i) {
        const Range& range = launch.ranges[i];
        if (range.low <= address && address <= range.high && bytes <= range.high - address &&
            (access == Access::kLoad || range.writable)) {
            return &range;
        }
    }
    return nullptr;
}

// Notes a failure and returns false if these bytes of shared memory are not the block's.
bool check_shared(Worker& w,
                  const Block& block,
                  Access access,
                  const void* pointer,
                  size_t bytes,
                  size_t alignment,
                  Place place,
                  int fiber) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (is_shared(w, block, address, bytes) && address % alignment == 0) return true;
    note(w, {Fault::kSharedAccess, place, 0, access, address, bytes, alignment});
    w.failure.fiber = fiber;
    return false;
}

bool check_global(Worker& w,
                  Access access,
                  uintptr_t address,
                  size_t bytes,
                  size_t alignment,
                  Place place,
                  int fiber) {
    if (address % alignment == 0 && look_up_range(*w.launch, access, address, bytes)) return true;
    note(w, {Fault::kAccess, place, 0, access, address, bytes, alignment});
    w.failure.fiber = fiber;
    return false;
}

// --- cp.async ------------------------------------------------------------------------------------

struct CpAsync {
    CpAsync* next;
    void* shared;
    const void* global;
    int bytes;
    bool valid;
    unsigned int group;
    Place place;
};

void cp_async(Place place, void* shared, const void* global, int bytes, bool valid) {
    Worker& w = worker();
    Fiber& fiber = running_fiber(w);
    const size_t size = static_cast<size_t>(bytes);
    const uintptr_t source = reinterpret_cast<uintptr_t>(global);
    if (!check_shared(w, *fiber.block, Access::kStore, shared, size, size, place, w.running) ||
        (valid && !check_global(w, Access::kLoad, source, size, size, place, w.running))) {
        stop(w);
    }
    CpAsync* copy = w.spare_copies;
    if (copy) {
        w.spare_copies = copy->next;
    } else {
        copy = static_cast<CpAsync*>(malloc(sizeof(CpAsync)));
        if (!copy) HOST_MISUSE(w, place, "not enough memory on the CPU");
    }
    *copy = {nullptr, shared, global, bytes, valid, fiber.groups[0], place};
    (fiber.first_copy ? fiber.last_copy->next : fiber.first_copy) = copy;
    fiber.last_copy = copy;
    memset(shared, kPoison, size);
    if (!w.races.on()) return;
    const Actor actor = w.races.engine(static_cast<unsigned int>(w.running), Engine::kCpAsync,
                                       thread_of(fiber), time_of_group(copy->group));
    const Source here = w.races.source(place);
    if (valid) watch(w, actor, Access::kLoad, source, size, here);
    watch(w, actor, Access::kStore, reinterpret_cast<uintptr_t>(shared), size, here);
    if (w.failure.fault != Fault::kNone) stop(w);
}

// Lands the copies of a thread that belong to groups before `group`.
void land_cp_async(Worker& w, Fiber& fiber, unsigned int group) {
    while (fiber.first_copy && static_cast<int>(group - fiber.first_copy->group) > 0) {
        CpAsync* copy = fiber.first_copy;
        const size_t bytes = static_cast<size_t>(copy->bytes);
        if (copy->valid) {
            memcpy(copy->shared, copy->global, bytes);
        } else {
            memset(copy->shared, 0, bytes);
        }
        tag_written(w, fiber, reinterpret_cast<uintptr_t>(copy->shared), bytes, copy->place);
        fiber.first_copy = copy->next;
        copy->next = w.spare_copies;
        w.spare_copies = copy;
    }
}

// --- Bulk and tensor copies ----------------------------------------------------------------------

struct Copy {
    BulkCopy call;
    TensorMap map;  // a copy: the caller's may lie on the stack of a thread that returns
    Block* block;
    int fiber;
    unsigned int group;
    Place place;
    unsigned char* data;  // what a store has read of shared memory, or null
};

struct Copies {
    Copy* list;  // in the order of their issue
    unsigned int count, capacity;
};

size_t bytes_in_shared(const Copy& copy) {
    return copy.call.map ? box_bytes(copy.map) : static_cast<size_t>(copy.call.bytes);
}

// A part of a copy: `bytes` of shared memory, of which those from `begin` to before `end` belong to
// global memory from `global` on.
struct Part {
    unsigned char* shared;
    size_t bytes, begin, end;
    uintptr_t global;
};

template <class Visit>
void for_each_part(const Copy& copy, Visit visit) {
    unsigned char* const shared = static_cast<unsigned char*>(copy.call.shared);
    if (!copy.call.map) {
        const size_t bytes = static_cast<size_t>(copy.call.bytes);
        visit(Part{shared, bytes, 0, bytes, reinterpret_cast<uintptr_t>(copy.call.global)});
        return;
    }
    unsigned char* const base = copy.block->shared;
    const uint32_t offset = static_cast<uint32_t>(shared - base);
    for_each_piece(copy.map, copy.call.coordinates, offset, [&](const Piece& piece) {
        visit(Part{base + piece.shared, kPieceBytes, static_cast<size_t>(piece.begin),
                   static_cast<size_t>(piece.end), static_cast<uintptr_t>(piece.global)});
    });
}

void land_load(Worker& w, Copy& copy) {
    for_each_part(copy, [&](const Part& part) {
        const size_t inside = part.end - part.begin;
        if (inside != part.bytes) memset(part.shared, 0, part.bytes);
        if (inside != 0) {
            const uintptr_t from = part.global;
            memcpy(part.shared + part.begin, reinterpret_cast<const void*>(from), inside);
        }
    });
    if (w.failure.fault != Fault::kNone) return;
    MBarrier* barrier = find_mbarrier(w, *copy.block, copy.call.barrier, copy.place, copy.fiber);
    if (!barrier) return;
    if (w.races.on()) {
        w.races.finished(barrier->arriving, Engine::kBulkLoad, number_of(*copy.block, *barrier),
                         time_of_group(barrier->phase));
    }
    complete_bytes(w, *copy.block, *barrier, static_cast<int64_t>(bytes_in_shared(copy)),
                   copy.place, copy.fiber);
}

// A store reads shared memory first, and some time later writes to global memory.
void read_for_store(Worker& w, Copy& copy) {
    copy.data = static_cast<unsigned char*>(malloc(bytes_in_shared(copy)));
    if (!copy.data) {
        note_misuse(w, copy.place, copy.fiber, "not enough memory on the CPU");
        return;
    }
    unsigned char* to = copy.data;
    for_each_part(copy, [&](const Part& part) {
        memcpy(to, part.shared, part.bytes);
        to += part.bytes;
        const uintptr_t from = reinterpret_cast<uintptr_t>(part.shared);
        check_proxy(w, *copy.block, copy.fiber, Proxy::kReadLate, from, part.bytes, copy.place);
    });
}

void add_floats(uintptr_t to, const unsigned char* from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += sizeof(float)) {
        float sum, term;
        memcpy(&sum, reinterpret_cast<const void*>(to + i), sizeof(float));
        memcpy(&term, from + i, sizeof(float));
        sum += term;
        memcpy(reinterpret_cast<void*>(to + i), &sum, sizeof(float));
    }
}

void write_for_store(Copy& copy) {
    const bool add = copy.call.kind == BulkCopy::kAdd;
    const unsigned char* from = copy.data;
    for_each_part(copy, [&](const Part& part) {
        const unsigned char* const piece = from + part.begin;
        from += part.bytes;
        const size_t bytes = part.end - part.begin;
        const uintptr_t to = part.global;
        if (bytes == 0) return;
        if (add) {
            add_floats(to, piece, bytes);
        } else {
            memcpy(reinterpret_cast<void*>(to), piece, bytes);
        }
    });
    free(copy.data);
    copy.data = nullptr;
}

void remove_copy(Worker& w, unsigned int index) {
    Copies& all = *w.copies;
    --all.count;
    memmove(&all.list[index], &all.list[index + 1], (all.count - index) * sizeof(Copy));
}

// Takes one copy a step further: a load lands; a store reads, and then writes.
void advance(Worker& w, unsigned int index) {
    // A landing may wake threads, but starts no copies: the record stays where it is.
    Copy& copy = w.copies->list[index];
    if (copy.call.kind == BulkCopy::kLoad) {
        land_load(w, copy);
        remove_copy(w, index);
    } else if (!copy.data) {
        read_for_store(w, copy);
    } else {
        write_for_store(copy);
        remove_copy(w, index);
    }
}

bool land_one(Worker& w) {
    if (w.copies->count == 0) return false;
    advance(w, w.schedule.choose(w.copies->count));
    return true;
}

// All that a copy of the running thread reads and writes, as races see it.
void watch_copy(Worker& w, const Copy& copy, const MBarrier* barrier) {
    const unsigned int fiber = static_cast<unsigned int>(copy.fiber);
    const unsigned int thread = thread_of(w.fibers[fiber]);
    const bool load = copy.call.kind == BulkCopy::kLoad;
    const Time time = time_of_group(load ? barrier->phase : copy.group);
    const unsigned int index = load ? number_of(*copy.block, *barrier) : thread;
    const Actor reader =
        w.races.engine(fiber, load ? Engine::kBulkLoad : Engine::kBulkRead, index, time);
    const Actor writer =
        w.races.engine(fiber, load ? Engine::kBulkLoad : Engine::kBulkWrite, index, time);
    const Access write = copy.call.kind == BulkCopy::kAdd ? Access::kAtomic : Access::kStore;
    const Source source = w.races.source(copy.place);
    for_each_part(copy, [&](const Part& part) {
        const uintptr_t shared = reinterpret_cast<uintptr_t>(part.shared);
        const size_t inside = part.end - part.begin;
        if (load) {
            watch(w, writer, write, shared, part.bytes, source);
            if (inside) watch(w, reader, Access::kLoad, part.global, inside, source);
        } else {
            watch(w, reader, Access::kLoad, shared, part.bytes, source);
            if (inside) watch(w, writer, write, part.global, inside, source);
        }
    });
    if (w.failure.fault != Fault::kNone) stop(w);
}

void bulk_copy(Place place, const BulkCopy& call) {
    Worker& w = worker();
    Fiber& fiber = running_fiber(w);
    Block& block = *fiber.block;
    const bool load = call.kind == BulkCopy::kLoad;
    size_t bytes = static_cast<size_t>(call.bytes), alignment = 16;
    TensorMap map = {};
    if (call.map) {
        memcpy(&map, call.map, sizeof(map));
        const uintptr_t shared = reinterpret_cast<uintptr_t>(call.shared);
        if (const char* problem = box_problem(map, shared_offset(block, shared))) {
            HOST_MISUSE(w, place, "%s", problem);
        }
        if (static_cast<int>(map.rank) != call.rank) {
            HOST_MISUSE(w, place, "%d coordinates for a tensor of rank %u", call.rank, map.rank);
        }
        // Loads may begin before the tensor. Stores and reductions that do are illegal
        // instructions to an H200, whichever the axis.
        for (int axis = 0; axis < call.rank && !load; ++axis) {
            if (call.coordinates[axis] >= 0) continue;
            HOST_MISUSE(w, place, "coordinate %d of a store must not be negative, got %d", axis,
                        call.coordinates[axis]);
        }
        if (call.kind == BulkCopy::kAdd && map.type != kFloat32Type) {
            HOST_MISUSE(w, place, "adds float32 only; the tensor has another type");
        }
        // Rows that are shorter than the swizzle lie apart.
        bytes = box_rows(map) * row_pitch(map);
        alignment = 128;
    } else {
        if (call.bytes <= 0 || call.bytes % 16) {
            HOST_MISUSE(w, place, "a bulk copy moves a positive multiple of 16 bytes, got %d",
                        call.bytes);
        }
        const uintptr_t global = reinterpret_cast<uintptr_t>(call.global);
        if (!check_global(w, load ? Access::kLoad : Access::kStore, global, bytes, 16, place,
                          w.running)) {
            stop(w);
        }
    }
    if (!check_shared(w, block, load ? Access::kStore : Access::kLoad, call.shared, bytes,
                      alignment, place, w.running)) {
        stop(w);
    }
    MBarrier* barrier = nullptr;
    if (load) {
        barrier = find_mbarrier(w, block, call.barrier, place, -1);
        if (!barrier) stop(w);
        check_initialised(w, *barrier, place);
        if (!barrier->fenced) {
            HOST_MISUSE(w, place,
                        "the mbarrier at shared+%u was initialised without "
                        "fence_mbarrier_init()",
                        shared_offset(block, barrier->address));
        }
    }
    Copies& all = *w.copies;
    if (all.count == all.capacity) {
        const unsigned int capacity = all.capacity ? 2 * all.capacity : 64;
        Copy* list = static_cast<Copy*>(realloc(all.list, capacity * sizeof(Copy)));
        if (!list) HOST_MISUSE(w, place, "not enough memory on the CPU");
        all.list = list;
        all.capacity = capacity;
    }
    Copy& copy = all.list[all.count++];
    copy = {call, map, &block, w.running, fiber.groups[1], place, nullptr};
    for_each_part(copy, [&](const Part& part) {
        if (w.failure.fault != Fault::kNone) return;
        const uintptr_t address = reinterpret_cast<uintptr_t>(part.shared);
        if (part.begin != part.end &&
            !check_global(w, load ? Access::kLoad : Access::kStore, part.global,
                          part.end - part.begin, 1, place, w.running)) {
            return;
        }
        if (load) memset(part.shared, kPoison, part.bytes);
        check_proxy(w, block, w.running, load ? Proxy::kWrite : Proxy::kRead, address, part.bytes,
                    place);
    });
    if (w.failure.fault != Fault::kNone) stop(w);
    if (w.races.on()) watch_copy(w, copy, barrier);
    yield(place);
}

// --- Groups --------------------------------------------------------------------------------------

void commit(Place, Queue queue) { ++running_fiber(worker()).groups[static_cast<int>(queue)]; }

// The running thread's bulk copies of groups before `group` read, or are done.
void finish_bulk(Worker& w, unsigned int group, bool only_read) {
    const Copies& all = *w.copies;
    for (unsigned int i = 0; i < all.count && w.failure.fault == Fault::kNone;) {
        const Copy& copy = all.list[i];
        const bool concerned = copy.fiber == w.running && copy.call.kind != BulkCopy::kLoad &&
                               static_cast<int>(group - copy.group) > 0;
        if (!concerned || (only_read && copy.data)) {
            ++i;
        } else {
            advance(w, i);  // removes it, or makes it read
        }
    }
}

void wait(Place place, Queue queue, int pending, bool only_read) {
    Worker& w = worker();
    Fiber& fiber = running_fiber(w);
    const unsigned int group =
        fiber.groups[static_cast<int>(queue)] - static_cast<unsigned int>(pending);
    if (queue == Queue::kCpAsync) {
        land_cp_async(w, fiber, group);
    } else {
        finish_bulk(w, group, only_read);
    }
    if (w.failure.fault != Fault::kNone) stop(w);
    if (w.races.on() && static_cast<int>(group) > 0) {
        const unsigned int index = static_cast<unsigned int>(w.running);
        const unsigned int thread = thread_of(fiber);
        if (queue == Queue::kCpAsync) {
            w.races.finished(index, Engine::kCpAsync, thread, group);
        } else {
            w.races.finished(index, Engine::kBulkRead, thread, group);
            if (!only_read) w.races.finished(index, Engine::kBulkWrite, thread, group);
        }
    }
    yield(place);
}

// The running thread returns. Its shared memory may be another block's now.
void finish_copies(Worker& w, Fiber& fiber) {
    ++fiber.groups[0];
    land_cp_async(w, fiber, fiber.groups[0]);
    const Copies& all = *w.copies;
    for (unsigned int i = 0; i < all.count; ++i) {
        const Copy& copy = all.list[i];
        if (copy.fiber != w.running) continue;
        if (copy.call.kind != BulkCopy::kLoad && !copy.data) {
            note_misuse(w, copy.place, copy.fiber,
                        "the thread returned before this copy had read shared memory; wait with "
                        "bulk_wait_read");
        }
    }
}

// All threads of a block have returned. Whether something is still on its way to global memory.
bool has_copies(Worker& w, const Block& block) {
    bool some = false;
    for (unsigned int i = 0; i < w.copies->count; ++i) {
        const Copy& copy = w.copies->list[i];
        if (copy.block != &block) continue;
        some = true;
        if (copy.call.kind != BulkCopy::kLoad) continue;
        note_misuse(w, copy.place, copy.fiber,
                    "the block ended before this copy had landed in its shared memory");
    }
    return some;
}

}  // namespace
}  // namespace host
