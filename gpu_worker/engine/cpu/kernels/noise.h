// The random numbers of a row's next token, one for each token of the vocabulary. As sampling/sampler.py.
#pragma once
#include <cmath>
#include "structs.h"
#include "vector.h"

constexpr int RUN = 16, DRAWN = 4 * RUN;  // tokens next to each other that have one word each of a draw

inline Words high_product(Words x, uint32_t factor) {
#if defined(__AVX512F__)
    __m512i by = _mm512_set1_epi32(factor), odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)x, 32), by);
    return (Words)_mm512_mask_blend_epi32(
        0xaaaa, _mm512_srli_epi64(_mm512_mul_epu32((__m512i)x, by), 32), odd);
#elif defined(__AVX2__)
    __m256i by = _mm256_set1_epi32(factor), odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)x, 32), by);
    return (Words)_mm256_blend_epi32(_mm256_srli_epi64(_mm256_mul_epu32((__m256i)x, by), 32), odd, 0xaa);
#endif
    Words high;
    for (int lane = 0; lane < LANES; lane++) high[lane] = (uint64_t)x[lane] * factor >> 32;
    return high;
}

// Philox-4x32 with 10 rounds: four words for each of LANES counters, the first of which is given.
struct Noise {
    uint64_t seed;
    uint32_t choice, index;

    void draw(uint32_t counter, Words* to) const {
        Words a, b = Words{} + index, c = Words{} + choice, d = {};
        for (int lane = 0; lane < LANES; lane++) a[lane] = counter + lane;
        uint32_t low = seed, high = seed >> 32;
        for (int round = 0; round < 10; round++, low += 0x9e3779b9, high += 0xbb67ae85) {
            Words first = high_product(c, 0xcd9e8d57) ^ b ^ low;
            Words third = high_product(a, 0xd2511f53) ^ d ^ high;
            b = c * 0xcd9e8d57, d = a * 0xd2511f53, a = first, c = third;
        }
        to[0] = a, to[1] = b, to[2] = c, to[3] = d;
    }
};

// A number of the exponential distribution.
inline float exponential_number(uint32_t word) { return (float)-std::log(((word >> 1) + 0.5) * 0x1p-31); }

// Numbers a little below those of words: they take no logarithm.
inline Floats below_exponentials(Words words) {
    return __builtin_convertvector((Ints)(0x7fffffff - (words >> 1)), Floats) * (0.9999f * 0x1p-31f);
}
