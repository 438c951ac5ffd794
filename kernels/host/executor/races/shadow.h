// SPDX-License-Identifier: Apache-2.0
// What was last done to each piece of memory: the last write, and the reads and atomic operations
// since. A piece is a line of 16 bytes until a part of it is accessed alone; then it has four parts
// of 4 bytes, and such a part in turn four of one byte. A write of the whole makes it one again.
//
// A read is kept until somebody writes who comes after it, or until another read comes after it:
// who comes after that one comes after both. The reads of a warp at the same time are one entry.
#pragma once
#include "host/executor/races/clocks.h"

namespace host {
namespace {

constexpr unsigned int kLineBytes = 16;
constexpr unsigned int kParts = 4;
constexpr unsigned int kWordBytes = kLineBytes / kParts;

// Who did something and when: a block's index, a slot, a time, and whether it was atomic. An access
// without any has 0, for times begin at 1.
using Stamp = uint64_t;
constexpr int kTimeBits = 27, kSlotBits = 13, kBlockBits = 23;
static_assert(kTimeBits + kSlotBits + kBlockBits == 63 && kMaxSlots <= 1 << kSlotBits, "64 bits");

constexpr unsigned int kMaxBlocks = 1u << kBlockBits;
constexpr Stamp kAtomicBit = 1;
constexpr Stamp kLaneBits = Stamp{kWarpSize - 1} << (1 + kTimeBits);

Stamp make_stamp(unsigned int block, unsigned int slot, Time time) {
    return (Stamp{block} << kSlotBits | slot) << (1 + kTimeBits) | Stamp{time} << 1;
}
unsigned int block_of(Stamp stamp) {
    return static_cast<unsigned int>(stamp >> (1 + kTimeBits + kSlotBits));
}
unsigned int slot_of(Stamp stamp) {
    return static_cast<unsigned int>(stamp >> (1 + kTimeBits)) & ((1u << kSlotBits) - 1);
}
Time time_of(Stamp stamp) { return static_cast<Time>(stamp >> 1) & ((Time{1} << kTimeBits) - 1); }

// Where in the source: an instruction, as an offset into the kernel's library, or a known Place.
using Source = uint32_t;

// Accesses of slots of one group, at the same time.
struct Entry {
    Stamp stamp;     // of the group's first slot
    uint32_t lanes;  // 0: no entry
    Source source;   // of one of them
};

bool is_atomic(const Entry& entry) { return entry.stamp & kAtomicBit; }
unsigned int warp_of(const Entry& entry) { return slot_of(entry.stamp) / kWarpSize; }

struct Record {
    Stamp written;
    Source written_source;
    uint32_t parts;  // number of four, or 0
    Entry first;
    uint32_t more;   // number of a further entry, or 0
    uint32_t table;  // number of the first entry of a table, or 0
    uint32_t kinds;  // of the entries since the write: kReads, kAtomics
    uint32_t unused;
};
constexpr uint32_t kReads = 1, kAtomics = 2;

struct More {
    Entry entry;
    uint32_t next;
};

struct Parts {
    Record at[kParts];
};

// What a thread, or all threads of a warp, know.
struct View {
    unsigned int block;
    unsigned int first, count;  // their own slots
    unsigned int first_engine;  // and those of their cp.async, which
    const Time* copied;         // are known up to these times
    const Times* times;
    const Foreign* foreign;

    // Slots of another block are known through what was heard of it.
    const Times* times_of(Stamp stamp) const {
        const unsigned int other = block_of(stamp);
        return other == block ? times : foreign ? foreign->of(other) : nullptr;
    }
    bool knows(const Times* known, bool own_block, unsigned int slot, Time time) const {
        if (known && known->of(slot) >= time) return true;
        if (!own_block) return false;
        if (slot - first < count) return true;
        return slot - first_engine < count && copied[slot - first_engine] >= time;
    }
    bool knows(Stamp stamp) const {
        return knows(times_of(stamp), block_of(stamp) == block, slot_of(stamp), time_of(stamp));
    }
    // The first lane whose access is not known; -1 if all are.
    int unknown(const Entry& entry) const {
        const Times* known = times_of(entry.stamp);
        const unsigned int slot = slot_of(entry.stamp);
        const Time time = time_of(entry.stamp);
        if (known && known->floor_of(slot) >= time) return -1;
        const bool own_block = block_of(entry.stamp) == block;
        for (unsigned int rest = entry.lanes; rest; rest &= rest - 1) {
            const unsigned int lane = static_cast<unsigned int>(__builtin_ctz(rest));
            if (!knows(known, own_block, slot + lane, time)) return static_cast<int>(lane);
        }
        return -1;
    }
};

// An access on its way through the pieces that it touches.
struct Touch {
    const View* view;
    Access access;
    Stamp stamp;
    Source source;
    bool shared;         // so that only one block accesses it
    bool found_written;  // some of it had been written
    // What it races with.
    Stamp other;
    Source other_source;
    Access other_access;

    Stamp group() const { return stamp & ~kLaneBits; }
    uint32_t lane() const { return 1u << slot_of(stamp) % kWarpSize; }

    bool races(Stamp with, Source with_source, Access with_access) {
        other = with;
        other_source = with_source;
        other_access = with_access;
        return false;
    }
    // False if the access races with one of an entry.
    bool comes_after(const Entry& entry) {
        const int lane = view->unknown(entry);
        if (lane < 0) return true;
        return races(entry.stamp + (static_cast<Stamp>(lane) << (1 + kTimeBits)), entry.source,
                     entry.stamp & kAtomicBit ? Access::kAtomic : Access::kLoad);
    }
};

class Shadow {
  public:
    // For blocks of so many warps.
    bool open(unsigned int warps) {
        warps_ = warps;
        return parts_.open() && more_.open() && tables_.open();
    }
    void close() {
        parts_.close();
        more_.close();
        tables_.close();
    }

    // Returns false if the access of these bytes races; `lines` begin at `base`.
    bool touch(Record* lines, uintptr_t base, uintptr_t address, size_t bytes, Touch& it) {
        const uintptr_t begin = address - base, end = begin + bytes;
        // Most accesses are to a word, or to a line that has no parts.
        Record& first = lines[begin / kLineBytes];
        if (bytes == kWordBytes && begin % kWordBytes == 0 && first.parts) {
            Record& word = parts_[first.parts].at[begin / kWordBytes % kParts];
            if (!word.parts && (it.access != Access::kStore || end % kLineBytes != 0)) {
                return look(word, it);
            }
        } else if (bytes == kLineBytes && begin % kLineBytes == 0 && !first.parts) {
            return look(first, it);
        }
        for (uintptr_t at = begin; at < end;) {
            Record& line = lines[at / kLineBytes];
            const uintptr_t of_line = at / kLineBytes * kLineBytes;
            const uintptr_t stop = end < of_line + kLineBytes ? end : of_line + kLineBytes;
            if (!visit<kLineBytes>(line, static_cast<unsigned int>(at - of_line),
                                   static_cast<unsigned int>(stop - of_line), it)) {
                return false;
            }
            at = stop;
        }
        return true;
    }

    // Nothing has been done there.
    void clear(Record& piece) {
        drop_entries(piece);
        drop_parts(piece);
        piece = {};
    }

  private:
    // The bytes from `begin` to before `end` of a piece of kBytes.
    template <unsigned int kBytes>
    bool visit(Record& piece, unsigned int begin, unsigned int end, Touch& it) {
        constexpr unsigned int kPart = kBytes / kParts;
        const bool whole = begin == 0 && end == kBytes;
        if constexpr (kPart == 0) {
            return look(piece, it);
        } else {
            if (!piece.parts) {
                if (whole) return look(piece, it);
                split(piece);
            }
            Record* const parts = parts_[piece.parts].at;
            for (unsigned int i = begin / kPart; i * kPart < end; ++i) {
                const unsigned int low = i * kPart;
                if (!visit<kPart>(parts[i], begin > low ? begin - low : 0,
                                  end < low + kPart ? end - low : kPart, it)) {
                    return false;
                }
            }
            if (it.access == Access::kStore && end == kBytes) unite(piece);
            return true;
        }
    }

    // The whole of a piece that has no parts.
    bool look(Record& piece, Touch& it) {
        const Access access = it.access;
        if (access == Access::kStore) {
            if (piece.written == it.stamp && !piece.first.lanes) return true;
        } else if (piece.first.stamp == (it.group() | (access == Access::kAtomic)) &&
                   (piece.first.lanes & it.lane())) {
            it.found_written = true;  // or it was said before
            return true;
        }
        if (piece.written) {
            it.found_written = true;
            if (!it.view->knows(piece.written)) {
                return it.races(piece.written, piece.written_source, Access::kStore);
            }
        }
        if (access == Access::kStore) {
            if (piece.first.lanes) {
                const auto comes_after = [&](const Entry& entry) { return it.comes_after(entry); };
                if (!for_each(piece, comes_after)) return false;
                drop_entries(piece);
            }
            piece.written = it.stamp;
            piece.written_source = it.source;
            return true;
        }
        return enter(piece, it);
    }

    // Calls visit(entry) for each entry until it returns false; returns whether none did.
    template <class Visit>
    bool for_each(Record& piece, Visit visit) {
        if (piece.first.lanes && !visit(piece.first)) return false;
        if (piece.table) {
            const Entry* const table = &tables_[piece.table];
            for (unsigned int i = 0; i < warps_; ++i) {
                if (table[i].lanes && !visit(table[i])) return false;
            }
        }
        for (uint32_t i = piece.more; i; i = more_[i].next) {
            if (!visit(more_[i].entry)) return false;
        }
        return true;
    }

    // Adds a read or an atomic operation; neither kind races with its own.
    bool enter(Record& piece, Touch& it) {
        const bool atomic = it.access == Access::kAtomic;
        Entry mine = {it.group() | atomic, it.lane(), it.source};
        if (piece.kinds & (atomic ? kReads : kAtomics)) {
            const bool good = for_each(piece, [&](const Entry& entry) {
                return is_atomic(entry) == atomic || it.comes_after(entry);
            });
            if (!good) return false;
        }
        if (piece.kinds & kAtomics) it.found_written = true;
        piece.kinds |= atomic ? kAtomics : kReads;
        if (piece.first.stamp == mine.stamp && piece.first.lanes) {
            piece.first.lanes |= mine.lanes;
            piece.first.source = mine.source;
        } else if (has_table(mine, it)) {
            enter_in_table(piece, mine, it);
        } else {
            enter_in_list(piece, mine, it);
        }
        return true;
    }

    // Whether the entry is a plain read of a warp, and all its like are of the same block.
    bool has_table(const Entry& entry, const Touch& it) const {
        return it.shared && !is_atomic(entry) && warp_of(entry) < warps_;
    }

    // A warp has one entry, the first or that in the table, and further ones in the list only while
    // not all threads of the warp know of those.
    void enter_in_table(Record& piece, Entry mine, Touch& it) {
        if (piece.table) {
            Entry& entry = tables_[piece.table + warp_of(mine)];
            if (entry.lanes) {
                if (entry.stamp == mine.stamp) {
                    mine.lanes |= entry.lanes;
                } else if (it.view->unknown(entry) >= 0) {
                    push(piece, entry);
                }
                entry.lanes = 0;
            }
        }
        const Entry before = piece.first;
        piece.first = mine;
        if (!before.lanes) return;
        if (!has_table(before, it)) {
            push(piece, before);
        } else if (warp_of(before) == warp_of(mine)) {
            if (it.view->unknown(before) >= 0) push(piece, before);
        } else {
            if (!piece.table) {
                piece.table = tables_.take(warps_);
                for (unsigned int i = 0; i < warps_; ++i) tables_[piece.table + i].lanes = 0;
            }
            tables_[piece.table + warp_of(before)] = before;
        }
    }

    void enter_in_list(Record& piece, Entry mine, Touch& it) {
        // What comes after a read may still race with the atomic operation before it.
        const auto goes = [&](const Entry& entry) {
            if (entry.stamp == mine.stamp) {
                mine.lanes |= entry.lanes;
                return true;
            }
            return (!is_atomic(entry) || is_atomic(mine)) && it.view->unknown(entry) < 0;
        };
        for (uint32_t* link = &piece.more; *link;) {
            const uint32_t number = *link;
            More& more = more_[number];
            if (goes(more.entry)) {
                *link = more.next;
                more_.give(number);
            } else {
                link = &more.next;
            }
        }
        if (piece.first.lanes && !goes(piece.first)) push(piece, piece.first);
        piece.first = mine;
    }

    void push(Record& piece, Entry entry) {
        const uint32_t number = more_.take();
        more_[number] = {entry, piece.more};
        piece.more = number;
    }

    void drop_entries(Record& piece) {
        while (const uint32_t number = piece.more) {
            piece.more = more_[number].next;
            more_.give(number);
        }
        if (piece.table) tables_.give(piece.table);
        piece.table = 0;
        piece.first.lanes = 0;
        piece.kinds = 0;
    }

    void drop_parts(Record& piece) {
        if (!piece.parts) return;
        for (Record& part : parts_[piece.parts].at) {
            drop_entries(part);
            drop_parts(part);
        }
        parts_.give(piece.parts);
        piece.parts = 0;
    }

    // A piece becomes four that have each all that was done to the whole.
    void split(Record& piece) {
        const uint32_t number = parts_.take();
        for (Record& part : parts_[number].at) {
            part = piece;
            part.more = 0;
            for (uint32_t i = piece.more; i; i = more_[i].next) push(part, more_[i].entry);
            if (piece.table) {
                part.table = tables_.take(warps_);
                memcpy(&tables_[part.table], &tables_[piece.table], warps_ * sizeof(Entry));
            }
        }
        drop_entries(piece);
        piece.parts = number;
    }

    // Parts that were all written at once, and are not in use since, become one piece again.
    void unite(Record& piece) {
        const Record* const parts = parts_[piece.parts].at;
        for (unsigned int i = 0; i < kParts; ++i) {
            if (parts[i].written != parts[0].written || parts[i].first.lanes || parts[i].parts) {
                return;
            }
        }
        piece.written = parts[0].written;
        piece.written_source = parts[0].written_source;
        drop_parts(piece);
    }

    unsigned int warps_;
    Arena<Parts> parts_;
    Arena<More> more_;
    Arena<Entry> tables_;  // an entry for each warp
};

}  // namespace
}  // namespace host
