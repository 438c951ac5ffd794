// SPDX-License-Identifier: Apache-2.0
// What an instrumented kernel calls at each access. The compiler's -fsanitize=thread adds the
// calls; its library, which would define the functions, is not linked.
//
// Each function tells the executor where it was called from. Accesses to the thread's own stack,
// where its registers and local arrays are, are nobody else's business.
#pragma once
#include <stddef.h>

#include "executor.h"

#define HOST_HOOK extern "C" __attribute__((no_sanitize("thread"), noinline)) void

namespace host {

__attribute__((no_sanitize("thread"), always_inline)) inline void tell(Access access,
                                                                       const volatile void* pointer,
                                                                       size_t bytes,
                                                                       void* caller) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    const uintptr_t frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
    if ((address ^ frame) < kStackBytes || bytes == 0) return;
    self().executor->access(access, address, bytes, reinterpret_cast<uintptr_t>(caller));
}

}  // namespace host

#define HOST_ACCESS(name, access, bytes)                                               \
    HOST_HOOK __tsan_##name(void* address) {                                           \
        host::tell(host::Access::access, address, bytes, __builtin_return_address(0)); \
    }
#define HOST_ACCESSES(bytes)                                    \
    HOST_ACCESS(read##bytes, kLoad, bytes)                      \
    HOST_ACCESS(write##bytes, kStore, bytes)                    \
    HOST_ACCESS(unaligned_read##bytes, kLoad, bytes)            \
    HOST_ACCESS(unaligned_write##bytes, kStore, bytes)          \
    HOST_ACCESS(volatile_read##bytes, kLoad, bytes)             \
    HOST_ACCESS(volatile_write##bytes, kStore, bytes)           \
    HOST_ACCESS(unaligned_volatile_read##bytes, kLoad, bytes)   \
    HOST_ACCESS(unaligned_volatile_write##bytes, kStore, bytes) \
    HOST_ACCESS(read_write##bytes, kStore, bytes)               \
    HOST_ACCESS(unaligned_read_write##bytes, kStore, bytes)
HOST_ACCESSES(1)
HOST_ACCESSES(2)
HOST_ACCESSES(4)
HOST_ACCESSES(8)
HOST_ACCESSES(16)
#undef HOST_ACCESSES
#undef HOST_ACCESS

HOST_HOOK __tsan_read_range(void* address, size_t bytes) {
    host::tell(host::Access::kLoad, address, bytes, __builtin_return_address(0));
}
HOST_HOOK __tsan_write_range(void* address, size_t bytes) {
    host::tell(host::Access::kStore, address, bytes, __builtin_return_address(0));
}

// clang's pass calls these three, and for gcc's, which leaves them to the library that is missing
// here, cuda.h replaces calls by name.
#define HOST_CALL extern "C" __attribute__((no_sanitize("thread"), noinline)) void*
HOST_CALL __tsan_memcpy(void* to, const void* from, size_t bytes) {
    host::tell(host::Access::kLoad, from, bytes, __builtin_return_address(0));
    host::tell(host::Access::kStore, to, bytes, __builtin_return_address(0));
    return __builtin_memcpy(to, from, bytes);
}
HOST_CALL __tsan_memmove(void* to, const void* from, size_t bytes) {
    host::tell(host::Access::kLoad, from, bytes, __builtin_return_address(0));
    host::tell(host::Access::kStore, to, bytes, __builtin_return_address(0));
    return __builtin_memmove(to, from, bytes);
}
HOST_CALL __tsan_memset(void* to, int value, size_t bytes) {
    host::tell(host::Access::kStore, to, bytes, __builtin_return_address(0));
    return __builtin_memset(to, value, bytes);
}
#undef HOST_CALL

HOST_HOOK __tsan_init() {}
HOST_HOOK __tsan_func_entry(void*) {}
HOST_HOOK __tsan_func_exit() {}
HOST_HOOK __tsan_vptr_update(void**, void*) {}
HOST_HOOK __tsan_vptr_read(void**) {}

#undef HOST_HOOK

// Its being there tells that the library is instrumented.
extern "C" __attribute__((visibility("default"))) const int cuflash_instrumented = 1;
