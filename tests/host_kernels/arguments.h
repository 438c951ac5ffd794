// SPDX-License-Identifier: Apache-2.0
// Several kernels, each of several arguments, as the one kernel of one parameter that host/entry.h
// exports. The translation unit lists them between its kernels and host/entry.h:
//
//     #include "arguments.h"
//     constexpr Kernel kKernels[] = {with_arguments<first>, with_arguments<second>};
#pragma once

using Kernel = void (*)(const unsigned char* arguments);

// The arguments lie one behind the other, each at the next multiple of its alignment.
struct alignas(64) Call {
    unsigned char arguments[192];
    int kernel;  // its place in kKernels
};

template <class T>
const T& next_argument(const unsigned char*& at) {
    at += -reinterpret_cast<uintptr_t>(at) % alignof(T);
    const T& argument = *reinterpret_cast<const T*>(at);
    at += sizeof(T);
    return argument;
}

// An object, for what stands in the braces of an initializer is evaluated from left to right.
template <class... T>
struct Run {
    Run(void (*kernel)(T...), const T&... arguments) { kernel(arguments...); }
};

template <class... T>
void run(void (*kernel)(T...), const unsigned char* at) {
    Run<T...>{kernel, next_argument<T>(at)...};
}

template <auto kernel>
void with_arguments(const unsigned char* arguments) {
    run(kernel, arguments);
}

#define CUFLASH_KERNEL(call) kKernels[(call).kernel]((call).arguments)
#define CUFLASH_PARAMS Call
