// SPDX-License-Identifier: Apache-2.0
// The threads that can run, and who of them is next.
#pragma once
#include <stdint.h>
#include <string.h>

#include "host/executor.h"

namespace host {
namespace {

constexpr unsigned int kMaxFibers = 2048;  // alive at once, of all blocks
constexpr unsigned int kMaxWarps = kMaxFibers / kWarpSize;
static_assert(kMaxWarps <= 64, "a bit each");

// splitmix64 (Steele, Lea, Flood, 2014).
struct Random {
    uint64_t state;

    uint64_t next() {
        uint64_t x = state += 0x9e3779b97f4a7c15;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
        x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
        return x ^ (x >> 31);
    }
    // In [0, bound); the tiny bias does not matter here.
    unsigned int below(unsigned int bound) {
        return static_cast<unsigned int>((next() >> 32) * bound >> 32);
    }
};

// The fibers that can run, and who of them is next. Fibers 32 i to 32 i + 31 are a warp.
class Schedule {
  public:
    void start_launch(uint64_t seed, unsigned int warps) {
        random_.state = seed;
        policy_ = seed == 0 ? Policy::kFifo : seed % 2 ? Policy::kRandom : Policy::kPriority;
        head_ = count_ = 0;
        memset(lanes_, 0, sizeof(lanes_));
        ranks_ = 0;
        warps_ = warps;
        // How often what may happen early does: never, or in one of so many steps.
        constexpr unsigned int kRates[] = {0, 4096, 16, 256};
        rate_ = seed == 0 ? 0 : kRates[seed / 2 % 4];
        for (unsigned int i = 0; i < warps; ++i) {
            const unsigned int j = random_.below(i + 1);
            warp_at_[i] = warp_at_[j];
            warp_at_[j] = i;
        }
        for (unsigned int i = 0; i < warps; ++i) rank_of_[warp_at_[i]] = i;
    }

    // Does something that a GPU does at a time of its own happen now, before it must?
    bool early() { return rate_ != 0 && random_.below(rate_) == 0; }

    // One of `count` things; the first unless threads run in random order.
    unsigned int choose(unsigned int count) {
        return policy_ == Policy::kFifo ? 0 : random_.below(count);
    }

    void add(unsigned int thread) {
        if (policy_ != Policy::kPriority) {
            queue_[(head_ + count_++) % kMaxFibers] = thread;
        } else {
            const unsigned int warp = thread / kWarpSize;
            lanes_[warp] |= 1u << thread % kWarpSize;
            ranks_ |= uint64_t{1} << rank_of_[warp];
        }
    }

    // Removes and returns the next thread; -1 if there is none.
    int take() {
        if (policy_ == Policy::kPriority) return take_by_priority();
        if (count_ == 0) return -1;
        if (policy_ == Policy::kRandom) {
            unsigned int& chosen = queue_[(head_ + random_.below(count_)) % kMaxFibers];
            const unsigned int first = queue_[head_];
            queue_[head_] = chosen;
            chosen = first;
        }
        const unsigned int thread = queue_[head_];
        head_ = (head_ + 1) % kMaxFibers;
        --count_;
        return static_cast<int>(thread);
    }

    // The order of the blocks: a random one unless the seed is 0.
    void shuffle(unsigned int* items, unsigned int count) {
        for (unsigned int i = 0; i < count; ++i) {
            const unsigned int j = policy_ == Policy::kFifo ? i : random_.below(i + 1);
            items[i] = items[j];
            items[j] = i;
        }
    }

  private:
    enum class Policy { kFifo, kRandom, kPriority };

    int take_by_priority() {
        if (ranks_ == 0) return -1;
        const unsigned int random = static_cast<unsigned int>(random_.next() >> 32);
        if (random % 64 == 0) demote(static_cast<unsigned int>(__builtin_ctzll(ranks_)));
        const unsigned int rank = static_cast<unsigned int>(__builtin_ctzll(ranks_));
        const unsigned int warp = warp_at_[rank];
        // The first ready lane from a random one on, cyclically.
        const unsigned int start = random >> 27;
        const unsigned int turned = lanes_[warp] >> start | lanes_[warp] << (32 - start) % 32;
        const unsigned int lane = (static_cast<unsigned int>(__builtin_ctz(turned)) + start) % 32;
        lanes_[warp] &= ~(1u << lane);
        if (lanes_[warp] == 0) ranks_ &= ~(uint64_t{1} << rank);
        return static_cast<int>(warp * kWarpSize + lane);
    }

    // The warp at `rank` becomes the last.
    void demote(unsigned int rank) {
        const unsigned int warp = warp_at_[rank];
        for (; rank + 1 < warps_; ++rank) warp_at_[rank] = warp_at_[rank + 1];
        warp_at_[rank] = warp;
        ranks_ = 0;
        for (unsigned int i = 0; i < warps_; ++i) {
            rank_of_[warp_at_[i]] = i;
            if (lanes_[warp_at_[i]]) ranks_ |= uint64_t{1} << i;
        }
    }

    Policy policy_;
    Random random_;
    unsigned int head_, count_, queue_[kMaxFibers];  // FIFO and random: a ring
    // Priority: rank 0 runs first; ranks_ has a bit for each rank whose warp has ready lanes.
    uint64_t ranks_;
    unsigned int warps_, warp_at_[kMaxWarps], rank_of_[kMaxWarps], lanes_[kMaxWarps];
    unsigned int rate_;
};

}  // namespace
}  // namespace host
