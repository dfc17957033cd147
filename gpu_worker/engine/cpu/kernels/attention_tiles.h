// Scores and outputs of attention by the matrix unit, for bfloat16, or by vectors with the same bits. Weights
// are rounded to bfloat16, too.
#pragma once
#include "amx.h"
#include "pages.h"
#include "vector.h"

// A chunk whose values lie in pairs of keys, as the unit wants them: [CHUNK / 2][width][2]. Zeros follow the
// last key: what is there may be no number.
struct PairedChunk : Chunk<bfloat16, TILE_INPUTS, TILE> {
    Numbers<bfloat16> pairs, zeros;

    void pair_values(const Cache& cache) {
        int width = padded_width(cache);
        pairs.resize(CHUNK * width), zeros.resize(width);
        for (int j = 0; j < CHUNK; j += 2) {
            const bfloat16* first = j < num_keys ? value(j) : zeros.data();
            const bfloat16* second = j + 1 < num_keys ? value(j + 1) : zeros.data();
            for (int d = 0; d < width; d += LANES) {
                Words pair = words(first + d) | words(second + d) << 16;
                memcpy(&pairs[j * width + 2 * d], &pair, sizeof pair);
            }
        }
    }

    void prefetch(const Cache& cache) const {
        for (int v = 0; v < VECTORS; v++)
            for (int d = 0; d < cache.key_dim / 2; d++) __builtin_prefetch(keys[v] + d * key_stride);
        for (int j = 0; j < num_keys; j++)
            for (int d = 0; d < cache.value_dim; d += TILE_INPUTS) __builtin_prefetch(value(j) + d);
    }
};

// The same sums for a few rows, by vectors, which are faster then: in each run of inputs the even ones are
// apart from the odd ones.
template <int N> struct FewRows {
    typedef Floats Run[2][N][VECTORS];
    struct Factors {
        alignas(64) float of[N][TILE_INPUTS];
    };

    static void widen_factors(const bfloat16* from, int stride, Factors& to) {
        for (int n = 0; n < N; n++)
            for (int i = 0; i < TILE_INPUTS; i += LANES) store(&to.of[n][i], load(from + n * stride + i));
    }

    // Adds a run's sums to [N][stride] numbers.
    template <int V> static void add_run(const Run& run, float* to, int stride) {
        for (int n = 0; n < N; n++)
            for (int v = 0; v < V; v++) {
                float* sums = to + n * stride + v * LANES;
                store(sums, load(sums) + (run[0][n][v] + run[1][n][v]));
            }
    }

    static void score(const PairedChunk& chunk, const PairedChunk& next, bool prefetch, int dim,
        const bfloat16* queries, float* scores) {
        std::fill(scores, scores + N * CHUNK, 0.f);
        for (int d = 0; d < dim; d += TILE_INPUTS) {
            Factors factors;
            widen_factors(queries + d, dim, factors);
            Run run = {};
            for (int i = 0; i < TILE_INPUTS; i += 2)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    if (prefetch) __builtin_prefetch(next.keys[v] + (d + i) / 2 * next.key_stride);
                    Words pairs = read<Words>(chunk.keys[v] + (d + i) / 2 * chunk.key_stride);
                    Floats even = (Floats)(pairs << 16), odd = (Floats)(pairs & 0xffff0000);
#pragma GCC unroll 4
                    for (int n = 0; n < N; n++) {
                        run[0][n][v] += even * factors.of[n][i];
                        run[1][n][v] += odd * factors.of[n][i + 1];
                    }
                }
            add_run<VECTORS>(run, scores, CHUNK);
        }
    }

    template <int V> static void accumulate(const PairedChunk& chunk, const PairedChunk& next, bool prefetch,
        int count, int d, int width, const bfloat16* weights, int stride, float* outputs) {
        for (int begin = 0; begin < count; begin += TILE_INPUTS) {
            Factors factors;
            widen_factors(weights + begin, stride, factors);
            Run run = {};
            for (int i = 0; i < TILE_INPUTS && begin + i < count; i += 2)
#pragma GCC unroll 2
                for (int odd = 0; odd < 2; odd++) {
                    int key = begin + i + odd;
                    if (key == count) break;
                    const bfloat16* value = chunk.value(key) + d;
                    if (prefetch)
                        for (int v = 0; v < V; v += 2) __builtin_prefetch(next.value(key) + d + v * LANES);
#pragma GCC unroll 4
                    for (int v = 0; v < V; v++) {
                        Floats numbers = load(value + v * LANES);
#pragma GCC unroll 4
                        for (int n = 0; n < N; n++) run[odd][n][v] += numbers * factors.of[n][i + odd];
                    }
                }
            add_run<V>(run, outputs + d, width);
        }
    }

    static void accumulate_all(const PairedChunk& chunk, const PairedChunk& next, bool prefetch, int count,
        int width, const bfloat16* weights, int stride, float* outputs) {
        int d = 0;
        for (; d + VECTORS * LANES <= width; d += VECTORS * LANES)
            accumulate<VECTORS>(chunk, next, prefetch, count, d, width, weights, stride, outputs);
        for (; d < width; d += LANES)
            accumulate<1>(chunk, next, prefetch, count, d, width, weights, stride, outputs);
    }
};

// Calls `each` with FewRows of as many rows as their sums stay in registers for.
template <class F> void for_few_rows(int rows, F each) {
    int row = 0;
    for (; row + 3 <= rows; row += 3) each(FewRows<3>{}, row);
    if (rows - row == 2) each(FewRows<2>{}, row);
    if (rows - row == 1) each(FewRows<1>{}, row);
}

struct TileProducts {
    static constexpr int FEW = 6;  // rows that vectors are faster for
    static constexpr int ROWS = TILE;  // of queries that are multiplied at once, and that memory has
    static constexpr int WEIGHTS = 2 * CHUNK;  // from one query's weights to the next one's
    typedef PairedChunk Keys;
    typedef bfloat16 Query, Weight;

    typedef FlushedDenormals Arithmetic;

    static void prepare(int rows, Keys& chunk, const Keys& next, const Cache& cache) {
        if (rows <= FEW) return;
        next.prefetch(cache);
        chunk.pair_values(cache);
    }

    // Scores [ROWS][CHUNK] of the first `count` keys.
    static void score(int rows, int count, const Keys& chunk, const Keys& next, bool prefetch, int dim,
        const bfloat16* queries, float* scores) {
        if (rows <= FEW)
            return for_few_rows(rows, [&](auto few, int row) {
                few.score(chunk, next, prefetch && !row, dim, queries + row * dim, scores + row * CHUNK);
            });
        for (int v = 0; v * TILE < count; v += 2)
            score_pair(
                {queries, dim}, dim, keys_of(chunk, v), keys_of(chunk, v + 1), {scores + v * TILE, CHUNK});
    }

    static Matrix<const bfloat16> keys_of(const Keys& chunk, int v) {
        return {chunk.keys[v], chunk.key_stride};
    }

    // Of two tiles of keys, which may lie in two blocks.
    static void score_pair(Matrix<const bfloat16> queries, int dim, Matrix<const bfloat16> left,
        Matrix<const bfloat16> right, Matrix<float> scores) {
        zero_tile<0>(), zero_tile<1>();
        for (int d = 0; d < dim; d += TILE_INPUTS) {
            load_tile<4>(queries.from(0, d));
            load_tile<6>(left.from(d / 2, 0)), load_tile<7>(right.from(d / 2, 0));
            multiply_tiles<0, 4, 6>(), multiply_tiles<1, 4, 7>();
        }
        store_tile<0>(scores), store_tile<1>(scores.from(0, TILE));
    }

    // Adds the first `count` values, multiplied with weights, to outputs [ROWS][width].
    static void accumulate(int rows, int count, const Keys& chunk, const Keys& next, bool prefetch, int width,
        const bfloat16* weights, float* outputs) {
        if (rows <= FEW)
            return for_few_rows(rows, [&](auto few, int row) {
                few.accumulate_all(chunk, next, prefetch && !row, count, width, weights + row * WEIGHTS,
                    WEIGHTS, outputs + row * width);
            });
        Matrix<const bfloat16> left{weights, WEIGHTS}, values{chunk.pairs.data(), 2 * width};
        Matrix<float> to{outputs, width};
        int keys = rounded_up(count, TILE_INPUTS), d = 0;
        for (; d + 2 * TILE <= width; d += 2 * TILE)
            add_product<1, 2>(left, keys, values.from(0, 2 * d), to.from(0, d), [](int) {});
        if (d < width) add_product<1, 1>(left, keys, values.from(0, 2 * d), to.from(0, d), [](int) {});
    }
};
