// Vectors as wide as the processor's, and numbers of any storage type in and out of them. Arithmetic is
// float32 everywhere.
#pragma once
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>
#include "amx.h"
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 8;  // ROWS by WIDTH<float> accumulators stay in registers
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 4;
#else
constexpr int LANES = 4, ROWS = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct float16 {
    uint16_t bits;
};

template <class T> constexpr bool BY_TILES = HAS_TILES && std::is_same_v<T, bfloat16>;
template <class T> constexpr int WIDTH = BY_TILES<T> ? 2 : 3;  // vectors of outputs that are summed at once

// Memory that begins where a line of the caches does: tiles that lie across lines are read slower.
template <class N> struct LineAllocator {
    typedef N value_type;
    LineAllocator() = default;
    template <class M> LineAllocator(const LineAllocator<M>&) {}
    N* allocate(size_t count) { return (N*)::operator new(count * sizeof(N), std::align_val_t(64)); }
    void deallocate(N* numbers, size_t) { ::operator delete(numbers, std::align_val_t(64)); }
    bool operator==(const LineAllocator&) const { return true; }
    bool operator!=(const LineAllocator&) const { return false; }
};
template <class N> using Numbers = std::vector<N, LineAllocator<N>>;

template <class V> inline V read(const void* from) {
    V vector;
    memcpy(&vector, from, sizeof(V));
    return vector;
}

// A compiler may read a vector from memory again wherever it is used: g++ 12 does so for Zen 2 and 3.
template <class V> inline void keep_in_register(V& vector) {
#if defined(__x86_64__)
    asm("" : "+v"(vector));
#elif defined(__aarch64__)
    asm("" : "+w"(vector));
#endif
}

// While it lives, its thread's vectors take numbers that are too small for their exponent as zeros, as the
// matrix unit does.
struct FlushedDenormals {
#if defined(__AVX__)
    unsigned before = _mm_getcsr();
    FlushedDenormals() { _mm_setcsr(before | 0x8040); }
    ~FlushedDenormals() { _mm_setcsr(before); }
#else
    FlushedDenormals() {}
#endif
    FlushedDenormals(const FlushedDenormals&) = delete;
};

inline Floats splat(float x) { return Floats{} + x; }

inline Words words(const bfloat16* from) {
#if defined(__AVX512F__)  // compilers take five instructions for it
    return (Words)_mm512_cvtepu16_epi32(read<__m256i>(from));
#else
    return __builtin_convertvector(read<Halves>(from), Words);
#endif
}
inline Floats load(const float* from) { return read<Floats>(from); }
inline Floats load(const bfloat16* from) { return (Floats)(words(from) << 16); }
#if defined(__F16C__)
inline float load_one(const float16* from) { return _cvtsh_ss(from->bits); }
inline void store_one(float16* to, float x) { to->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
#if defined(__aarch64__)  // g++ before 13 has no _Float16 there
typedef __fp16 Half;
#else
typedef _Float16 Half;
#endif
inline float load_one(const float16* from) {
    Half half;
    memcpy(&half, from, sizeof half);
    return (float)half;
}
inline void store_one(float16* to, float x) {
    Half half = (Half)x;
    memcpy(to, &half, sizeof half);
}
#endif
inline Floats load(const float16* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(read<__m256i>(from));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(read<__m128i>(from));
#elif defined(__aarch64__)
    return (Floats)vcvt_f32_f16(read<float16x4_t>(from));
#endif
    Floats vector;
    for (int i = 0; i < LANES; i++) vector[i] = load_one(from + i);
    return vector;
}
inline float load_one(const float* from) { return *from; }
inline float load_one(const bfloat16* from) {
    uint32_t bits = (uint32_t)from->bits << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline void store(float* to, Floats x) { memcpy(to, &x, sizeof x); }
inline void store(bfloat16* to, Floats x) {  // rounds to even; a NaN stays one
    Words bits = (Words)x;
    bits = x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
    Halves halves = __builtin_convertvector(bits >> 16, Halves);
    memcpy(to, &halves, sizeof halves);
}
inline void store(float16* to, Floats x) {
    for (int i = 0; i < LANES; i++) store_one(to + i, x[i]);
}
template <class T> inline void store_one(T* to, float x) {
    T many[LANES];
    store(many, splat(x));
    *to = many[0];
}

// b where either is no number.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}
// The numbers at these places, which are known when this is compiled.
inline Floats shuffled(Floats x, Ints places) {
#if defined(__clang__)
    Floats found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = x[places[lane]];
    return found;
#else
    return __builtin_shuffle(x, places);
#endif
}
// Folds one half onto the other until one number is left.
template <int HALF = LANES / 2, class F> inline float folded(Floats x, F fold) {
    Ints other;
    for (int i = 0; i < LANES; i++) other[i] = i ^ HALF;
    x = fold(x, shuffled(x, other));
    if constexpr (HALF == 1) return x[0];
    else return folded<HALF / 2>(x, fold);
}
inline float largest(Floats x) { return folded(x, larger); }
inline float sum(Floats x) {
    return folded(x, [](Floats a, Floats b) { return a + b; });
}

// The lanes where a comparison is true, as bits.
inline uint32_t bits(Ints mask) {
#if defined(__AVX512F__)
    return _mm512_cmplt_epi32_mask((__m512i)mask, _mm512_setzero_si512());
#elif defined(__AVX__)
    return _mm256_movemask_ps((__m256)mask);
#elif defined(__aarch64__)
    return vaddvq_u32((uint32x4_t)(mask & Ints{1, 2, 4, 8}));
#else
    uint32_t found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= (mask[lane] & 1u) << lane;
    return found;
#endif
}

inline bool any_above(Floats x, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ);
#else
    return bits(x > limit);
#endif
}

constexpr float ROUNDING = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer

// e to the x, within 2 units in the last place; 0 below the smallest normal number (Cephes' expf).
inline Floats exponential(Floats x) {
    const Floats magic = splat(ROUNDING);
    Floats bounded = x < -87.3f ? splat(-87.3f) : x > 88.f ? splat(88.f) : x;
    Floats shifted = bounded * 1.44269504088896341f + magic, n = shifted - magic;
    Floats r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    Floats y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.f;
    Ints power = ((Ints)shifted - (Ints)magic + 127) << 23;
    return x < -87.3f ? splat(0.f) : y * (Floats)power;
}
inline Floats hyperbolic_tangent(Floats x) { return 1.f - 2.f / (exponential(2.f * x) + 1.f); }

// The layout of numbers that are multiplied and summed along K: P of them next to each other, which are
// multiplied in PARTS goes, with numbers that are held as Factor.
struct Widened {
    typedef float Factor;
    static inline Floats multiply(Floats sum, Floats k, const float* factor) { return sum + k * *factor; }
};
template <class T> struct Pairs : Widened {
    static constexpr int P = 1, PARTS = 1;
    static inline Floats part_of(Floats numbers, int) { return numbers; }
    static inline Floats part(const T* k, int) { return load(k); }
};

#if defined(__AVX512BF16__) && !defined(SPLIT_PAIRS)  // the processor multiplies pairs
template <> struct Pairs<bfloat16> {
    static constexpr int P = 2, PARTS = 1;
    typedef bfloat16 Factor;
    static inline __m512bh part_of(Words pairs, int) { return (__m512bh)pairs; }
    static inline __m512bh part(const bfloat16* k, int) { return (__m512bh)_mm512_loadu_si512(k); }
    static inline Floats multiply(Floats sum, __m512bh k, const bfloat16* factor) {
        int32_t pair;
        memcpy(&pair, factor, 4);
        return (Floats)_mm512_dpbf16_ps((__m512)sum, k, (__m512bh)_mm512_set1_epi32(pair));
    }
};
#else  // a pair is a word, and either half of it the upper half of a float
template <> struct Pairs<bfloat16> : Widened {
    static constexpr int P = 2, PARTS = 2;
    static inline Floats part_of(Words pairs, int which) {
        return (Floats)(which ? pairs & 0xffff0000 : pairs << 16);
    }
    static inline Floats part(const bfloat16* k, int which) { return part_of(read<Words>(k), which); }
};
#endif

template <class T> using Factor = typename Pairs<T>::Factor;
inline void convert(const bfloat16* from, bfloat16* to) { *to = *from; }
template <class T> inline void convert(const T* from, float* to) { *to = load_one(from); }
template <class T, class U> inline void convert_all(const T* from, int count, U* to) {
    if constexpr (std::is_same_v<T, U>) memcpy(to, from, count * sizeof(T));
    else
        for (int i = 0; i < count; i++) convert(from + i, to + i);
}
