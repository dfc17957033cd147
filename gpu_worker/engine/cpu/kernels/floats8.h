// 8-bit floats, for K and V in half of bfloat16's bytes. Each is a bfloat16, too: reading them is exact.
#pragma once
#include <type_traits>
#include "structs.h"
#include "vector.h"

struct e4m3 {  // without infinities
    uint8_t bits;
    static constexpr int MANTISSA = 3, BIAS = 7;
    static constexpr float LARGEST = 448;
    static constexpr uint16_t FIRST_SPECIAL = 0x7f;
};
struct e5m2 {
    uint8_t bits;
    static constexpr int MANTISSA = 2, BIAS = 15;
    static constexpr float LARGEST = 57344;
    static constexpr uint16_t FIRST_SPECIAL = 0x7c;
};

// Calls with a number of the type that the cache holds, where the model computes in T.
template <class T, class F> void with_stored(const Cache& cache, F call) {
    if (cache.pages.stored == 0) call(T{});
    if (cache.pages.stored == 1) call(e4m3{});
    if (cache.pages.stored == 2) call(e5m2{});
}

// The bits of the bfloat16. Below the smallest normal number, each further leading zero of the mantissa takes
// one from the exponent. What is no number becomes NaN; saturated writes make no infinities.
template <class S> inline uint16_t bfloat16_bits(S x) {
    constexpr uint16_t STEP = 1 << (7 - S::MANTISSA), BASE = (127 - S::BIAS) << 7;
    constexpr uint16_t SMALLEST = (128 - S::BIAS - S::MANTISSA) << 7;
    uint16_t sign = (x.bits & 0x80) << 8, rest = x.bits & 0x7f, bits = BASE + rest * STEP;
    if constexpr (S::MANTISSA == 3) bits = rest < 8 ? BASE - 0x80 + rest * 2 * STEP : bits;
    bits = rest < 4 ? SMALLEST + rest * 64 : bits;
    bits = rest < 2 ? rest * SMALLEST : bits;
    return sign | (rest >= S::FIRST_SPECIAL ? 0x7fc0 : bits);
}

// The nearest number of fewer bits, to even, and no further from zero than the largest; a NaN stays one.
template <class S> inline S rounded(float x) {
    constexpr uint32_t NORMAL = (128 - S::BIAS) << 23, SHIFT = 23 - S::MANTISSA;
    constexpr uint32_t ADDED = (151 - S::BIAS - S::MANTISSA) << 23;  // adding it rounds to the least step
    uint32_t bits, small;
    memcpy(&bits, &x, 4);
    uint8_t sign = bits >> 24 & 0x80;
    bits &= 0x7fffffff;
    float size, shifted, added;
    memcpy(&size, &bits, 4), memcpy(&added, &ADDED, 4);
    size = size > S::LARGEST ? S::LARGEST : size;
    shifted = size + added;
    memcpy(&bits, &size, 4), memcpy(&small, &shifted, 4);
    uint32_t large = bits - NORMAL + (1u << 23) + (1u << (SHIFT - 1)) - 1 + (bits >> SHIFT & 1);
    uint32_t rest = bits < NORMAL ? small - ADDED : large >> SHIFT;
    return {(uint8_t)(sign | (size == size ? rest : 0x7f))};
}

// Numbers of the cache, as the model computes with them.
template <class S, class T> inline void widen(const S* __restrict from, int count, T* __restrict to) {
    if constexpr (std::is_same_v<S, T>) memcpy(to, from, sizeof(T) * count);
    else
        for (int i = 0; i < count; i++) {
            bfloat16 x{bfloat16_bits(from[i])};
            if constexpr (std::is_same_v<T, bfloat16>) to[i] = x;
            else store_one(to + i, load_one(&x));
        }
}

// Numbers of the model, as the cache holds them: 8-bit floats are divided by the scale.
template <class T, class S>
inline void narrow(const T* __restrict from, int count, float scale, S* __restrict to) {
    if constexpr (std::is_same_v<S, T>) memcpy(to, from, sizeof(T) * count);
    else
        for (int i = 0; i < count; i++) to[i] = rounded<S>(load_one(from + i) / scale);
}
