// SPDX-License-Identifier: Apache-2.0
// Many small records of one type, named by numbers. Address space is reserved once, and the system
// provides pages as they are touched: nothing can fail in the middle of a launch.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

namespace host {
namespace {

constexpr size_t kArenaBytes = size_t{1} << 36;

void* reserve_zeros(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
}

template <class T>
class Arena {
  public:
    bool open() {
        items_ = static_cast<T*>(reserve_zeros(kArenaBytes));
        used_ = 1;  // 0 names nothing
        free_ = 0;
        return items_;
    }
    void close() {
        if (items_) munmap(items_, kArenaBytes);
        items_ = nullptr;
    }

    T& operator[](uint32_t number) { return items_[number]; }
    const T& operator[](uint32_t number) const { return items_[number]; }
    uint32_t number_of(const T* item) const { return static_cast<uint32_t>(item - items_); }

    // The first of `count` records, always as many, with whatever was in them before.
    uint32_t take(uint32_t count = 1) {
        const uint32_t number = free_ ? free_ : used_;
        if (!free_) {
            used_ += count;
            return number;
        }
        memcpy(&free_, &items_[number], sizeof(free_));
        return number;
    }
    void give(uint32_t number) {
        memcpy(static_cast<void*>(&items_[number]), &free_, sizeof(free_));
        free_ = number;
    }

  private:
    T* items_;
    uint32_t used_, free_;
};

}  // namespace
}  // namespace host
