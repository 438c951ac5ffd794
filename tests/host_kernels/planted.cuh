// SPDX-License-Identifier: Apache-2.0
// Faults, each in a right kernel, where its parameter `fault` is the number of the fault's name.
// tests/test_planted.py lists them.
#pragma once

// FNV-1a.
constexpr unsigned int number_of(const char* name) {
    unsigned int number = 0x811c9dc5;
    for (; *name; ++name) number = (number ^ static_cast<unsigned char>(*name)) * 0x01000193;
    return number;
}

template <unsigned int Number>
constexpr unsigned int kNumber = Number;  // computed by the compiler

#define PLANTED(name) (p.fault == kNumber<number_of(name)>)
