// SPDX-License-Identifier: Apache-2.0
// The executor of the CPU back end: runs a kernel, compiled for the CPU, as a GPU would.
//
// One block or a few are alive at once. Their threads are fibers of one operating system thread; a
// fiber runs until it has to wait for others, and then switches straight to the next that can go
// on:
//
//     fiber 0   ###|              ####|            #|
//     fiber 1      |###|          |   |##|          |##|    | = __syncthreads, a shuffle, ...
//     fiber 2          |####|     |      |###|         |#
//                           ^ the last one to arrive makes all of them ready
//
// The launch's seed chooses who is next: 0 takes the one that has been ready for longest; an odd
// seed takes any; an even one runs the warp of highest priority, with random priorities that change
// at random moments, which lets one warp run far ahead of another. A kernel that is right gives the
// same result under all of them. Shared memory is filled with NaN before each block, ends at an
// inaccessible page, and every access to global memory is checked against the launch's arrays.
// Asynchronous copies and products come to their end as late as they may, or at random before.
//
// What is wrong ends the launch, never the process: the fiber that notices it, or the handler of
// the signal that it caused, notes the facts and switches back to the stack of the launch, where
// they become text. Nothing is unwound, for fibers own nothing. All state belongs to the operating
// system thread, so several of them may launch at once.
//
// The parts; a line needs those above it:
//
//     context.h, schedule.h, text.h    switching stacks; who is next; words
//     layouts.h, boxes.h, products.h   pure arithmetic: where elements lie, what is multiplied
//     races.h, races/                  what orders accesses, and accesses that nothing orders
//     state.h, failure.h, watch.h      fibers and blocks; how a launch ends; accesses as races see
//     them waiting.h, mbarrier.h            how threads wait for each other proxies.h, copies.h
//     asynchronous copies wgmma.h                          instructions of a warp on matrices
//     accesses.h                       plain accesses of instrumented kernels
//     memory.h, signals.h, report.h    stacks and guard pages; faults of the CPU; what is said
//
// Only libc is used: with the zig compiler, libc++ would first have to be built, for a minute.

#include "host/executor.h"

// So many switches by atomic operations and fences, with no thread getting any further, mean that
// a loop waits for what never comes.
#ifndef CUFLASH_SPIN_LIMIT
#define CUFLASH_SPIN_LIMIT 1000000000
#endif

#include "host/executor/accesses.h"
#include "host/executor/memory.h"
#include "host/executor/report.h"
#include "host/executor/signals.h"

namespace host {
namespace {

const Range* find_range(
    Access access, uintptr_t address, size_t bytes, size_t alignment, Place place) {
    Worker& w = worker();
    if (address % alignment == 0) {
        const Range* range = look_up_range(*w.launch, access, address, bytes);
        if (range) return range;
    }
    fail(w, {Fault::kAccess, place, 0, access, address, bytes, alignment});
}

void shared_memory_too_small(size_t needed, size_t alignment) {
    fail(worker(), {Fault::kSharedSize, {}, 0, {}, 0, needed, alignment});
}

void fence(Place place) {
    Worker& w = worker();
    if (w.races.on()) w.races.fence(static_cast<unsigned int>(w.running));
    yield(place);
}

void atomic(Place place, const void* address, size_t bytes) {
    Worker& w = worker();
    if (!w.races.on()) return;
    const uintptr_t number = reinterpret_cast<uintptr_t>(address);
    const unsigned int fiber = static_cast<unsigned int>(w.running);
    if (!watch_thread(w, fiber, Access::kAtomic, number, bytes, place)) stop(w);
    if (!w.races.atomic(fiber, number)) fail_of_signals(w, place);
}

const Executor kExecutor = {
    block_barrier,
    warp_exchange,
    warp_vote,
    warp_barrier,
    yield,
    find_range,
    shared_memory_too_small,
    fence,
    atomic,
    named_barrier,
    elect_one,
    change_registers,
    fence_proxy_async,
    semaphore_wait,
    semaphore_add,
    mbarrier_init,
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_wait,
    cp_async,
    bulk_copy,
    commit,
    wait,
    ldmatrix,
    stmatrix,
    mma_sync,
    wgmma_issue,
    wgmma_fence,
    wgmma_commit,
    wgmma_wait,
    plain_access,
};

// ---------------------------------------------------------------------------------------------
// Blocks.

// The life of a fiber.
void run_thread() {
    Worker& w = worker();
    w.launch->entry(w.params);
    Fiber& fiber = running_fiber(w);
    fiber.state = State::kReturned;
    w.idle_switches = 0;
    finish_copies(w, fiber);
    check_no_product(w);
    if (w.failure.fault != Fault::kNone) stop(w);
    // The last thread of a block leaves it to run_blocks to put another in its place.
    if (++fiber.block->returned == w.launch->block) switch_context(&fiber.context, &w.main);
    switch_to_next(w, fiber);
    __builtin_unreachable();
}

void fill_shared_memory(Block& block) {
    memset(block.accessible, kPoison, static_cast<size_t>(block.accessible_end - block.accessible));
    memset(block.tags, 0, block.tag_count * sizeof(Tag));
    block.tagged = false;
}

// Are the accessible bytes around shared memory as fill_shared_memory left them?
bool slack_untouched(const Block& block, size_t shared_bytes) {
    for (const unsigned char* p = block.accessible; p < block.accessible_end; ++p) {
        if (p == block.shared) p += shared_bytes;
        if (p < block.accessible_end && *p != kPoison) return false;
    }
    return true;
}

const Range kNowhere = {UINTPTR_MAX, 0, "", 0};

void forget_barriers(Worker& w, Block& block) {
    for (NamedBarrier& barrier : block.named) {
        if (w.races.on()) w.races.clear(barrier.clock);
        barrier.threads = barrier.arrived = 0;
    }
    for (unsigned int i = 0; i < block.mbarrier_count; ++i) {
        if (!w.races.on()) break;
        w.races.clear(block.mbarriers[i].arriving);
        w.races.clear(block.mbarriers[i].completed);
    }
    block.mbarrier_count = 0;
}

void start_block(Worker& w, Block& block, unsigned int index) {
    const Launch& launch = *w.launch;
    const unsigned int threads = launch.block;
    // Registers are given to warps in steps of 8 a thread, and a thread has at most 255.
    unsigned int registers = kRegisterFile / (w.warps * kWarpSize) / 8 * 8;
    if (registers > 248) registers = 248;
    block.alive = true;
    block.index = index;
    block.returned = 0;
    block.barrier = {};
    forget_barriers(w, block);
    block.free_registers = 0;  // a block has those that its warps start with, and no more
    memset(block.marks, 0, sizeof(block.marks));
    fill_shared_memory(block);
    if (w.races.on()) w.races.start_block(block.first_fiber, index, block.shared);
    for (unsigned int i = 0; i < w.warps; ++i) {
        const unsigned int lanes = threads - i * kWarpSize;
        Warp& warp = w.warps_of[warp_of(block.first_fiber) + i];
        warp.lanes = lanes < kWarpSize ? (1u << lanes) - 1 : 0xffffffff;
        warp.open = 0;
        warp.registers = registers;
        warp.products = warp.product_groups = 0;
        warp.fenced = false;
    }
    for (unsigned int i = 0; i < threads; ++i) {
        const unsigned int number = block.first_fiber + i;
        const uintptr_t stack = stack_of(w, number);
        Fiber& fiber = w.fibers[number];
        fiber.block = &block;
        fiber.place = {};
        fiber.groups[0] = fiber.groups[1] = 0;
        fiber.proxy_fences = 0;
        fiber.thread = thread_of_stack(stack);
        *fiber.thread = {{&kNowhere, &kNowhere}, &kExecutor,         block.shared,
                         launch.shared_bytes,    {i, 0, 0},          {index, 0, 0},
                         {threads, 1, 1},        {launch.grid, 1, 1}};
        prepare_context(&fiber.context, stack + w.page, reinterpret_cast<uintptr_t>(fiber.thread),
                        run_thread);
        make_ready(w, number);
    }
}

// Of a block whose last thread has returned, and whose last copy has landed.
void end_block(Worker& w, Block& block) {
    if (w.failure.fault == Fault::kNone && !slack_untouched(block, w.launch->shared_bytes)) {
        note(w, {Fault::kSharedOverrun});
    }
    if (w.failure.fault == Fault::kNone && w.races.on()) {
        const int fiber = w.races.unwritten(block.first_fiber, w.misuse, sizeof(w.misuse));
        if (fiber >= 0) {
            note(w, {Fault::kRace});
            w.failure.fiber = fiber;
        }
    }
    block.alive = false;
}

bool run_blocks(Worker& w, const unsigned int* order) {
    unsigned int started = 0, ended = 0;
    for (; started < w.resident; ++started) start_block(w, w.blocks[started], order[started]);
    for (;;) {
        const int next = next_ready(w);
        if (next >= 0) {
            w.running = next;
            switch_context(&w.main, &w.fibers[next].context);
            w.stopped = w.running;
            w.running = -1;
        } else if (!some_returned(w)) {
            note(w, {Fault::kStuck});
        }
        for (unsigned int i = 0; i < w.resident; ++i) {
            Block& block = w.blocks[i];
            if (!block.alive || block.returned < w.launch->block || has_copies(w, block)) continue;
            end_block(w, block);
            if (w.failure.fault != Fault::kNone) return false;
            if (++ended == w.launch->grid) return true;
            if (started < w.launch->grid) start_block(w, block, order[started++]);
        }
        if (w.failure.fault != Fault::kNone) return false;
    }
}

// How many blocks are alive at once: what the launch says, or one in the plain schedule and two in
// the others, as far as there is room.
unsigned int choose_resident(const Launch& launch, unsigned int warps) {
    unsigned int resident = launch.resident ? launch.resident : launch.seed ? 2 : 1;
    const unsigned int room = kMaxWarps / warps;
    if (resident > room) resident = room;
    if (resident > kMaxResident) resident = kMaxResident;
    return resident < launch.grid ? resident : launch.grid;
}

bool provide_memory(Worker& w) {
    const Launch& launch = *w.launch;
    for (unsigned int i = 0; i < w.resident; ++i) {
        Block& block = w.blocks[i];
        block.first_fiber = i * w.warps * kWarpSize;
        block.alive = false;
        if (!provide_shared_memory(w, block, launch.shared_bytes, launch.shared_alignment)) {
            return false;
        }
    }
    return provide_stacks(w, w.resident * w.warps * kWarpSize) &&
           provide_params(w, launch.params, launch.params_bytes) &&
           w.races.start_launch(launch, w.resident);
}

}  // namespace
}  // namespace host

// Runs a launch; returns 0, or 1 with a report. At most kMaxThreads threads a block, at least one
// of them and one block.
extern "C" __attribute__((visibility("default"))) int cuflash_launch(host::Launch* launch) {
    using namespace host;
    if (launch->instrumented && launch->grid > kMaxBlocks) {
        Text(launch->report, launch->report_bytes)
            .add("kernel %s: a grid of %u blocks is too large to look for races, at most %u",
                 launch->kernel, launch->grid, kMaxBlocks);
        return 1;
    }
    Worker* w = get_worker();
    unsigned int* order = static_cast<unsigned int*>(malloc(launch->grid * sizeof(unsigned int)));
    if (w) {
        w->launch = launch;
        w->failure = {Fault::kNone};
        w->warps = (launch->block + kWarpSize - 1) / kWarpSize;
        w->resident = choose_resident(*launch, w->warps);
        if (launch->instrumented) find_image(*w);
    }
    if (!w || !order || !provide_memory(*w)) {
        Text(launch->report, launch->report_bytes)
            .add("kernel %s: not enough memory to run it on the CPU", launch->kernel);
        free(order);
        return 1;
    }
    for (unsigned int i = 0; i < kMaxFibers; ++i) w->fibers[i].state = State::kReturned;
    w->schedule.start_launch(launch->seed, w->resident * w->warps);
    if (launch->in_order) {
        for (unsigned int i = 0; i < launch->grid; ++i) order[i] = i;
    } else {
        w->schedule.shuffle(order, launch->grid);
    }
    stack_t previous_stack;
    catch_signals(*w, &previous_stack);
    const bool done = run_blocks(*w, order);
    if (!done) write_report(*w, *launch);
    release_signals(&previous_stack);
    drop_all(*w);
    for (Block& block : w->blocks) forget_barriers(*w, block);
    w->races.end_launch();
    w->launch = nullptr;
    free(order);
    return done ? 0 : 1;
}
