// SPDX-License-Identifier: Apache-2.0
// Numbers for what races remember: places in the source, and what was said through addresses.
#pragma once
#include "host/executor/races/shadow.h"

namespace host {
namespace {

// A plain access has an instruction's offset into the kernel's library instead of a line, and the
// caller of cuflash_launch finds the line; see Text::add_place.
Place place_of_instruction(uintptr_t offset) {
    return {nullptr, nullptr, static_cast<int>(offset)};
}

constexpr uint32_t kMaxPlaces = 1 << 14;
constexpr Source kPlaceBit = Source{1} << 31;

class Places {
  public:
    bool open() {
        places_ = static_cast<Place*>(reserve_zeros(kMaxPlaces * sizeof(Place)));
        return places_;
    }
    void close() {
        if (places_) munmap(places_, kMaxPlaces * sizeof(Place));
    }

    // Plain accesses name an instruction, others a call.
    static bool is_plain(Source source) { return !(source & kPlaceBit); }

    Source source(const Place& place) {
        const uintptr_t hash =
            (reinterpret_cast<uintptr_t>(place.call) ^ static_cast<uintptr_t>(place.line)) *
            0x9e3779b97f4a7c15;
        // A kernel has far fewer places, so there is always a free one.
        for (uint32_t i = static_cast<uint32_t>(hash >> 40);; ++i) {
            Place& found = places_[i % kMaxPlaces];
            if (!found.file) found = place;
            if (found.file == place.file && found.line == place.line && found.call == place.call) {
                return kPlaceBit | i % kMaxPlaces;
            }
        }
    }
    Place place(Source source) const {
        return source & kPlaceBit ? places_[source & ~kPlaceBit] : place_of_instruction(source);
    }

  private:
    Place* places_;
};

// What an address has to tell: to fences of those who read it atomically, and of a semaphore, to
// those who wait for its values.
struct Signal {
    uintptr_t address;
    Foreign* heard;
    uint32_t newest;  // number of an event, or 0
    uint32_t block;   // whose shared memory the address is in, where it is in some
};

// A semaphore got a value.
struct Event {
    int value;
    Foreign* heard;
    uint32_t older;  // number of the event before
};

// So many addresses may have something to tell.
#ifndef CUFLASH_MAX_SIGNALS
#define CUFLASH_MAX_SIGNALS (1 << 22)
#endif
constexpr size_t kMaxSignals = CUFLASH_MAX_SIGNALS;

class Signals {
  public:
    bool open() {
        signals_ = static_cast<Signal*>(reserve_zeros(kMaxSignals * sizeof(Signal)));
        count_ = 0;
        return signals_;
    }
    void close() {
        if (signals_) munmap(signals_, kMaxSignals * sizeof(Signal));
    }

    // Whether no more can be made. One place stays free, at which find() ends.
    bool full() const { return count_ == kMaxSignals - 1; }

    // Null if there is none and none is to be made, or can be.
    Signal* find(uintptr_t address, bool make) {
        const uintptr_t hash = address * 0x9e3779b97f4a7c15;
        for (size_t i = hash >> 40;; ++i) {
            Signal& found = signals_[i % kMaxSignals];
            if (found.address == address) return &found;
            if (found.address) continue;
            if (!make || full()) return nullptr;
            ++count_;
            found.address = address;
            return &found;
        }
    }

  private:
    Signal* signals_;
    size_t count_;
};

}  // namespace
}  // namespace host
