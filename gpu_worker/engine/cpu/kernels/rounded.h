// Products of rows rounded to 8 bits with weights in blocks of integers, which are summed as integers within a
// block, as llama.cpp does: faster than weights that are expanded, and not exact.
#pragma once
#include "blocks.h"
#include "structs.h"
#include "vector.h"

// A row is rounded in grains. The largest input of one is 127 or -127. Its sum, and those of its halves, are what
// offsets of weights are multiplied with.
struct Grain {
    int8_t bytes[32];
    float scale, sum, sums[2];
};
constexpr int GRAIN = sizeof(Grain::bytes);

// Sums of products of bytes: those of weights have no sign, those of rows have one. Unless ANY_BYTES, sums of a
// grain have room for weights of up to 4 bits.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) && !defined(__AVX512F__)
constexpr bool HAS_DOTS = true, ANY_BYTES = true;
typedef Ints Dots;
inline Dots dot(Dots sum, Words weights, Words row) {
#if defined(__AVX512F__)
    return (Dots)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)row);
#else
    return (Dots)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)row);
#endif
}
#elif defined(__AVX512BW__) || defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool HAS_DOTS = true, ANY_BYTES = false;
typedef int16_t Dots __attribute__((vector_size(4 * LANES)));  // two for each number
#if defined(__AVX512BW__)
inline Dots dot(Dots sum, Words weights, Words row) {
    return sum + (Dots)_mm512_maddubs_epi16((__m512i)weights, (__m512i)row);
}
inline Ints whole(Dots dots) { return (Ints)_mm512_madd_epi16((__m512i)dots, _mm512_set1_epi16(1)); }
#else
inline Dots dot(Dots sum, Words weights, Words row) {
    return sum + (Dots)_mm256_maddubs_epi16((__m256i)weights, (__m256i)row);
}
inline Ints whole(Dots dots) { return (Ints)_mm256_madd_epi16((__m256i)dots, _mm256_set1_epi16(1)); }
#endif
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr bool HAS_DOTS = true, ANY_BYTES = false;
typedef Ints Dots;
inline Dots dot(Dots sum, Words weights, Words row) {
    return (Dots)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, (int8x16_t)row);
}
#else
constexpr bool HAS_DOTS = false, ANY_BYTES = false;
typedef Ints Dots;
inline Dots dot(Dots sum, Words, Words) { return sum; }
#endif
inline Ints whole(Ints dots) { return dots; }

// Whether rows of this type can be rounded: the matrix unit is faster, and exact.
template <class T> constexpr bool ROUNDS = HAS_DOTS && !BY_TILES<T> && (Pairs<T>::P == 1 || LANES >= 8);

// Whether the rows of a layer are.
template <class T> inline bool is_rounded(const Linear& linear) {
    const Blocks& blocks = linear.blocks;
    return ROUNDS<T> && blocks.rounds && blocks.bits && !blocks.codes && linear.inputs % GRAIN == 0;
}

// inputs of a row → its grains, whose bytes are in the order of quants in words: of 8 in bfloat16 the even ones
// come first.
template <class T> void round_row(const Factor<T>* from, int inputs, Grain* to) {
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    const Floats magic = splat(ROUNDING);
    Ints order;
    for (int lane = 0; lane < LANES; lane++)
        order[lane] = Pairs<T>::P == 1 ? lane : lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;
    for (int k = 0; k < inputs; k += GRAIN, from += GRAIN, to++) {
        Floats most = {}, sums[2] = {};
        for (int i = 0; i < GRAIN; i += LANES) most = larger(most, larger(load(from + i), -load(from + i)));
        float top = largest(most), factor = top > 0 ? 127 / top : 0;
        for (int i = 0; i < GRAIN; i += LANES) {
            Floats rounded = load(from + i) * factor + magic;
            sums[i / (GRAIN / 2)] += rounded - magic;
            if (Pairs<T>::P == 2) rounded = shuffled(rounded, order);
            Bytes bytes = __builtin_convertvector((Ints)rounded - (Ints)magic, Bytes);
            memcpy(to->bytes + i, &bytes, sizeof bytes);
        }
        to->scale = top / 127;
        for (int half = 0; half < 2; half++) to->sums[half] = to->scale * sum(sums[half]);
        to->sum = to->sums[0] + to->sums[1];
    }
}

// The bytes of a row that words of P outputs next to each other are multiplied with.
template <int P> inline Words repeat_bytes(const int8_t* bytes) {
    if constexpr (P == 1) return Words{} + read<uint32_t>(bytes);
    else {
        typedef uint64_t Pairs __attribute__((vector_size(4 * LANES)));
        return (Words)(Pairs{} + read<uint64_t>(bytes));
    }
}

// Sums of P lanes next to each other: P vectors → one.
template <int P> inline Floats fold_lanes(const Floats* sums) {
    if constexpr (P == 1) return sums[0];
    else {
        Floats found;
        for (int lane = 0; lane < LANES; lane++) {
            Floats from = sums[lane / (LANES / 2)];
            int first = lane % (LANES / 2) * 2;
            found[lane] = from[first] + from[first + 1];
        }
        return found;
    }
}

// Adds the products of N rounded rows and a panel to sums [N][outputs]. Integers are summed over STEP inputs.
template <class T, class K, int STEP, int N>
void multiply_rounded(const Grain* rows, const Linear& linear, int panel, float* sums) {
    typedef typename K::Scale S;
    constexpr int P = Pairs<T>::P, BITS = K::BITS, OUTPUTS = SPAN<T> * LANES, VECTORS = P * SPAN<T>;
    constexpr int HALVES = 8 / BITS, PARTS = BITS == 8 && !ANY_BYTES ? 2 : 1;
    const int size = linear.blocks.size, grains = linear.inputs / GRAIN;
    const int64_t first = (int64_t)panel * linear.inputs * OUTPUTS;
    const uint32_t* quants = (const uint32_t*)linear.blocks.quants + first / PLACES<BITS>;
    const S* scales = (const S*)linear.blocks.scales + first / size;
    const S* offsets = (const S*)linear.blocks.offsets + first / size;
    Floats total[N][VECTORS] = {};
    for (int k = 0, left = size; k < linear.inputs; k += STEP) {
        const Grain* grain = rows + k / GRAIN;
        Dots dots[N][VECTORS][PARTS] = {};
        for (int i = k % GRAIN; i < k % GRAIN + STEP; i += P * PLACES<BITS>, quants += VECTORS * LANES) {
            Words words[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                words[v] = read<Words>(quants + v * LANES) ^ (BITS == 8 ? 0x80808080 : 0);
                if (N == 1) __builtin_prefetch((const char*)(quants + v * LANES) + BLOCKS_AHEAD);
            }
#pragma GCC unroll 2
            for (int shift = 0; shift < HALVES * PARTS; shift++) {
                Words weights[VECTORS];
                for (int v = 0; v < VECTORS; v++)
                    weights[v] = HALVES * PARTS == 1 ? words[v] : words[v] >> 4 * shift & 0x0f0f0f0f;
#pragma GCC unroll 4
                for (int n = 0; n < N; n++) {
                    Words row = repeat_bytes<P>(grain[n * grains].bytes + i + shift / PARTS * 4 * P);
#pragma GCC unroll 6
                    for (int v = 0; v < VECTORS; v++)
                        dots[n][v][shift % PARTS] = dot(dots[n][v][shift % PARTS], weights[v], row);
                }
            }
        }
        Floats scale[VECTORS], offset[VECTORS] = {};
        load_factors<T>(scales, scale);
        if (K::OFFSETS) load_factors<T>(offsets, offset);
        if (BITS == 8)
            for (int v = 0; v < VECTORS; v++) offset[v] -= 128.f * scale[v];  // bytes are without a sign
        if (!(left -= STEP)) scales += OUTPUTS, offsets += OUTPUTS, left = size;
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            const Grain& own = grain[n * grains];
            float added = (STEP == GRAIN ? own.sum : own.sums[k / STEP % 2]) / P;  // in P lanes
#pragma GCC unroll 6
            for (int v = 0; v < VECTORS; v++) {
                Ints sum = whole(dots[n][v][0]);
                if (PARTS == 2) sum += whole(dots[n][v][PARTS - 1]) << 4;
                total[n][v] += __builtin_convertvector(sum, Floats) * scale[v] * own.scale;
                if (K::OFFSETS || BITS == 8) total[n][v] += offset[v] * added;
            }
        }
    }
    for (int n = 0; n < N; n++)
        for (int w = 0; w < SPAN<T>; w++) {
            float* to = sums + (n * SPAN<T> + w) * LANES;
            store(to, load(to) + fold_lanes<P>(total[n] + w * P));
        }
}

// The same for any number of rows.
template <class T, class K, int STEP, int N = 4>
void multiply_all_rounded(int count, const Grain* rows, const Linear& linear, int panel, float* sums) {
    for (; count >= N; count -= N, rows += N * (linear.inputs / GRAIN), sums += N * SPAN<T> * LANES)
        multiply_rounded<T, K, STEP, N>(rows, linear, panel, sums);
    if constexpr (N > 1) multiply_all_rounded<T, K, STEP, N / 2>(count, rows, linear, panel, sums);
}

template <class T>
void multiply_rounded_rows(int count, const Grain* rows, const Linear& linear, int panel, float* sums) {
    with_kind(linear.blocks, [&](auto kind) {
        typedef decltype(kind) K;
        if constexpr (ROUNDS<T> && !K::CODES) {
            if (linear.blocks.size < GRAIN)
                multiply_all_rounded<T, K, GRAIN / 2>(count, rows, linear, panel, sums);
            else multiply_all_rounded<T, K, GRAIN>(count, rows, linear, panel, sums);
        }
    });
}

// Compiled once, in products.cpp.
extern template void multiply_rounded_rows<float>(int, const Grain*, const Linear&, int, float*);
extern template void multiply_rounded_rows<bfloat16>(int, const Grain*, const Linear&, int, float*);
