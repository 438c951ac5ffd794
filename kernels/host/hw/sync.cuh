// SPDX-License-Identifier: Apache-2.0
// The CPU twin of hw/sync.cuh.
#pragma once

namespace hw {

inline void named_barrier_sync(int id, int threads, HOST_PLACE) {
    host::self().executor->named_barrier({"named_barrier_sync", file, line}, id, threads, true);
}

inline void named_barrier_arrive(int id, int threads, HOST_PLACE) {
    host::self().executor->named_barrier({"named_barrier_arrive", file, line}, id, threads, false);
}

inline bool elect_one(HOST_PLACE) {
    return host::self().executor->elect_one({"elect_one", file, line});
}

inline void fence_proxy_async(HOST_PLACE) {
    host::self().executor->fence_proxy_async({"fence_proxy_async", file, line});
}

template <int Registers>
constexpr bool kIsRegisterCount = Registers >= 24 && Registers <= 256 && Registers % 8 == 0;

template <int Registers>
inline void registers_increase(HOST_PLACE) {
    static_assert(kIsRegisterCount<Registers>, "24 to 256 registers, a multiple of 8");
    host::self().executor->change_registers({"registers_increase", file, line}, Registers, true);
}

template <int Registers>
inline void registers_decrease(HOST_PLACE) {
    static_assert(kIsRegisterCount<Registers>, "24 to 256 registers, a multiple of 8");
    host::self().executor->change_registers({"registers_decrease", file, line}, Registers, false);
}

inline int max3(int a, int b, int c) { return max(max(a, b), c); }
inline unsigned max3(unsigned a, unsigned b, unsigned c) { return max(max(a, b), c); }

inline int forget(int x) { return x; }

// The compiler knows nothing of registers that the executor would write.
template <class T, int N>
inline void pin(T (&)[N]) {}

}  // namespace hw
