// SPDX-License-Identifier: Apache-2.0
// Races: accesses of two threads to the same bytes, one of them a write, that nothing orders.
//
// Instrumented kernels tell each access, instructions theirs. Whoever synchronises hands on what he
// knows: vector clocks (races/clocks.h). An access races with an earlier one to the same bytes
// (races/shadow.h) of which it does not know, whatever the order in which they came this time.
//
// Asynchronous work is done by engines, which have clocks' slots of their own. All that it accesses
// is looked at when it is issued: it comes after what its thread knows then, and is known to those
// who wait for it, at the time that it has. Work of an engine ends in the order of its times.
#pragma once
#include "host/executor/races/places.h"
#include "host/executor/races/shadow.h"
#include "host/executor/schedule.h"
#include "host/executor/text.h"

namespace host {
namespace {

// What threads knew when they released something, for those who acquire it.
struct Clock {
    Times* times;  // null: nobody has released it
    Foreign* foreign;
    Times* merged[4];  // clocks that are contained in `times`
    unsigned int next;
};

// Who accesses memory: a thread, or an engine for it.
struct Actor {
    unsigned int fiber;
    View view;
    Stamp stamp;
};

class Races {
  public:
    // All that follows may be called only if this is true: the kernel is instrumented.
    bool on() const { return state_; }

    // Of at most kMaxBlocks. False if there is not enough memory.
    bool start_launch(const Launch& launch, unsigned int resident) {
        if (!launch.instrumented) return true;
        state_ = static_cast<State*>(calloc(1, sizeof(State)));
        if (!state_) return false;
        State& s = *state_;
        s.launch = &launch;
        s.threads = (launch.block + kWarpSize - 1) / kWarpSize * kWarpSize;
        bool good = s.clocks.open() && s.shadow.open(s.threads / kWarpSize) && s.places.open() &&
                    s.signals.open() && s.events.open();
        s.line_bytes = (launch.shared_bytes / kLineBytes + 2) * sizeof(Record);
        for (unsigned int i = 0; i < resident; ++i) {
            s.homes[i].lines = static_cast<Record*>(reserve_zeros(s.line_bytes));
            good = good && s.homes[i].lines;
        }
        good = good && open_tracts(s);
        if (!good) end_launch();
        return good;
    }

    void end_launch() {
        if (!state_) return;
        State& s = *state_;
        for (Home& home : s.homes) {
            if (home.lines) munmap(home.lines, s.line_bytes);
        }
        for (unsigned int i = 0; i < s.tract_count; ++i) {
            Tract& tract = s.tracts[i];
            if (tract.lines) munmap(tract.lines, bytes_of(tract));
        }
        free(s.tracts);
        s.events.close();
        s.signals.close();
        s.places.close();
        s.shadow.close();
        s.clocks.close();
        free(state_);
        state_ = nullptr;
    }

    // The threads of a block are fibers from `first` on; nothing is known to them, and nothing has
    // been done to its shared memory.
    void start_block(unsigned int first, unsigned int index, const unsigned char* shared) {
        State& s = *state_;
        Home& home = s.homes[first / s.threads];
        home.index = index;
        home.first = first;
        home.shared = reinterpret_cast<uintptr_t>(shared);
        home.unwritten = {};
        const size_t lines = s.launch->shared_bytes / kLineBytes + 1;
        for (size_t i = 0; i < lines; ++i) s.shadow.clear(home.lines[i]);
        Times* const start = s.clocks.make();
        extend(*start, s.threads);
        // Lanes that a small last warp does not have never do anything.
        for (unsigned int i = s.launch->block; i < s.threads; ++i) start->at[i] = UINT32_MAX;
        settle(*start);
        for (unsigned int i = first; i < first + s.threads; ++i) {
            Self& self = s.selves[i];
            forget(s, self);
            self = {};
            self.home = &home;
            self.times = keep(start);
            s.now[i] = 1;
            s.copied[i] = 0;
        }
        s.clocks.drop(start);
    }

    // --- What orders -----------------------------------------------------------------------------

    // All that these fibers of a block did is known to all of them.
    void meet(const unsigned int* fibers, unsigned int count) {
        State& s = *state_;
        Times* const all = s.clocks.copy(*s.selves[fibers[0]].times);
        Foreign* foreign = keep(s.selves[fibers[0]].foreign);
        const Times* contained = s.selves[fibers[0]].times;
        for (unsigned int i = 1; i < count; ++i) {
            const Self& self = s.selves[fibers[i]];
            if (self.times != contained) merge_into(*all, *self.times);
            contained = self.times;
            s.clocks.join(foreign, self.foreign);
        }
        for (unsigned int i = 0; i < count; ++i) publish(s, fibers[i], *all);
        settle(*all);
        for (unsigned int i = 0; i < count; ++i) {
            Self& self = s.selves[fibers[i]];
            s.clocks.drop(self.times);
            s.clocks.drop(self.foreign);
            self.times = keep(all);
            self.foreign = keep(foreign);
        }
        s.clocks.drop(all);
        s.clocks.drop(foreign);
    }

    // What a fiber did so far is known to those who acquire the clock.
    void release(unsigned int fiber, Clock& clock) {
        State& s = *state_;
        Self& self = s.selves[fiber];
        bool contained = false;
        for (const Times* times : clock.merged) contained |= times == self.times;
        if (!clock.times) {
            clock.times = s.clocks.copy(*self.times);
        } else {
            s.clocks.own(clock.times);
            if (!contained) merge_into(*clock.times, *self.times);
        }
        if (!contained) {
            Times*& place = clock.merged[clock.next++ % 4];
            s.clocks.drop(place);
            place = keep(self.times);
        }
        publish(s, fiber, *clock.times);
        s.clocks.join(clock.foreign, self.foreign);
    }
    void acquire(unsigned int fiber, const Clock& clock) {
        State& s = *state_;
        if (!clock.times) return;
        learn(s, fiber, clock.times);
        s.clocks.join(s.selves[fiber].foreign, clock.foreign);
    }
    // `to` becomes what `from` is, and nobody has released `from`.
    void move(Clock& from, Clock& to) {
        clear(to);
        to = from;
        from = {};
    }
    void clear(Clock& clock) {
        State& s = *state_;
        s.clocks.drop(clock.times);
        s.clocks.drop(clock.foreign);
        for (Times* times : clock.merged) s.clocks.drop(times);
        clock = {};
    }

    // Fences and atomic operations, as in C++: what a thread did before a fence is known to those
    // who execute one after they read what it wrote atomically after its own.
    void fence(unsigned int fiber) {
        State& s = *state_;
        Self& self = s.selves[fiber];
        if (self.heard) {
            hear(s, fiber, self.heard);
            s.clocks.drop(self.heard);
            self.heard = nullptr;
        }
        s.clocks.drop(self.fenced);
        self.fenced = snapshot(s, fiber);
        s.fenced = true;
    }
    // Returns false if too many addresses are in use; so does release_at().
    bool atomic(unsigned int fiber, uintptr_t address) {
        State& s = *state_;
        if (!s.fenced) return true;
        Self& self = s.selves[fiber];
        Signal* const signal = find_signal(s, fiber, address, self.fenced != nullptr);
        if (!signal) return !self.fenced;
        s.clocks.join(self.heard, signal->heard);
        s.clocks.join(signal->heard, self.fenced);
        return true;
    }
    // A semaphore gets a value. Those who wait for this one or less know of what was done before.
    bool release_at(unsigned int fiber, uintptr_t address, int value) {
        State& s = *state_;
        Signal* const signal = find_signal(s, fiber, address, true);
        if (!signal) return false;
        Foreign* heard = snapshot(s, fiber);
        if (signal->newest) s.clocks.join(heard, s.events[signal->newest].heard);
        const uint32_t number = s.events.take();
        s.events[number] = {value, heard, signal->newest};
        signal->newest = number;
        return true;
    }
    void acquire_at(unsigned int fiber, uintptr_t address, int at_least) {
        State& s = *state_;
        const Signal* const signal = find_signal(s, fiber, address, false);
        if (!signal) return;
        uint32_t first = 0;
        for (uint32_t i = signal->newest; i && s.events[i].value >= at_least;
             i = s.events[i].older) {
            first = i;
        }
        if (first) hear(s, fiber, s.events[first].heard);
    }

    // An engine's work up to `time` has ended, and a fiber knows. `index`: of the warp in the
    // block, of the mbarrier, of the thread.
    void finished(unsigned int fiber, Engine engine, unsigned int index, Time time) {
        State& s = *state_;
        if (engine == Engine::kCpAsync) {
            s.copied[fiber] = time;
            return;
        }
        const unsigned int slot = first_slot(engine, s.threads) + index;
        Self& self = s.selves[fiber];
        if (self.times->of(slot) >= time) return;
        Times* const before = self.times;
        if (s.finish.before != before || s.finish.slot != slot || s.finish.time != time) {
            s.clocks.drop(s.finish.before);
            s.clocks.drop(s.finish.after);
            Times* const after = s.clocks.copy(*before);
            set_time(*after, slot, time);
            settle(*after);
            s.finish = {keep(before), after, slot, time};
        }
        self.times = keep(s.finish.after);
        s.clocks.drop(before);
    }
    // Those who acquire the clock know.
    void finished(Clock& clock, Engine engine, unsigned int index, Time time) {
        State& s = *state_;
        if (clock.times) {
            s.clocks.own(clock.times);
        } else {
            clock.times = s.clocks.make();
        }
        set_time(*clock.times, first_slot(engine, s.threads) + index, time);
    }

    // --- Accesses --------------------------------------------------------------------------------

    Actor thread(unsigned int fiber) const {
        const State& s = *state_;
        const Home& home = *s.selves[fiber].home;
        const unsigned int slot = fiber - home.first;
        return {fiber, view_of(s, home, slot, 1, s.selves[fiber].times),
                make_stamp(home.index, slot, s.now[fiber])};
    }
    Actor engine(unsigned int fiber, Engine engine, unsigned int index, Time time) const {
        const State& s = *state_;
        const Home& home = *s.selves[fiber].home;
        return {fiber, view_of(s, home, fiber - home.first, 1, s.selves[fiber].times),
                make_stamp(home.index, first_slot(engine, s.threads) + index, time)};
    }
    // Comes after what all lanes of a warp did; `fiber` is the first.
    Actor product(unsigned int fiber, Time time) {
        State& s = *state_;
        const Home& home = *s.selves[fiber].home;
        const unsigned int slot = fiber - home.first;
        Times* known = keep(s.selves[fiber].times);
        for (unsigned int i = 1; i < kWarpSize; ++i) {
            Times* const other = s.selves[fiber + i].times;
            if (other == known) continue;
            Times* const both = join_as_before(s, known, other);
            s.clocks.drop(known);
            known = both;
        }
        s.clocks.drop(s.of_product);
        s.of_product = known;
        return {fiber, view_of(s, home, slot, kWarpSize, known),
                make_stamp(home.index, first_slot(Engine::kProduct, s.threads) + slot / kWarpSize,
                           time)};
    }

    Source source(const Place& place) { return state_->places.source(place); }

    // Returns false if the access races with an earlier one.
    bool access(const Actor& actor, Access access, uintptr_t address, size_t bytes, Source source) {
        State& s = *state_;
        Home& home = *s.selves[actor.fiber].home;
        Record* lines = home.lines;
        uintptr_t base = home.shared;
        const bool shared = address - base < s.launch->shared_bytes;
        if (!shared) {
            const Tract* const tract = find_tract(s, address, bytes);
            if (!tract) return true;
            lines = tract->lines;
            base = tract->low;
        }
        Touch it = {&actor.view, access, actor.stamp, source, shared, false, 0, 0, {}};
        if (!s.shadow.touch(lines, base, address, bytes, it)) {
            s.other = {it.other, it.other_access, it.other_source};
            return false;
        }
        // Instructions may read more than is used of what they read.
        if (!it.found_written && access == Access::kLoad && shared && !home.unwritten.bytes &&
            Places::is_plain(source)) {
            home.unwritten = {actor, address, bytes, source};
        }
        return true;
    }

    // Says which race access() has found.
    void tell(const Actor& actor,
              Access access,
              uintptr_t address,
              size_t bytes,
              Source source,
              char* text,
              size_t text_bytes) const {
        const State& s = *state_;
        const Home& home = *s.selves[actor.fiber].home;
        const Other& other = s.other;
        const bool shared = address - home.shared < s.launch->shared_bytes;
        const bool here = block_of(other.stamp) == home.index;
        Text sentence(text, text_bytes);
        sentence.add("race in %s memory: ", shared ? "shared" : "global");
        add_access(sentence, s, actor, access, address, bytes, source);
        sentence.add(", not ordered after ");
        if (here && slot_of(other.stamp) < s.threads) {
            add_actor(sentence, s, other.stamp);
            sentence.add("'s %s", noun(other.access));
        } else {
            sentence.add("the %s by ", noun(other.access));
            add_actor(sentence, s, other.stamp);
            if (!here) sentence.add(" of block %u", block_of(other.stamp));
        }
        add_source(sentence, s, other.source);
    }

    // Of a block that ends: returns the fiber that read shared memory which nobody had written,
    // with the reason in `text`, or -1. Only now, for when it was written later, and nothing orders
    // the two, then that tells more.
    int unwritten(unsigned int first, char* text, size_t text_bytes) const {
        const State& s = *state_;
        const Unwritten& read = s.selves[first].home->unwritten;
        if (!read.bytes) return -1;
        Text sentence(text, text_bytes);
        add_access(sentence, s, read.actor, Access::kLoad, read.address, read.bytes, read.source);
        sentence.add(", which nobody wrote since the block began");
        return static_cast<int>(read.actor.fiber);
    }

  private:
    struct Unwritten {
        Actor actor;
        uintptr_t address;
        size_t bytes;  // 0: there was none
        Source source;
    };
    // What the access that was found raced with.
    struct Other {
        Stamp stamp;
        Access access;
        Source source;
    };
    // A block that is alive.
    struct Home {
        unsigned int index, first;
        uintptr_t shared;
        Record* lines;
        Unwritten unwritten;  // the first such read
    };
    // A fiber. What it knows of itself is all, so it is not in `times`.
    struct Self {
        Home* home;
        Times* times;
        Foreign* foreign;
        Foreign* fenced;  // what it knew at its last fence
        Foreign* heard;   // what it read atomically since
    };
    // Global memory that may be written to.
    struct Tract {
        uintptr_t low, high;
        Record* lines;
    };
    struct Joined {
        Times *a, *b, *both;
    };
    struct Finish {
        Times *before, *after;
        unsigned int slot;
        Time time;
    };
    struct State {
        const Launch* launch;
        unsigned int threads;  // of a block, in whole warps
        Clocks clocks;
        Shadow shadow;
        Places places;
        Signals signals;
        Arena<Event> events;
        size_t line_bytes;
        Home homes[kMaxFibers / kWarpSize];
        Tract* tracts;
        unsigned int tract_count, recent_tract;
        bool fenced;  // somebody was, so that atomic operations matter
        Joined joined[16];
        unsigned int next_joined;
        Finish finish;
        Times* of_product;
        Other other;
        Self selves[kMaxFibers];
        Time now[kMaxFibers];     // what a fiber does now has this time
        Time copied[kMaxFibers];  // up to which cp.async of its own it has waited for
    };

    static View view_of(const State& s,
                        const Home& home,
                        unsigned int slot,
                        unsigned int count,
                        const Times* times) {
        const unsigned int fiber = home.first + slot;
        return {home.index,
                slot,
                count,
                first_slot(Engine::kCpAsync, s.threads) + slot,
                &s.copied[fiber],
                times,
                s.selves[fiber].foreign};
    }

    static void forget(State& s, Self& self) {
        s.clocks.drop(self.times);
        s.clocks.drop(self.foreign);
        s.clocks.drop(self.fenced);
        s.clocks.drop(self.heard);
    }

    // What a fiber did goes into a clock; what it does from now on does not.
    static void publish(State& s, unsigned int fiber, Times& times) {
        const unsigned int slot = fiber - s.selves[fiber].home->first;
        set_time(times, slot, s.now[fiber]++);
        if (s.copied[fiber]) {
            set_time(times, first_slot(Engine::kCpAsync, s.threads) + slot, s.copied[fiber]);
        }
    }

    // All that a fiber knows, its own block included, for other blocks.
    static Foreign* snapshot(State& s, unsigned int fiber) {
        Self& self = s.selves[fiber];
        Times* const times = s.clocks.copy(*self.times);
        publish(s, fiber, *times);
        settle(*times);
        Foreign* all = s.clocks.make_foreign(s.selves[fiber].home->index, times);
        s.clocks.join(all, self.foreign);
        return all;
    }
    static void hear(State& s, unsigned int fiber, Foreign* heard) {
        Self& self = s.selves[fiber];
        if (Times* const own = heard->of(s.selves[fiber].home->index)) learn(s, fiber, own);
        s.clocks.join(self.foreign, heard);
    }

    // Shared memory of a block has nothing to tell to the next one at the same address.
    static Signal* find_signal(State& s, unsigned int fiber, uintptr_t address, bool make) {
        Signal* const signal = s.signals.find(address, make);
        const Home& home = *s.selves[fiber].home;
        if (signal && address - home.shared < s.launch->shared_bytes &&
            signal->block != home.index) {
            s.clocks.drop(signal->heard);
            *signal = {address, nullptr, 0, home.index};
        }
        return signal;
    }

    static void learn(State& s, unsigned int fiber, Times* times) {
        Self& self = s.selves[fiber];
        Times* const both = join_as_before(s, self.times, times);
        s.clocks.drop(self.times);
        self.times = both;
    }
    // Many threads that know the same often learn the same.
    static Times* join_as_before(State& s, Times* a, Times* b) {
        for (const Joined& known : s.joined) {
            if (known.a == a && known.b == b) return keep(known.both);
        }
        Times* const both = s.clocks.joined(a, b);
        settle(*both);
        Joined& to = s.joined[s.next_joined++ % 16];
        s.clocks.drop(to.a);
        s.clocks.drop(to.b);
        s.clocks.drop(to.both);
        to = {keep(a), keep(b), keep(both)};
        return both;
    }

    static size_t bytes_of(const Tract& tract) {
        return (tract.high - tract.low) / kLineBytes * sizeof(Record);
    }

    // Arrays may overlap; lines that they share are one.
    static bool open_tracts(State& s) {
        const Launch& launch = *s.launch;
        s.tracts = static_cast<Tract*>(calloc(launch.range_count + 1, sizeof(Tract)));
        if (!s.tracts) return false;
        for (size_t i = 0; i < launch.range_count; ++i) {
            const Range& range = launch.ranges[i];
            if (!range.writable || range.low == range.high) continue;
            Tract tract = {range.low / kLineBytes * kLineBytes,
                           (range.high + kLineBytes - 1) / kLineBytes * kLineBytes, nullptr};
            unsigned int kept = 0;
            for (unsigned int j = 0; j < s.tract_count; ++j) {
                const Tract other = s.tracts[j];
                if (other.high < tract.low || tract.high < other.low) {
                    s.tracts[kept++] = other;
                } else {
                    if (other.low < tract.low) tract.low = other.low;
                    if (other.high > tract.high) tract.high = other.high;
                }
            }
            s.tracts[kept] = tract;
            s.tract_count = kept + 1;
        }
        for (unsigned int i = 0; i < s.tract_count; ++i) {
            s.tracts[i].lines = static_cast<Record*>(reserve_zeros(bytes_of(s.tracts[i])));
            if (!s.tracts[i].lines) return false;
        }
        return true;
    }

    static const Tract* find_tract(State& s, uintptr_t address, size_t bytes) {
        for (unsigned int i = 0; i < s.tract_count; ++i) {
            const Tract& tract = s.tracts[(s.recent_tract + i) % s.tract_count];
            if (address < tract.low || address >= tract.high) continue;
            s.recent_tract = static_cast<unsigned int>(&tract - s.tracts);
            return bytes <= tract.high - address ? &tract : nullptr;
        }
        return nullptr;
    }

    static const char* verb(Access access) {
        return access == Access::kLoad    ? "reads"
               : access == Access::kStore ? "writes"
                                          : "changes atomically";
    }
    static const char* noun(Access access) {
        return access == Access::kLoad    ? "read"
               : access == Access::kStore ? "write"
                                          : "atomic operation";
    }

    static void add_actor(Text& text, const State& s, Stamp stamp) {
        const unsigned int slot = slot_of(stamp);
        if (slot < s.threads) {
            text.add("thread %u", slot);
        } else if (slot < first_slot(Engine::kBulkLoad, s.threads)) {
            text.add("a product of warp %u", slot - s.threads);
        } else if (slot < first_slot(Engine::kCpAsync, s.threads)) {
            text.add("a bulk load");
        } else {
            const unsigned int thread = slot - first_slot(Engine::kCpAsync, s.threads);
            text.add("a %s of thread %u", thread < s.threads ? "cp.async" : "bulk store",
                     thread % s.threads);
        }
    }

    static void add_access(Text& text,
                           const State& s,
                           const Actor& actor,
                           Access access,
                           uintptr_t address,
                           size_t bytes,
                           Source source) {
        add_actor(text, s, actor.stamp);
        text.add(" %s %zu bytes at ", verb(access), bytes);
        add_address(text, s, *s.selves[actor.fiber].home, address);
        add_source(text, s, source);
    }

    static void add_source(Text& text, const State& s, Source source) {
        const Place place = s.places.place(source);
        text.add(" (");
        if (place.call) text.add("%s, ", place.call);
        text.add_place(place);
        text.add(")");
    }

    static void add_address(Text& text, const State& s, const Home& home, uintptr_t address) {
        if (address - home.shared < s.launch->shared_bytes) {
            text.add("shared+%zu", address - home.shared);
            return;
        }
        for (size_t i = 0; i < s.launch->range_count; ++i) {
            const Range& range = s.launch->ranges[i];
            if (!range.writable || address < range.low || address >= range.high) continue;
            text.add("%s+%zu", range.name, address - range.low);
            return;
        }
        text.add("0x%zx", address);
    }

    State* state_;
};

}  // namespace
}  // namespace host
