// SPDX-License-Identifier: Apache-2.0
// Vector clocks. Each thread of a block has a slot, and so have its engines, which do asynchronous
// work. A clock says up to which time of each slot everything is known.
//
//     slots:  threads | products, one a warp | bulk loads, one an mbarrier | cp.async, one a thread
//             | what bulk stores read, one a thread | what they write, one a thread
//
// Clocks are shared and never changed while several own them: after a barrier a whole block owns
// one. What is known of other blocks, which is mostly nothing, lies beside: blocks that run one
// after the other have slots of the same numbers, but nothing orders them.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "host/executor.h"
#include "host/executor/races/arena.h"

namespace host {
namespace {

using Time = uint32_t;

constexpr unsigned int kMaxSlots = 4 * 1024 + 32 + 64;
constexpr unsigned int kMaxGroups = kMaxSlots / kWarpSize;

// The slots of engines, where a block has `threads`, a multiple of kWarpSize.
enum class Engine { kProduct, kBulkLoad, kCpAsync, kBulkRead, kBulkWrite };

unsigned int first_slot(Engine engine, unsigned int threads) {
    switch (engine) {
        case Engine::kProduct:
            return threads;
        case Engine::kBulkLoad:
            return threads + 32;
        case Engine::kCpAsync:
            return threads + 96;
        case Engine::kBulkRead:
            return 2 * threads + 96;
        default:
            return 3 * threads + 96;
    }
}

struct Times {
    unsigned int references;
    unsigned int length;      // all slots from there on are 0
    Time floors[kMaxGroups];  // at most the least of each 32 slots; see settle()
    Time at[kMaxSlots];

    Time of(unsigned int slot) const { return slot < length ? at[slot] : 0; }
    Time floor_of(unsigned int slot) const { return slot < length ? floors[slot / kWarpSize] : 0; }
};

void extend(Times& times, unsigned int length) {
    if (length <= times.length) return;
    memset(times.at + times.length, 0, (length - times.length) * sizeof(Time));
    for (unsigned int i = times.length; i < length; i += kWarpSize) times.floors[i / kWarpSize] = 0;
    times.length = length;
}

void set_time(Times& times, unsigned int slot, Time time) {
    extend(times, (slot / kWarpSize + 1) * kWarpSize);
    if (times.at[slot] < time) times.at[slot] = time;
}

// Lengths are multiples of 32, which lets the compiler use vectors in these loops.
void merge_into(Times& to, const Times& from) {
    extend(to, from.length);
    for (unsigned int i = 0; i < from.length; i += kWarpSize) {
        for (unsigned int j = i; j < i + kWarpSize; ++j) {
            to.at[j] = to.at[j] < from.at[j] ? from.at[j] : to.at[j];
        }
    }
}

bool covers(const Times& large, const Times& small) {
    const unsigned int common = small.length < large.length ? small.length : large.length;
    for (unsigned int i = 0; i < common; i += kWarpSize) {
        Time beyond = 0;
        for (unsigned int j = i; j < i + kWarpSize; ++j) beyond |= small.at[j] > large.at[j];
        if (beyond) return false;
    }
    for (unsigned int i = common; i < small.length; ++i) {
        if (small.at[i]) return false;
    }
    return true;
}

// Of a clock that accesses are compared with: they are quicker where the floors are as high as they
// can be. That they are never too high needs nothing, for times only grow.
void settle(Times& times) {
    for (unsigned int i = 0; i < times.length; i += kWarpSize) {
        Time least = times.at[i];
        for (unsigned int j = i; j < i + kWarpSize; ++j) {
            least = times.at[j] < least ? times.at[j] : least;
        }
        times.floors[i / kWarpSize] = least;
    }
}

Times* keep(Times* times) {
    if (times) ++times->references;
    return times;
}

// What is known of a block.
struct Known {
    unsigned int block;
    Times* times;
};

// What is known of blocks, in their order. Never changed once it is made.
struct Foreign {
    unsigned int references, count;
    Foreign *previous, *next;  // of all that there are

    Known* known() { return reinterpret_cast<Known*>(this + 1); }
    const Known* known() const { return reinterpret_cast<const Known*>(this + 1); }

    Times* of(unsigned int block) const {
        unsigned int low = 0, high = count;
        while (low < high) {
            const unsigned int middle = (low + high) / 2;
            if (known()[middle].block < block) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return low < count && known()[low].block == block ? known()[low].times : nullptr;
    }
};

Foreign* keep(Foreign* foreign) {
    if (foreign) ++foreign->references;
    return foreign;
}

// Where clocks come from and go to.
class Clocks {
  public:
    bool open() {
        all_ = nullptr;
        return times_.open();
    }
    void close() {
        while (Foreign* foreign = all_) {
            all_ = foreign->next;
            free(foreign);
        }
        times_.close();
    }

    Times* make() {
        Times& times = times_[times_.take()];
        times.references = 1;
        times.length = 0;
        return &times;
    }
    Times* copy(const Times& other) {
        Times* times = make();
        times->length = other.length;
        memcpy(times->at, other.at, other.length * sizeof(Time));
        memcpy(times->floors, other.floors, other.length / kWarpSize * sizeof(Time));
        return times;
    }
    void drop(Times* times) {
        if (times && --times->references == 0) times_.give(times_.number_of(times));
    }
    void drop(Foreign* foreign) {
        if (!foreign || --foreign->references) return;
        for (unsigned int i = 0; i < foreign->count; ++i) drop(foreign->known()[i].times);
        (foreign->previous ? foreign->previous->next : all_) = foreign->next;
        if (foreign->next) foreign->next->previous = foreign->previous;
        free(foreign);
    }
    // The owner of `times` may change it from now on.
    void own(Times*& times) {
        if (times->references == 1) return;
        Times* const copied = copy(*times);
        drop(times);
        times = copied;
    }

    // Takes over the reference to `times`.
    Foreign* make_foreign(unsigned int block, Times* times) {
        Foreign* foreign = make_foreign(1);
        if (foreign) {
            foreign->known()[foreign->count++] = {block, times};
        } else {
            drop(times);
        }
        return foreign;
    }

    Times* joined(Times* a, Times* b) {
        if (a == b || covers(*a, *b)) return keep(a);
        if (covers(*b, *a)) return keep(b);
        Times* both = copy(*a);
        merge_into(*both, *b);
        settle(*both);
        return both;
    }

    Foreign* joined(Foreign* a, Foreign* b) {
        if (!b || a == b) return keep(a);
        if (!a) return keep(b);
        Foreign* both = make_foreign(a->count + b->count);
        if (!both) return nullptr;
        const Known *x = a->known(), *y = b->known();
        const Known *const last_x = x + a->count, *const last_y = y + b->count;
        Known* to = both->known();
        while (x < last_x || y < last_y) {
            if (y == last_y || (x < last_x && x->block < y->block)) {
                *to++ = {x->block, keep(x->times)};
                ++x;
            } else if (x == last_x || y->block < x->block) {
                *to++ = {y->block, keep(y->times)};
                ++y;
            } else {
                *to++ = {x->block, joined(x->times, y->times)};
                ++x;
                ++y;
            }
        }
        both->count = static_cast<unsigned int>(to - both->known());
        return both;
    }
    // `to` becomes what it is joined with `other`.
    void join(Foreign*& to, Foreign* other) {
        if (!other || to == other) return;
        Foreign* const both = joined(to, other);
        drop(to);
        to = both;
    }

  private:
    // Without memory what is known is forgotten, which at worst accuses a right kernel.
    Foreign* make_foreign(unsigned int room) {
        Foreign* foreign = static_cast<Foreign*>(malloc(sizeof(Foreign) + room * sizeof(Known)));
        if (!foreign) return nullptr;
        *foreign = {1, 0, nullptr, all_};
        if (all_) all_->previous = foreign;
        return all_ = foreign;
    }

    Arena<Times> times_;
    Foreign* all_;
};

}  // namespace
}  // namespace host
