// Scores and outputs of attention by the processor's vectors, for numbers of any type.
#pragma once
#include "pages.h"
#include "vector.h"

template <class T> struct VectorProducts {
    static constexpr int ROWS = LANES == 16 ? 6 : 3;  // their sums stay in registers
    typedef Chunk<T, Pairs<T>::P, VECTORS * LANES> Keys;
    typedef Factor<T> Query;
    typedef float Weight;

    struct Arithmetic {
        Arithmetic() {}
    };

    static void prepare(int, Keys&, const Keys&, const Cache&) {}

    // Scores [rows][CHUNK] of rows of queries. With `prefetch`, the same place of the next chunk is
    // prefetched meanwhile: memory is slow, and serves few requests at a time.
    template <int N = ROWS> static void score(int rows, int, const Keys& chunk, const Keys& next,
        bool prefetch, int dim, const Query* queries, float* scores) {
        if (rows == N)
            return (prefetch ? score_all<N, true> : score_all<N, false>)(chunk, next, dim, queries, scores);
        if constexpr (N > 1) score<N - 1>(rows, 0, chunk, next, prefetch, dim, queries, scores);
    }

    // Adds the first `count` values, multiplied with weights [rows][CHUNK], to outputs [rows][width].
    template <int N = ROWS> static void accumulate(int rows, int count, const Keys& chunk, const Keys& next,
        bool prefetch, int width, const float* weights, float* outputs) {
        if (rows == N)
            return (prefetch ? accumulate_all<N, true> : accumulate_all<N, false>)(
                chunk, next, count, width, weights, outputs);
        if constexpr (N > 1)
            accumulate<N - 1>(rows, count, chunk, next, prefetch, width, weights, outputs);
    }

    template <int N, bool PREFETCH> static void score_all(
        const Keys& chunk, const Keys& next, int dim, const Query* queries, float* scores) {
        constexpr int P = Pairs<T>::P;
        Floats sums[N][VECTORS] = {};
        for (int d = 0; d < dim / P; d++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                if (PREFETCH) __builtin_prefetch(next.keys[v] + d * next.key_stride);
#pragma GCC unroll 2
                for (int part = 0; part < Pairs<T>::PARTS; part++) {
                    auto keys = Pairs<T>::part(chunk.keys[v] + d * chunk.key_stride, part);
                    keep_in_register(keys);
#pragma GCC unroll 8
                    for (int n = 0; n < N; n++)
                        sums[n][v] = Pairs<T>::multiply(sums[n][v], keys, queries + n * dim + d * P + part);
                }
            }
        for (int n = 0; n < N; n++)
            for (int v = 0; v < VECTORS; v++) store(scores + n * CHUNK + v * LANES, sums[n][v]);
    }

    template <int N, bool PREFETCH> static void accumulate_all(const Keys& chunk, const Keys& next, int count,
        int width, const float* weights, float* outputs) {
        for (int d = 0; d < width; d += VECTORS * LANES) {
            Floats sums[N][VECTORS];
            for (int n = 0; n < N; n++)
                for (int v = 0; v < VECTORS; v++) sums[n][v] = load(outputs + n * width + d + v * LANES);
            for (int j = 0; j < count; j++) {
                const T *value = chunk.value(j) + d, *ahead = next.value(j) + d;
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    if (PREFETCH && v * LANES * sizeof(T) % 64 == 0) __builtin_prefetch(ahead + v * LANES);
                    Floats numbers = load(value + v * LANES);
                    keep_in_register(numbers);
#pragma GCC unroll 8
                    for (int n = 0; n < N; n++) sums[n][v] += numbers * weights[n * CHUNK + j];
                }
            }
            for (int n = 0; n < N; n++)
                for (int v = 0; v < VECTORS; v++) store(outputs + n * width + d + v * LANES, sums[n][v]);
        }
    }
};
