// SPDX-License-Identifier: Apache-2.0
// The CPU twin of hw/convert.cuh: the 16-bit floating-point types in integer arithmetic, bit for
// bit what the GPU's instructions give.
#pragma once

namespace hw {

struct float16 {
    unsigned short bits;  // sign, 5 bits of exponent (bias 15), 10 of fraction
};
struct bfloat16 {
    unsigned short bits;  // the upper half of a float
};

inline float to_float(float16 x) {
    const unsigned int sign = (x.bits & 0x8000u) << 16;
    const unsigned int rest = x.bits & 0x7fffu;
    if (rest >= 0x7c00) {  // infinity or NaN: the widest exponent, and the fraction shifted
        return __uint_as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    }
    if (rest < 0x0400) {  // zero or subnormal: a multiple of 2^-24, exact as a float
        const float magnitude = static_cast<float>(rest) * 0x1p-24f;
        return __uint_as_float(sign | __float_as_uint(magnitude));
    }
    return __uint_as_float(sign | ((rest << 13) + ((127u - 15u) << 23)));
}

inline float to_float(bfloat16 x) {
    return __uint_as_float(static_cast<unsigned int>(x.bits) << 16);
}

template <class T>
T from_float(float x);

// Round to nearest even: add half a unit of the last kept bit, less one if that bit is even; a
// carry runs on into the exponent, at the top into infinity.
inline unsigned int round_off(unsigned int bits, int dropped) {
    return (bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped;
}

template <>
inline float16 from_float<float16>(float x) {
    const unsigned int bits = __float_as_uint(x);
    const unsigned int sign = bits >> 16 & 0x8000u;
    const unsigned int rest = bits & 0x7fffffffu;
    unsigned int result;
    if (rest > 0x7f800000u) {
        return {0x7fff};
    } else if (rest >= 0x47800000u) {  // 2^16 and more; what lies just below rounds to infinity
        result = 0x7c00;
    } else if (rest >= 0x38800000u) {  // normal numbers, from 2^-14
        result = round_off(rest - ((127u - 15u) << 23), 13);
    } else if (rest >= 0x33000000u) {  // 2^-25 and more: round to a multiple of 2^-24
        const int dropped = 126 - static_cast<int>(rest >> 23);
        result = round_off((rest & 0x7fffffu) | 0x800000u, dropped);
    } else {
        result = 0;
    }
    return {static_cast<unsigned short>(sign | result)};
}

template <>
inline bfloat16 from_float<bfloat16>(float x) {
    if (x != x) return {0x7fff};
    return {static_cast<unsigned short>(round_off(__float_as_uint(x), 16))};
}

template <class T>
constexpr bool kIsBfloat16 = T::is_neither_float16_nor_bfloat16;
template <>
constexpr bool kIsBfloat16<float16> = false;
template <>
constexpr bool kIsBfloat16<bfloat16> = true;

template <class T>
constexpr host::Element kElement = T::is_neither_float16_nor_bfloat16;
template <>
constexpr host::Element kElement<float16> = host::Element::kFloat16;
template <>
constexpr host::Element kElement<bfloat16> = host::Element::kBfloat16;

template <class T>
inline unsigned int pack2(float low, float high) {
    return static_cast<unsigned int>(from_float<T>(high).bits) << 16 | from_float<T>(low).bits;
}

}  // namespace hw
