// SPDX-License-Identifier: Apache-2.0
// Text that grows in a buffer of fixed size.
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "host/executor.h"

namespace host {
namespace {

// Text that grows in a buffer and is cut off at its end.
class Text {
  public:
    Text(char* buffer, size_t bytes) : at_(buffer), left_(bytes) {
        if (bytes) *buffer = 0;
    }

    __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
        va_list values;
        va_start(values, format);
        const int length = vsnprintf(at_, left_, format, values);
        va_end(values);
        const size_t used = length < 0 ? 0 : static_cast<size_t>(length);
        const size_t step = used < left_ ? used : left_ ? left_ - 1 : 0;
        at_ += step;
        left_ -= step;
    }

    // Set bits as numbers and ranges: "0-15, 20".
    void add_ranges(const bool* set, unsigned int count) {
        bool first = true;
        for (unsigned int i = 0; i < count; ++i) {
            if (!set[i]) continue;
            unsigned int last = i;
            while (last + 1 < count && set[last + 1]) ++last;
            add(first ? "%u" : ", %u", i);
            if (last > i) add("-%u", last);
            first = false;
            i = last;
        }
    }

    // An instruction's offset into the kernel's library, in braces, stands for its place; see
    // cuflash/host.py.
    void add_place(const Place& place) {
        if (!place.file) return add("{+0x%x}", static_cast<unsigned int>(place.line));
        const char* slash = strrchr(place.file, '/');
        add("%s:%d", slash ? slash + 1 : place.file, place.line);
    }

  private:
    char* at_;
    size_t left_;
};

}  // namespace
}  // namespace host
