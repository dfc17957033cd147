// Weights in blocks along their inputs, as GGUF files have them: a quant times its block's scale, plus its
// block's offset, is a weight. They are expanded to the model's type in the order of plain weights: so what
// is multiplied, and every bit of what comes out, is that of weights widened at load.
#pragma once
#include "structs.h"
#include "vector.h"

template <class T> constexpr int SPAN = WIDTH<T>;  // vectors of a panel's outputs
template <class T> constexpr int EXPANDED = BY_TILES<T> ? 512 : 128;  // inputs; a multiple of any block size
constexpr int BLOCKS_AHEAD = 2048;  // bytes of quants prefetched in advance

// Quants lie in words of 32 bits, [panels][inputs / (P * PLACES)][panel][P]: of bfloat16 (P = 2) the first of
// two words has the quants of PLACES even inputs, the second those of the odd ones; of float32 a word has
// those of PLACES inputs in turn. A word begins with its lowest byte; of quants of 4 bits the first half are
// the lower halves of its bytes, the second half the upper ones.
template <int BITS> constexpr int PLACES = 32 / BITS;

// What blocks of weights are like: bits of a quant, and whether there are offsets and codes.
template <int B, bool O, bool C, class S> struct Kind {
    static constexpr int BITS = B;
    static constexpr bool OFFSETS = O, CODES = C;
    typedef S Scale;
};

// What quants of 4 bits stand for.
struct Codes {
    Floats numbers[16 / LANES];
    explicit Codes(const float* codes) {
        for (int part = 0; part < 16 / LANES; part++)
            for (int lane = 0; lane < LANES; lane++) {
                int quant = part * LANES + lane;
                numbers[part][lane] = codes ? codes[quant] : quant;
            }
    }
};

// The number of the quant at a place in each word: of 4 bits, or of 8 with a sign.
template <class K> inline Floats read_quants(Words words, int place, const Codes& codes) {
    if constexpr (K::BITS == 8)
        return __builtin_convertvector((Ints)(words << (24 - 8 * place)) >> 24, Floats);
    words >>= place % 4 * 8 + place / 4 * 4;
#if defined(__AVX512F__)
    return (Floats)_mm512_permutexvar_ps((__m512i)words, (__m512)codes.numbers[0]);  // by the lowest 4 bits
#else
    Ints quants = (Ints)(words & 15);
    if constexpr (!K::CODES) return __builtin_convertvector(quants, Floats);
#if defined(__AVX2__)  // the lowest 3 bits choose in each half of the codes, the fourth bit a half
    __m256 low = _mm256_permutevar8x32_ps((__m256)codes.numbers[0], (__m256i)words);
    __m256 high = _mm256_permutevar8x32_ps((__m256)codes.numbers[1], (__m256i)words);
    return (Floats)_mm256_blendv_ps(low, high, (__m256)(words << 28));
#elif defined(__aarch64__)  // a number's bytes are at four times its quant
    uint8x16_t places = (uint8x16_t)(quants * 0x04040404 + 0x03020100);
    return (Floats)vqtbl4q_u8(read<uint8x16x4_t>(codes.numbers), places);
#else
    Floats found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = ((const float*)codes.numbers)[quants[lane]];
    return found;
#endif
#endif
}

// Two vectors as one of bfloat16, rounded to even: the numbers of the first come first.
inline Words round_both(Floats first, Floats second) {
#if defined(__AVX512BF16__)
    return (Words)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    auto rounded = [](Floats x) { return (__m256i)(((Words)x + 0x7fff + ((Words)x >> 16 & 1)) >> 16); };
    __m256i halves = _mm256_packus_epi32(rounded(first), rounded(second));
    return (Words)_mm256_permute4x64_epi64(halves, 0xd8);
#else
    bfloat16 both[2 * LANES];
    store(both, first);
    store(both + LANES, second);
    return read<Words>(both);
#endif
}

// VECTORS * LANES numbers, each P times, one after the other.
template <class T, int VECTORS = SPAN<T>, class S> inline void load_factors(const S* from, Floats* to) {
    for (int w = 0; w < VECTORS; w++) {
        Floats numbers = load(from + w * LANES);
        if constexpr (Pairs<T>::P == 1) to[w] = numbers;
        else {
            Ints places;
            for (int lane = 0; lane < LANES; lane++) places[lane] = lane / 2;
            to[2 * w] = shuffled(numbers, places);
            to[2 * w + 1] = shuffled(numbers, places + LANES / 2);
        }
    }
}

// Weights as they are multiplied: vectors of float32, or of pairs of bfloat16.
template <class T> using Expanded = std::conditional_t<Pairs<T>::P == 1, Floats, Words>;

// Calls `each(k, weights)` for every P inputs of a panel of SPAN<T> * LANES outputs, from an input on that
// begins a block; weights are SPAN<T> vectors. A product of a quant and a scale is exact in float32, so it
// does not matter whether it is fused with the sum.
template <class T, class K, class F>
inline void expand_weights(const Linear& linear, int panel, int from, int count, F each) {
    typedef typename K::Scale S;
    constexpr bool OFFSETS = K::OFFSETS;
    constexpr int P = Pairs<T>::P, BITS = K::BITS, OUTPUTS = SPAN<T> * LANES, VECTORS = P * SPAN<T>;
    const Codes codes(linear.blocks.codes);
    const int size = linear.blocks.size;
    const uint32_t* quants = (const uint32_t*)linear.blocks.quants
        + ((int64_t)panel * linear.inputs + from) / PLACES<BITS> * OUTPUTS;
    const int64_t block = ((int64_t)panel * linear.inputs + from) / size * OUTPUTS;
    const S* scales = (const S*)linear.blocks.scales + block;
    const S* offsets = (const S*)linear.blocks.offsets + block;
    for (int first = 0; first < count; first += size, scales += OUTPUTS, offsets += OUTPUTS) {
        Floats scale[VECTORS], offset[VECTORS];
        load_factors<T>(scales, scale);
        if (OFFSETS) load_factors<T>(offsets, offset);
        for (int k = first; k < first + size; k += P * PLACES<BITS>, quants += VECTORS * LANES) {
            Words words[VECTORS];
#pragma GCC unroll 6
            for (int v = 0; v < VECTORS; v++) {
                words[v] = read<Words>(quants + v * LANES);
                __builtin_prefetch((const char*)(quants + v * LANES) + BLOCKS_AHEAD);
            }
#pragma GCC unroll 8
            for (int place = 0; place < PLACES<BITS>; place++) {
                Floats numbers[VECTORS];
#pragma GCC unroll 6
                for (int v = 0; v < VECTORS; v++) {
                    numbers[v] = read_quants<K>(words[v], place, codes) * scale[v];
                    if (OFFSETS) numbers[v] += offset[v];
                }
                if constexpr (P == 1) each(k + place, numbers);
                else {
                    Words pairs[SPAN<T>];
                    for (int w = 0; w < SPAN<T>; w++)
                        pairs[w] = round_both(numbers[2 * w], numbers[2 * w + 1]);
                    each(k + 2 * place, pairs);
                }
            }
        }
    }
}

// Calls `with` with the Kind of this layer's blocks.
template <class F> inline void with_kind(const Blocks& blocks, F with) {
    auto with_scales = [&](auto scale) {
        typedef decltype(scale) S;
        if (blocks.codes) with(Kind<4, false, true, S>{});
        else if (blocks.bits == 4 && blocks.offsets) with(Kind<4, true, false, S>{});
        else if (blocks.bits == 4) with(Kind<4, false, false, S>{});
        else if (blocks.offsets) with(Kind<8, true, false, S>{});
        else with(Kind<8, false, false, S>{});
    };
    if (blocks.half_scales) with_scales(float16{});
    else with_scales(float{});
}

// `count` inputs of a panel → [count / P][outputs][P]
template <class T> inline void expand(const Linear& linear, int panel, int from, int count, T* to) {
    with_kind(linear.blocks, [&](auto kind) {
        expand_weights<T, decltype(kind)>(
            linear, panel, from, count, [&](int k, const Expanded<T>* weights) {
#pragma GCC unroll 3
                for (int w = 0; w < SPAN<T>; w++) {
                    Expanded<T> some = weights[w];
                    memcpy(to + ((int64_t)k * SPAN<T> + w * Pairs<T>::P) * LANES, &some, sizeof some);
                }
            });
    });
}

// Adds the products of N rows, `stride` numbers apart, and a panel to sums [N][outputs], weights being
// expanded in registers.
template <class T, int N>
void multiply_expanding(const Factor<T>* rows, int stride, const Linear& linear, int panel, float* sums) {
    typedef Pairs<T> Pair;
    with_kind(linear.blocks, [&](auto kind) {
        Floats total[N][SPAN<T>];
        for (int n = 0; n < N; n++)
            for (int w = 0; w < SPAN<T>; w++) total[n][w] = load(sums + (n * SPAN<T> + w) * LANES);
        expand_weights<T, decltype(kind)>(
            linear, panel, 0, linear.inputs, [&](int k, const Expanded<T>* weights) {
#pragma GCC unroll 2
                for (int part = 0; part < Pair::PARTS; part++)
#pragma GCC unroll 8
                    for (int n = 0; n < N; n++)
#pragma GCC unroll 3
                        for (int w = 0; w < SPAN<T>; w++)
                            total[n][w] = Pair::multiply(total[n][w], Pair::part_of(weights[w], part),
                                rows + (int64_t)n * stride + k + part);
            });
        for (int n = 0; n < N; n++)
            for (int w = 0; w < SPAN<T>; w++) store(sums + (n * SPAN<T> + w) * LANES, total[n][w]);
    });
}

// The same for one row, with the sums of the matrix unit: in each run of inputs the even ones are apart from
// the odd ones.
inline void multiply_expanding_in_runs(const bfloat16* row, const Linear& linear, int panel, float* sums) {
    typedef bfloat16 T;
    FlushedDenormals arithmetic;
    Floats even[SPAN<T>] = {}, odd[SPAN<T>] = {};
    with_kind(linear.blocks, [&](auto kind) {
        expand_weights<T, decltype(kind)>(
            linear, panel, 0, linear.inputs, [&](int k, const Words* weights) {
                Floats first = splat(load_one(row + k)), second = splat(load_one(row + k + 1));
                for (int w = 0; w < SPAN<T>; w++) {
                    even[w] += (Floats)(weights[w] << 16) * first;
                    odd[w] += (Floats)(weights[w] & 0xffff0000) * second;
                }
                if ((k + 2) % TILE_INPUTS && k + 2 < linear.inputs) return;
                for (int w = 0; w < SPAN<T>; w++) {
                    store(sums + w * LANES, load(sums + w * LANES) + (even[w] + odd[w]));
                    even[w] = odd[w] = Floats{};
                }
            });
    });
}
